"""Tiny models, made-up groups and configurations for the tests of the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config import Config
from asyncrl.types import GroupId, Rollout, RolloutGroup

VOCABULARY = 50
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_model(directory: Path, *, family: str = "qwen3", tied: bool = True) -> Path:
    """A random model of two layers in Hugging Face format; `family` is qwen3 or llama."""
    torch.manual_seed(7)
    model: Any
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=tied))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=tied))
    for parameter in model.parameters():  # far from uniform, so that differences show
        parameter.data.mul_(3.0)
    model.save_pretrained(directory)
    return directory


def save_broken_model(directory: Path) -> tuple[Path, str]:
    """A model with one number in it that is not finite, in the row of a token that no group has,
    so that neither loss nor gradient shows it; and the name of the tensor."""
    save_model(directory, tied=False)
    tensors = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    tensors[name][1, 3] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, name


def make_config(model: Path, **learner: Any) -> Config:
    """float32, no gradient checkpointing, lr 1e-3; `learner` overrides parts of that section."""
    defaults: dict[str, Any] = {
        "optim": {"lr": 1e-3},
        "max_tokens_per_microbatch": 4096,
        "gradient_checkpointing": False,
    }
    return Config.model_validate(
        {
            "run_name": "run",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {
                "train_files": ["rows.jsonl"],
                "max_prompt_length": 8,
                "max_response_length": 7,
            },
            "reward": {"path": "rewards.py:score"},
            "learner": {**defaults, **learner},
        }
    )


def make_group(position: int, *, size: int = 4, temperature: float = 1.0) -> RolloutGroup:
    """A group of random tokens, lengths 1 to 7, rewards 0, 1, 0, 1, ..."""
    rng = np.random.default_rng(position)
    rollouts = []
    for index in range(size):
        length = int(rng.integers(1, 8))
        rollouts.append(
            Rollout(
                token_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                logprobs=-4 * rng.random(length).astype(np.float32) - 0.1,
                versions=np.zeros(length, np.int32),
                loss_mask=np.ones(length, bool),
                finish_reason="stop",
                reward=float(index % 2),
            )
        )
    return RolloutGroup(
        id=GroupId(0, position),
        attempt=0,
        source="made up",
        prompt_ids=rng.integers(3, VOCABULARY, int(rng.integers(2, 9))).astype(np.int32),
        temperature=temperature,
        inc=1,
        rollouts=tuple(rollouts),
    )


def make_groups(num_groups: int, *, start: int = 0, **options: Any) -> list[RolloutGroup]:
    return [make_group(start + position, **options) for position in range(num_groups)]
