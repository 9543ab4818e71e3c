"""From rewards to advantages, group by group. Pure functions on plain numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from asyncrl.types import MIN_REWARD_SPREAD

Rewards = list[float | None]
"""Rewards of one group; None where nobody scored the rollout."""

GROUP_STD_EPSILON = 1e-6
"""Added to a group's standard deviation (GRPO)."""


def compute_advantages(
    rewards: Sequence[Sequence[float | None]], *, std: Literal["group", "batch", "none"]
) -> list[Rewards]:
    """Advantages of all groups of one step, in the shape of `rewards`; unscored stays None.

    Rewards are centred by the mean of their own group (sizes may differ), then divided by
    - `group`: the group's standard deviation with ddof=1, plus 1e-6 (GRPO, arXiv 2402.03300);
    - `batch`: the root of the mean squared centred reward (ddof=0) over every scored rollout of
      the step, trivial groups included, so that the scale does not hang on a single prompt;
    - `none`: nothing (Dr.GRPO, arXiv 2503.20783).
    """
    centred = [_centre(group) for group in rewards]
    if std == "none":
        return centred
    if std == "batch":
        scale = _batch_std(centred)
        return [_divide(group, scale) if scale > 0 else group for group in centred]
    return [
        group if _is_trivial(group) else _divide(group, _group_std(group) + GROUP_STD_EPSILON)
        for group in centred
    ]


def _centre(group: Sequence[float | None]) -> Rewards:
    if _is_trivial(group):
        return [None if reward is None else 0.0 for reward in group]
    mean = statistics.fmean(_scored(group))
    return [None if reward is None else reward - mean for reward in group]


def _is_trivial(group: Sequence[float | None]) -> bool:
    scored = _scored(group)
    return not scored or max(scored) - min(scored) <= MIN_REWARD_SPREAD


def _group_std(group: Rewards) -> float:
    return statistics.stdev(_scored(group))


def _batch_std(centred: list[Rewards]) -> float:
    everyone = [value for group in centred for value in _scored(group)]
    return math.sqrt(math.fsum(v * v for v in everyone) / len(everyone)) if everyone else 0.0


def _divide(group: Rewards, scale: float) -> Rewards:
    return [None if value is None else value / scale for value in group]


def _scored(group: Sequence[float | None]) -> list[float]:
    return [value for value in group if value is not None]
