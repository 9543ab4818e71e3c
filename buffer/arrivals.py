"""What is read off a group when it arrives: is it valid, and what is in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.messages import Submit
from asyncrl.types import MIN_REWARD_SPREAD, WeightId
from asyncrl.wire import GroupColumns


@dataclass(frozen=True, slots=True)
class Arrival:
    """Numbers of one group; the group itself stays on disk."""

    source: str
    oldest_version: int | None
    """None when the policy wrote no token at all (all responses empty)."""
    token_versions: dict[int, int]
    """Tokens that the policy wrote, by version."""
    rewards: tuple[float, ...]
    """Of the scored rollouts."""
    lengths: tuple[int, ...]
    """Tokens of each response."""
    num_truncated: int

    @property
    def useless_because(self) -> str | None:
        """Why nothing can be learned from this group, or None."""
        if len(self.rewards) < 2:
            return f"{len(self.rewards)} of {len(self.lengths)} rollouts have a reward"
        if max(self.rewards) - min(self.rewards) <= MIN_REWARD_SPREAD:
            return f"all rewards are {self.rewards[0]:g}"
        if not self.token_versions:
            return "no rollout has a token"
        return None

    @property
    def reward_mean(self) -> float | None:
        return mean(self.rewards) if self.rewards else None


def mean(values: Collection[float]) -> float:
    """0 for none; finite for finite values, however large."""
    total = sum(values)
    if math.isinf(total):
        return sum(value / len(values) for value in values)
    return total / max(1, len(values))


def summarize(group: GroupColumns) -> Arrival:
    written = group.loss_mask
    token_versions = _counts(group.versions if written.all() else group.versions[written])
    return Arrival(
        source=group.source,
        oldest_version=min(token_versions, default=None),
        token_versions=token_versions,
        rewards=tuple(reward for reward in group.rewards if reward is not None),
        lengths=tuple(group.lengths),
        num_truncated=group.finish_reasons.count("length"),
    )


def fault(
    group: GroupColumns,
    arrival: Arrival,
    submit: Submit,
    *,
    max_rollouts: int,
    max_length: int,
    temperature: float,
    newest: WeightId,
) -> str | None:
    """Why this group, summarized in `arrival`, must not be accepted, or None. `newest` has the
    current life of the learner and the newest published version."""
    if [*group.id] != submit.group or group.attempt != submit.attempt:
        return (
            f"the frame holds group {group.id} attempt {group.attempt}, the message says "
            f"{submit.group} attempt {submit.attempt}"
        )
    if not 1 <= len(group.lengths) <= max_rollouts:
        return f"{len(group.lengths)} rollouts in a group of {max_rollouts}"
    if not len(group.prompt_ids) or group.prompt_ids.min() < 0:
        return "the prompt has no tokens, or one that is negative"
    if group.temperature != temperature:
        return f"it was sampled at temperature {group.temperature:g}, leased at {temperature:g}"
    if group.inc > newest.inc:
        return f"it has weights of learner number {group.inc}, the current one is {newest.inc}"
    versions = arrival.token_versions
    if versions and not 0 <= min(versions) <= max(versions) <= newest.version:
        return (
            f"it has tokens of versions {min(versions)} to {max(versions)}, the newest published "
            f"one is {newest.version}"
        )
    return _token_fault(group, max_length=max_length)


def _token_fault(group: GroupColumns, *, max_length: int) -> str | None:
    """The whole group at once: its rollouts are told apart only to say which it is."""
    longest = max(group.lengths)
    if longest > max_length:
        index = group.lengths.index(longest)
        return f"rollout {index} has {longest} tokens, {max_length} are allowed"
    if len(group.token_ids) and group.token_ids.min() < 0:
        place = int(group.token_ids.argmin())
        return f"rollout {_rollout_of(group, place)} has a token id of {group.token_ids[place]}"
    finite = np.isfinite(group.logprobs)
    if not finite.all() and (~finite & group.loss_mask).any():
        place = int((~finite & group.loss_mask).argmax())
        return f"rollout {_rollout_of(group, place)} has a log-probability that is not finite"
    return None


def _counts(values: NDArray[np.int32]) -> dict[int, int]:
    """How often each value is there."""
    if not len(values):
        return {}
    first, last = int(values.min()), int(values.max())
    if first == last:  # nearly every group; the rest is ten times as slow
        return {first: len(values)}
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def _rollout_of(group: GroupColumns, place: int) -> int:
    """Which rollout the token at `place` belongs to."""
    return int(np.searchsorted(np.cumsum(group.lengths), place, side="right"))
