"""The configuration of a run that is there to move weights: one generator, small requests."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from asyncrl.config import Config

PROMPT_TOKENS = 16
RESPONSE_TOKENS = 40
"""Together within what the tiny model can take."""


def make_config(
    model: Path, *, place: Path = Path("none"), staging: Literal["host", "none"] = "host"
) -> Config:
    """Data lies in `place`. Steps are of one group of two rollouts, of any
    age: they are there to be committed."""
    return Config.model_validate(
        {
            "max_staleness": 100_000,
            "prompts_per_step": 1,
            "group_size": 2,
            "max_epochs": 100_000,
            "model": {"path": str(model)},
            "data": {
                "train_files": [str(place / "train.jsonl")],
                "shuffle": False,
                "max_prompt_length": PROMPT_TOKENS,
                "max_response_length": RESPONSE_TOKENS,
            },
            "reward": {"path": "asyncrl.tasks.exact_match:compute_score"},
            "generator": {"vllm": {"max_num_seqs": 64, "cpu_kv_cache_gib": 1}},
            "weights": {"transport": "collective", "staging": staging},
            "network": {"buffer": "tcp://127.0.0.1:0"},
        }
    )
