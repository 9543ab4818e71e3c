"""What is read off a group when it arrives: is it valid, and what is in it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from asyncrl.messages import Submit
from asyncrl.types import MIN_REWARD_SPREAD, Rollout, RolloutGroup, WeightId


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
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


def summarize(group: RolloutGroup) -> Arrival:
    token_versions: Counter[int] = Counter()
    for rollout in group.rollouts:
        found, counts = np.unique(rollout.versions[rollout.loss_mask], return_counts=True)
        token_versions.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    return Arrival(
        source=group.source,
        oldest_version=min(token_versions, default=None),
        token_versions=dict(token_versions),
        rewards=tuple(reward for reward in group.rewards if reward is not None),
        lengths=tuple(len(rollout.token_ids) for rollout in group.rollouts),
        num_truncated=sum(rollout.finish_reason == "length" for rollout in group.rollouts),
    )


def fault(
    group: RolloutGroup,
    submit: Submit,
    *,
    max_rollouts: int,
    max_length: int,
    temperature: float,
    newest: WeightId,
) -> str | None:
    """Why this group must not be accepted, or None. `newest` has the current life of the learner
    and the newest published version."""
    if [*group.id] != submit.group or group.attempt != submit.attempt:
        return (
            f"the frame holds group {group.id} attempt {group.attempt}, the message says "
            f"{submit.group} attempt {submit.attempt}"
        )
    if not 1 <= len(group.rollouts) <= max_rollouts:
        return f"{len(group.rollouts)} rollouts in a group of {max_rollouts}"
    if not len(group.prompt_ids) or group.prompt_ids.min() < 0:
        return "the prompt has no tokens, or one that is negative"
    if group.temperature != temperature:
        return f"it was sampled at temperature {group.temperature:g}, leased at {temperature:g}"
    if group.inc > newest.inc:
        return f"it has weights of learner number {group.inc}, the current one is {newest.inc}"
    for index, rollout in enumerate(group.rollouts):
        problem = _rollout_fault(rollout, max_length=max_length, newest=newest.version)
        if problem is not None:
            return f"rollout {index} has {problem}"
    return None


def _rollout_fault(rollout: Rollout, *, max_length: int, newest: int) -> str | None:
    ids, written = rollout.token_ids, rollout.loss_mask
    if len(ids) > max_length:
        return f"{len(ids)} tokens, {max_length} are allowed"
    if len(ids) and ids.min() < 0:
        return f"a token id of {ids.min()}"
    if not np.isfinite(rollout.logprobs[written]).all():
        return "a log-probability that is not finite"
    versions = rollout.versions[written]
    if len(versions) and not 0 <= versions.min() <= versions.max() <= newest:
        return (
            f"tokens of versions {versions.min()} to {versions.max()}, the newest published one "
            f"is {newest}"
        )
    return None
