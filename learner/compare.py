"""The learner's side of `asyncrl-launch check`: its logprobs of what a generator has sampled."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from asyncrl.config import Config
from asyncrl.disk import write_whole
from asyncrl.types import RolloutGroup
from asyncrl.wire import decode_group
from learner.batch import make_batch
from learner.parity import excesses, measure, refusal
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks


def compare(config: Config, directory: Path) -> None:
    """Compares the groups in DIRECTORY/*.group. The lead writes DIRECTORY/parity.json: the `gap` as
    of parity.Gap, and the `refusal`, which is empty where nothing is over a bound.

    Every rank calls it. Raises ValueError for a model that cannot be trained.
    """
    groups = [decode_group(file.read_bytes()) for file in sorted(directory.glob("*.group"))]
    ranks = start_ranks()
    policy = load_policy(config, ranks)
    gap = measure(log_ratios(policy, groups, config))
    found = excesses(gap, config.parity)
    if ranks.is_lead:
        result = {"gap": asdict(gap), "refusal": refusal(gap, found) if found else ""}
        write_whole(directory / "parity.json", json.dumps(result))


def log_ratios(policy: Policy, groups: list[RolloutGroup], config: Config) -> torch.Tensor:
    """[n] learner's minus generator's logprob of each token that the policy wrote, on all ranks."""
    batch = make_batch(
        groups,
        [[0.0] * len(group.rollouts) for group in groups],
        max_tokens=config.learner.max_tokens_per_microbatch,
        num_ranks=policy.ranks.size,
    )
    columns = []
    for micro in batch.by_rank[policy.ranks.rank]:
        micro = micro.to(policy.ranks.device)
        with torch.no_grad():
            theta, _ = policy(micro.input_ids, micro.positions, micro.targets, micro.temperatures)
        columns.append(torch.stack([theta - micro.behavior, micro.loss_mask.float()]))
    everyone = policy.ranks.gather_columns(torch.cat(columns, dim=1), batch.tokens_by_rank())
    return everyone[0, everyone[1] > 0]
