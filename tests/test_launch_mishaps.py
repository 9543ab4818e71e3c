"""What goes wrong in a run of `asyncrl-launch local` ends it quickly, with the cause on stderr."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from local_runs import launched, run_local, still_running, write_scripted_config

pytestmark = pytest.mark.e2e

FAST = "generator.scripted.tokens_per_s=500"


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_scripted_config(tmp_path / "config.yaml", random_tiny_task)


def test_a_generator_that_cannot_start_ends_the_run_and_says_why(
    config: Path, tmp_path: Path
) -> None:
    rewards = tmp_path / "my_rewards.py"
    rewards.write_text("def score(**_):\n    return 0.0\n")
    with launched(config, f"reward.path={rewards}:score", directory=tmp_path) as launcher:
        # The launcher has checked it before, so this is about what a generator finds.
        while not (tmp_path / "run" / "logs" / "buffer.log").exists():
            time.sleep(0.01)
        rewards.write_text("import no_such_module\n")
        finished = launcher.finish()
    assert finished.code == 2, finished.logs()
    assert "generator-0 ended with exit code 2" in finished.errors
    assert "no_such_module" in finished.errors
    assert str(finished.run_dir / "logs" / "generator-0.log") in finished.errors


def test_a_rank_that_raises_ends_the_run_with_its_error(config: Path, tmp_path: Path) -> None:
    with launched(config, "local.learner_ranks=2", directory=tmp_path) as launcher:
        launcher.wait_for_steps(1)
        children = launcher.children()
        (tmp_path / "run" / "checkpoints").write_text("in the way of the first checkpoint")
        began = time.monotonic()
        finished = launcher.finish()
    assert time.monotonic() - began < 30
    assert finished.code == 1, finished.logs()
    assert "learner ended with exit code 1" in finished.errors
    assert "FileExistsError" in finished.errors or "NotADirectoryError" in finished.errors
    assert still_running(children, timeout_s=0) == []


@pytest.mark.slow
def test_a_mistake_that_one_rank_alone_finds_is_one_message_and_exit_code_2(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    settings = ("local.learner_ranks=2", f"weights.dir={tmp_path}/file/weights", FAST)
    finished = run_local(config, *settings, directory=tmp_path)
    assert finished.code == 2, finished.logs()
    assert "learner ended with exit code 2" in finished.errors
    assert "learner rank 0: weights cannot be published in" in finished.errors
    assert "Traceback" not in finished.errors


@pytest.mark.slow
def test_two_runs_at_once_do_not_touch_each_other(config: Path, tmp_path: Path) -> None:
    with (
        launched(config, "max_steps=3", directory=tmp_path, name="one") as one,
        launched(config, "max_steps=3", directory=tmp_path, name="two") as two,
    ):
        two.wait_for_steps(1)
        one.process.kill()
        finished = two.finish()
    assert finished.code == 0, finished.logs()
    assert len(finished.steps) == 3


@pytest.mark.slow
def test_data_that_ends_before_max_steps_ends_the_run_well(
    config: Path, tmp_path: Path, random_tiny_task: Path
) -> None:
    rows = tmp_path / "ten.jsonl"
    lines = (random_tiny_task / "train.jsonl").read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:10]))
    places = (f"data.train_files=[{rows}]", "max_steps=100", FAST)
    finished = run_local(config, *places, directory=tmp_path)
    assert finished.code == 0, finished.logs()
    assert [record["step"] for record in finished.steps] == [0, 1, 2]
    assert "data exhausted after 3 steps: 10 prompts in 1 epochs" in finished.output


BOTH = [(n, bound) for n in (1, 2, 3) for bound in (0, 1, 4)]
QUICK = [(3, 4)]


@pytest.mark.parametrize(
    ("max_steps", "max_staleness"),
    [pytest.param(*p, marks=[] if p in QUICK else [pytest.mark.slow]) for p in BOTH],
)
def test_every_process_ends_well_with_the_last_steps_checkpoint(
    config: Path, tmp_path: Path, max_steps: int, max_staleness: int
) -> None:
    """With two ranks where there are steps enough."""
    several = ("local.learner_ranks=2",) if max_steps == 3 else ()
    bounds = (f"max_steps={max_steps}", f"max_staleness={max_staleness}")
    finished = run_local(config, *bounds, *several, FAST, directory=tmp_path)
    assert finished.code == 0, finished.logs()
    assert finished.errors == ""
    assert len(finished.steps) == max_steps
    newest = max(path.name for path in (finished.run_dir / "checkpoints").iterdir())
    assert newest == f"version-{max_steps:08d}"
