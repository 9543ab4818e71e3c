"""A user's mistake ends the launcher in one message and exit code 2, before any engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from local_runs import run_local

pytestmark = pytest.mark.e2e

GOOD_ROW = {"prompt": "2 + 2 =", "data_source": "sums", "reward_model": {"ground_truth": "4"}}


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    """A file that is right as it stands."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(GOOD_ROW) + "\n") * 8)
    tree = {
        "prompts_per_step": 2,
        "model": {"path": str(random_tiny_task / "model")},
        "data": {"train_files": [str(rows)]},
        "reward": {"path": "tests/rewards_by_text.py:exact"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("max_stalenes=2", "did you mean 'max_staleness'?"),
        ("learner.optim.lr=fast", "learner.optim.lr"),
        ("max_staleness=-1", "max_staleness"),
        ("model.path=no/such/model", "no/such/model"),
        ("data.train_files=[no-such.jsonl]", "no-such.jsonl"),
        ("reward.path=tests/rewards_by_text.py:exakt", "exact"),
        ("group_size=1", "group_size"),
        ("weights.publish_every=9", "publish_every"),
        ("weights.host=203.0.113.7", "weights.host"),
        ("network.buffer=tcp://0.0.0.0:5570", "network.buffer"),
    ],
)
def test_a_mistake_in_the_configuration(
    config: Path, tmp_path: Path, override: str, says: str
) -> None:
    refuse(config, tmp_path, override, says=says)


def test_a_data_file_with_a_bad_row(config: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + json.dumps({"prompt": "3 + 3 ="}) + "\n")
    refuse(config, tmp_path, says="rows.jsonl")


def test_a_run_directory_that_is_not_empty(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    refuse(config, tmp_path, says="checkpoint.resume=auto", leaves=["metrics.jsonl"])


def refuse(
    config: Path, directory: Path, *overrides: str, says: str, leaves: list[str] | None = None
) -> None:
    """The launcher ends with exit code 2 and a message with `says`; the run directory stays."""
    finished = run_local(config, *overrides, directory=directory, timeout_s=60)
    assert finished.code == 2, finished.logs()
    assert says in finished.errors
    assert "Traceback" not in finished.errors
    assert len(finished.errors.splitlines()) <= 5
    found = finished.run_dir.iterdir() if finished.run_dir.exists() else []
    assert [path.name for path in found] == (leaves or [])
