"""From the groups of one step to padded micro-batches: pure, deterministic, the same on all ranks.

Inputs are padded on the right. Attention is causal, so padding never reaches a real token: there is
no attention mask, and positions are those of the columns. A row ends with the token before its last
loss token: nothing later is needed to predict it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncrl.types import Rollout, RolloutGroup
from learner.advantages import Rewards


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One scored response with its prompt: t tokens of input, n loss tokens."""

    number: int
    """Its place among all rollouts of the step."""
    input_ids: np.ndarray
    """[t] int64."""
    positions: np.ndarray
    """[n] columns whose output predicts the loss tokens."""
    targets: np.ndarray
    """[n] ids of the loss tokens."""
    behavior: np.ndarray
    """[n] float32 logprobs reported by the generator."""
    advantage: float
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward pass takes: b rows of width w, n loss tokens, all flat."""

    input_ids: Tensor
    """[b, w] int64; padding is 0."""
    positions: Tensor
    """[n] indices into the flattened [b * w] output."""
    targets: Tensor
    """[n] int64."""
    temperatures: Tensor
    """[n] float32."""
    behavior: Tensor
    """[n] float32."""
    advantages: Tensor
    """[n] float32."""
    loss_mask: Tensor
    """[n] False only in the dummies that even out the ranks."""
    rows: Tensor
    """[n] number of the row that each token belongs to."""

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(*(getattr(self, name).to(device) for name in MicroBatch.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The micro-batches of every rank: equally many on each, so that collectives pair up."""

    by_rank: list[list[MicroBatch]]
    num_loss_tokens: int
    """Of the whole step, before any trust region: the one denominator of the loss."""
    num_tokens: int
    """Tokens of prompts and responses in the micro-batches, without padding."""
    num_padded_tokens: int

    def tokens_by_rank(self) -> list[int]:
        """Loss slots (dummies included) that each rank computes."""
        return [sum(len(micro.targets) for micro in mine) for mine in self.by_rank]


def make_batch(
    groups: list[RolloutGroup], advantages: list[Rewards], *, max_tokens: int, num_ranks: int
) -> StepBatch:
    """Deals the step's rows over the ranks, in micro-batches of at most `max_tokens` padded tokens.

    Rollouts without a score or without a loss token are left out. Rows of like length go together,
    and each rank gets like many of each length. Raises ValueError for a row over `max_tokens`.
    """
    rows = make_rows(groups, advantages)
    for row in rows:
        if len(row.input_ids) > max_tokens:
            raise ValueError(
                f"a response with its prompt has {len(row.input_ids)} tokens, more than "
                f"learner.max_tokens_per_microbatch={max_tokens}: raise that, or lower "
                "data.max_prompt_length or data.max_response_length"
            )
    rows.sort(key=lambda row: (-len(row.input_ids), row.number))
    by_rank = [
        [_collate(part) for part in _split(_deal(rows, rank, num_ranks), max_tokens)]
        for rank in range(num_ranks)
    ]
    most = max(1, *map(len, by_rank))
    for mine in by_rank:
        mine.extend(_dummy() for _ in range(most - len(mine)))
    return StepBatch(
        by_rank=by_rank,
        num_loss_tokens=sum(len(row.targets) for row in rows),
        num_tokens=sum(len(row.input_ids) for row in rows),
        num_padded_tokens=sum(micro.input_ids.numel() for mine in by_rank for micro in mine),
    )


def make_rows(groups: list[RolloutGroup], advantages: list[Rewards]) -> list[Row]:
    """The rows that are trained, in the order of groups and rollouts."""
    rows = []
    number = 0
    for group, group_advantages in zip(groups, advantages, strict=True):
        for rollout, advantage in zip(group.rollouts, group_advantages, strict=True):
            if advantage is not None and rollout.loss_mask.any():
                rows.append(_make_row(number, group, rollout, advantage))
            number += 1
    return rows


def _make_row(number: int, group: RolloutGroup, rollout: Rollout, advantage: float) -> Row:
    if len(group.prompt_ids) == 0:
        raise ValueError(f"group {group.id} has an empty prompt: nothing predicts its first token")
    tokens = np.concatenate([group.prompt_ids, rollout.token_ids]).astype(np.int64)
    places = len(group.prompt_ids) + np.flatnonzero(rollout.loss_mask)
    return Row(
        number=number,
        input_ids=tokens[: places[-1]],
        positions=places - 1,
        targets=tokens[places],
        behavior=rollout.logprobs[rollout.loss_mask],
        advantage=advantage,
        temperature=group.temperature,
    )


def _deal(rows: list[Row], rank: int, num_ranks: int) -> list[Row]:
    """Every num_ranks-th row, back and forth (0 1 1 0 0 1 ...), so that no rank gets the longer."""
    period = 2 * num_ranks
    mine = {rank, period - 1 - rank}
    return [row for place, row in enumerate(rows) if place % period in mine]


def _split(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Consecutive rows, longest first, such that rows times longest stays within `max_tokens`."""
    parts: list[list[Row]] = []
    for row in rows:
        if parts and (len(parts[-1]) + 1) * len(parts[-1][0].input_ids) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _collate(rows: list[Row]) -> MicroBatch:
    width = len(rows[0].input_ids)
    input_ids = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        input_ids[index, : len(row.input_ids)] = row.input_ids
    counts = [len(row.targets) for row in rows]

    def per_token(values: list[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(
            np.concatenate([index * width + row.positions for index, row in enumerate(rows)])
        ),
        targets=torch.from_numpy(np.concatenate([row.targets for row in rows])),
        temperatures=per_token([row.temperature for row in rows], np.float32),
        behavior=torch.from_numpy(np.concatenate([row.behavior for row in rows])),
        advantages=per_token([row.advantage for row in rows], np.float32),
        loss_mask=torch.ones(sum(counts), dtype=torch.bool),
        rows=per_token([row.number for row in rows], np.int64),
    )


def _dummy() -> MicroBatch:
    """One token whose loss counts for nothing: takes part in collectives, adds a zero gradient."""
    zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    return MicroBatch(
        input_ids=zero.view(1, 1),
        positions=zero,
        targets=zero,
        temperatures=one,
        behavior=-one,
        advantages=0 * one,
        loss_mask=torch.zeros(1, dtype=torch.bool),
        rows=zero,
    )


def staleness_metrics(
    groups: list[RolloutGroup], *, step: int, max_staleness: int
) -> dict[str, float]:
    """Ages of all tokens that the policy wrote: mean, max, and their number at each age.

    Asserts G1: RuntimeError when a token is older than `max_staleness` or from the future.
    """
    written = [
        rollout.versions[rollout.loss_mask].astype(np.int64)
        for group in groups
        for rollout in group.rollouts
    ]
    ages = step - np.concatenate([*written, np.zeros(0, np.int64)])
    if len(ages) == 0:
        return {}
    if ages.max() > max_staleness or ages.min() < 0:
        raise RuntimeError(
            f"step {step} got tokens aged {ages.min()} to {ages.max()} versions, but "
            f"max_staleness is {max_staleness}: the buffer's bound (G1) is broken"
        )
    counts = np.bincount(ages)
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        **{f"staleness/tokens_{age}": float(n) for age, n in enumerate(counts)},
    }
