"""The same with nothing replaced: real vLLM engines that stay warm while learner and buffer die."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from local_runs import REPOSITORY
from role_runs import outlive_everything, shells

pytestmark = [pytest.mark.vllm, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 16


@pytest.fixture
def config(tmp_path: Path, tiny_task: Path) -> Path:
    """configs/tiny.yaml with smaller steps, one thread for each program, and no evaluation."""
    tree = yaml.safe_load((REPOSITORY / "configs" / "tiny.yaml").read_text())
    tree["model"]["path"] = str(tiny_task / "model")
    tree["data"] |= {"train_files": [str(tiny_task / "train.jsonl")], "val_files": []}
    tree |= {
        "max_steps": NUM_STEPS,
        "prompts_per_step": 8,
        "checkpoint": {"every": 2},
        "network": {"wait_for_buffer_s": 60},
        "local": {"cpu_threads": 1},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_real_engines_outlive_learner_and_buffer(
    config: Path, tmp_path: Path, tiny_task: Path
) -> None:
    with shells(config, tmp_path) as run:
        outlive_everything(run)
        fates = run.fates()
        num_rows = len((tiny_task / "train.jsonl").read_text().splitlines())
        assert fates["trained"] == 8 * NUM_STEPS
        assert sum(fates.values()) == num_rows
        assert {record["step"] for record in run.steps()} == set(range(NUM_STEPS))
        assert (run.run_dir / "final" / "model.safetensors").exists()
