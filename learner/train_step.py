"""One training step: from the groups of a batch to new weights. Needs no buffer and no sockets."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.types import RolloutGroup
from learner.advantages import compute_advantages
from learner.batch import MicroBatch, StepBatch, make_batch
from learner.losses import token_losses, token_metrics
from learner.optimizer import Optimizer
from learner.policy import Policy


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    groups: list[RolloutGroup],
    config: Config,
    *,
    clock: PhaseClock | None = None,
    check: Callable[[torch.Tensor], dict[str, float]] = lambda columns: {},
) -> dict[str, float]:
    """Trains one batch; every rank calls it with the same groups and gets the same metrics.

    `check` sees the columns of token_metrics before the optimizer takes its step: it returns
    metrics of its own, or raises what ends the run.
    RuntimeError when a parameter is not finite afterwards.
    """
    clock = clock or PhaseClock("other")
    clock.enter("prepare")
    rewards = [group.rewards for group in groups]
    advantages = compute_advantages(rewards, std=config.learner.advantage.std)
    batch = make_batch(
        groups,
        advantages,
        max_tokens=config.learner.max_tokens_per_microbatch,
        num_ranks=policy.ranks.size,
    )

    clock.enter("forward_backward")
    columns = accumulate_gradients(policy, batch, config)
    metrics, checked = token_metrics(columns), check(columns)

    clock.enter("optimizer")
    result = optimizer.step(loss=metrics.get("loss", 0.0))
    policy.check_finite()
    clock.enter("other")
    return {
        **{f"train/{name}": value for name, value in metrics.items()},
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/skipped": float(result.skipped),
        "train/num_tokens": float(batch.num_tokens),
        "train/num_padded_tokens": float(batch.num_padded_tokens),
        "train/num_loss_tokens": float(batch.num_loss_tokens),
        "train/num_microbatches": float(len(batch.by_rank[0])),
        **checked,
        **_batch_metrics(groups, advantages),
    }


def accumulate_gradients(policy: Policy, batch: StepBatch, config: Config) -> torch.Tensor:
    """Adds the gradient of the whole step; returns token_metrics' columns of all ranks' tokens."""
    ranks = policy.ranks
    columns = [_backward(policy, m, batch, config) for m in batch.by_rank[ranks.rank]]
    everyone = ranks.gather_columns(torch.cat(columns, dim=1), batch.tokens_by_rank())
    return everyone[:-1, everyone[-1] > 0]


def _backward(policy: Policy, micro: MicroBatch, batch: StepBatch, config: Config) -> torch.Tensor:
    """Adds a micro-batch's gradient; returns its columns [7, n] on the host, the last its mask.

    Each rank divides its own sum by the tokens of all ranks, and FSDP takes the mean over ranks.
    """
    micro = micro.to(policy.ranks.device)
    theta, entropies = policy(micro.input_ids, micro.positions, micro.targets, micro.temperatures)
    tokens = token_losses(
        theta, micro.behavior, micro.advantages, micro.loss_mask, config.learner.loss
    )
    scale = policy.ranks.size / max(1, batch.num_loss_tokens)
    (tokens.losses.sum() * scale).backward()
    columns = [tokens.losses, tokens.log_ratios, tokens.dropped, entropies, micro.rows, theta]
    return torch.stack([c.detach().float().cpu() for c in [*columns, micro.loss_mask]])


def _batch_metrics(
    groups: list[RolloutGroup], advantages: list[list[float | None]]
) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    used = [a for group in advantages for a in group if a is not None]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    metrics = {
        "train/num_groups": float(len(groups)),
        "train/num_unscored": float(len(rollouts) - len(scored)),
        "train/advantage_zero_frac": sum(a == 0 for a in used) / max(1, len(used)),
        "train/advantage_max": max(map(abs, used), default=0.0),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}": statistics.fmean(values) for name, values in parts.items()}
    if scored:
        metrics["train/reward_mean"] = statistics.fmean(scored)
        metrics["train/reward_std"] = statistics.pstdev(scored)
    if rollouts:
        metrics["train/response_length_mean"] = statistics.fmean(lengths)
        metrics["train/response_length_max"] = float(max(lengths))
        for reason in ("stop", "length", "abort"):
            share = sum(r.finish_reason == reason for r in rollouts) / len(rollouts)
            metrics[f"train/finish_{reason}_frac"] = share
    return metrics
