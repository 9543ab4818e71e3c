"""`python -m torch.distributed.run ... learner_gradients.py MODEL OUT`: the gradient of one step,
over any number of ranks, saved whole by the first."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from learner_cases import make_config, make_groups
from safetensors.torch import save_file

from asyncrl.config import Config
from asyncrl.types import RolloutGroup
from learner.advantages import compute_advantages
from learner.batch import make_batch
from learner.losses import token_metrics
from learner.policy import Policy, gather_tensor, load_policy
from learner.ranks import start_ranks
from learner.train_step import accumulate_gradients


def step_gradients(
    policy: Policy, groups: list[RolloutGroup], config: Config
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The whole gradient of a step by parameter name, and the metrics of its tokens."""
    batch = make_batch(
        groups,
        compute_advantages([group.rewards for group in groups], std=config.learner.advantage.std),
        max_tokens=config.learner.max_tokens_per_microbatch,
        num_ranks=policy.ranks.size,
    )
    policy.zero_grad()
    metrics = token_metrics(accumulate_gradients(policy, batch, config))
    return {name: gather_tensor(p.grad).clone() for name, p in policy.masters()}, metrics


def main(model: Path, out: Path) -> None:
    config = make_config(model)
    ranks = start_ranks()
    heard = ranks.broadcast([b"from", b"", f"rank {ranks.rank}".encode()])
    if heard != [b"from", b"", b"rank 0"]:
        raise RuntimeError(f"rank {ranks.rank} heard {heard}")
    policy = load_policy(config, ranks)
    gradients, metrics = step_gradients(policy, make_groups(3), config)
    if policy.ranks.is_lead:
        numbers = {f"metric/{name}": torch.tensor(value) for name, value in metrics.items()}
        save_file({**gradients, **numbers}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
