"""Algorithms by name: each preset is a whole stack, written below what a file says.

A preset names every part of the algorithm, also where it repeats a default of the schema, so that
it stays what it is when a default changes. The resolved configuration prints every part.
"""

from __future__ import annotations

from typing import Any

GRPO: dict[str, Any] = {
    "learner": {
        "optim": {
            "lr": 2e-5,
            "betas": [0.9, 0.95],
            "weight_decay": 0.0,
            "grad_clip": 1.0,
            "warmup_steps": 2,
        },
        "advantage": {"std": "group"},
        "loss": {
            "mask": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "behavior_coef": 0.0,
            "aggregation": "token_mean",
        },
    },
    "buffer": {"zero_variance": "refill"},
}
"""Group-normalised rewards and the clip of PPO, with DAPO's higher upper bound and its refill of
groups without spread. The learning rate is for models well under a billion parameters."""

ASYNC_GRPO: dict[str, Any] = {
    "learner": {
        "optim": {
            "lr": 1e-6,
            "betas": [0.9, 0.95],
            "weight_decay": 0.0,
            "grad_clip": 1.0,
            "warmup_steps": 0,
        },
        "advantage": {"std": "batch"},
        "loss": {
            "mask": "dppo_tv",
            "mask_threshold": 0.2,
            "ratio_cap": 5.0,
            "behavior_coef": 0.001,
            "aggregation": "token_mean",
        },
    },
    "buffer": {"zero_variance": "refill"},
}
"""Made for stale samples: importance weights cut at 5, a trust region on probabilities instead of
ratios (DPPO), a small pull towards the policy that sampled, batch-wide deviation."""

PRESETS: dict[str, dict[str, Any]] = {"grpo": GRPO, "async_grpo": ASYNC_GRPO}
