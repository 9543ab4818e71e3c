"""Fixtures: one whole run with the scripted engine, for all who look at how a good one went."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from local_runs import Finished, run_local

STEPS, GROUPS, ROLLOUTS = 6, 4, 4


@pytest.fixture(scope="session")
def scripted_config(tmp_path_factory: pytest.TempPathFactory, random_tiny_task: Path) -> Path:
    """A configuration file for a random tiny model and the scripted engine."""
    tree = {
        "max_steps": STEPS,
        "prompts_per_step": GROUPS,
        "group_size": ROLLOUTS,
        "algorithm": "grpo",
        "model": {"path": str(random_tiny_task / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(random_tiny_task / "train.jsonl")],
            "max_prompt_length": 64,
            "max_response_length": 8,
            "shuffle": False,
        },
        "reward": {"path": "tests/rewards_by_text.py:checksum", "workers": 1},
        "generator": {"engine": "scripted", "scripted": {"tokens_per_s": 200}},
        "buffer": {"zero_variance": "train"},
        "learner": {"gradient_checkpointing": False, "optim": {"lr": 1e-3}},
        "network": {"heartbeat_s": 1.0},
    }
    path = tmp_path_factory.mktemp("scripted") / "scripted.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture(scope="session")
def scripted_run(scripted_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """STEPS steps of GROUPS prompts with max_staleness 2."""
    directory = tmp_path_factory.mktemp("scripted_run")
    return run_local(scripted_config, "max_staleness=2", directory=directory)
