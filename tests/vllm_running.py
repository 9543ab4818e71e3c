"""A real vLLM engine in tests: models small enough to start in seconds, and requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import Config
from asyncrl.types import Completion, Sampling, WeightId
from asyncrl.weights_dir import write_version
from generators.engine import Source
from generators.vllm_engine import VllmEngine

T = TypeVar("T")
VOCABULARY = 96
PROMPT = np.random.default_rng(0).integers(0, VOCABULARY, 300).astype(np.int32)
"""Longer than two blocks of vLLM's prefix cache (128 tokens each on CPUs)."""
FAILS_IN_LOAD = 66
"""With faulty_vllm.py: the version whose load fails after some of its tensors are written."""
RANK_1_FAILS = 77
"""The second receiver finds the bytes of this version damaged, the first one does not."""
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def save_model(directory: Path, *, tied: bool, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)
    return directory


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def publish(root: Path, weights: WeightId, tensors: dict[str, torch.Tensor]) -> str:
    return str(write_version(root, weights, tensors, bucket_bytes=1 << 20).location)


def make_config(model: Path, **vllm: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {
                "train_files": ["unused.jsonl"],
                "max_prompt_length": 320,
                "max_response_length": 400,
            },
            "reward": {"path": "unused:unused"},
            "generator": {"vllm": {"max_num_seqs": 16, "cpu_kv_cache_gib": 1, **vllm}},
        }
    )


class Running:
    """An engine and the event loop that it lives on."""

    def __init__(self, model: Path, **vllm: int) -> None:
        """`vllm`: options of the engine besides those of make_config."""
        self.runner = asyncio.Runner()
        self.engine = VllmEngine(make_config(model, **vllm))
        self.run(self.engine.start(), timeout_s=140)
        self.num_requests = 0

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
        return self.runner.run(asyncio.wait_for(coroutine, timeout_s))

    async def generate(self, sampling: Sampling = GREEDY, seed: int = 0) -> Completion:
        self.num_requests += 1
        return await self.engine.generate(
            PROMPT, sampling, seed=seed, request_id=f"test-{self.num_requests}"
        )

    def take(self, weights: WeightId, location: str) -> None:
        async def stage_and_swap() -> None:
            await self.engine.stage(Source(weights=weights, location=location))
            await self.engine.swap(weights)

        self.run(stage_and_swap())

    def close(self) -> None:
        self.run(self.engine.close())
        self.runner.close()
