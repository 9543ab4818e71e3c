"""A policy under FSDP2 on one device, and training steps of it: for benchmarks/gpu_smoke.py."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.policy import Policy
from learner.ranks import start_ranks


def small_policy(device: torch.device) -> Policy:
    """Random weights; 200 million parameters on a GPU."""
    width, layers = (1024, 12) if device.type == "cuda" else (64, 2)
    shape = Qwen3Config(
        vocab_size=32 * width,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    ranks = replace(start_ranks(), device=device, mesh=init_device_mesh(device.type, (1,)))
    policy = Policy(Qwen3ForCausalLM(shape).to(device), ranks)
    mixed: Any = {"mesh": ranks.mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in policy.model.model.layers:
        fully_shard(layer, **mixed)
    fully_shard(policy, **mixed)
    return policy


def train(policy: Policy, optimizer: torch.optim.Optimizer, *, steps: int) -> float:
    """Seconds of one step."""
    device = policy.ranks.device
    ids = torch.randint(0, policy.vocabulary, (2, 128), device=device)
    positions = torch.arange(100, device=device)
    began = time.monotonic()
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs, _ = policy(
            ids, positions, ids.flatten()[1:101], torch.ones(len(positions), device=device)
        )
        (-logprobs.mean()).backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return (time.monotonic() - began) / steps
