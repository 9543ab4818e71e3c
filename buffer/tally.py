"""Counts of what arrives: for the record of each step, and to see when nothing usable comes."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl import versions
from buffer.arrivals import Arrival, mean
from buffer.groups import Group
from buffer.void import LeaseId

Values = dict[str, float | int | str]

RECENT_GROUPS = 256
"""Groups over which status takes the mean reward."""


@dataclass(slots=True)
class _SinceLastStep:
    """Sums over the groups that arrived since the last batch was closed."""

    num_groups: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_rollouts_lost: int = 0
    late_lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_truncated: int = 0


class Tally:
    """All counts of one run."""

    def __init__(self) -> None:
        self.num_useless_in_a_row = 0
        """Groups filtered and leases failed since the last usable group."""
        self.staleness: Counter[int] = Counter()
        """Trained tokens by staleness, over the whole run."""
        self.recent_rewards: deque[float] = deque(maxlen=RECENT_GROUPS)
        self._since = _SinceLastStep()
        self._solve_rates: Counter[float] = Counter()
        self._num_failed_in_a_row = 0
        self._num_unscored_in_a_row = 0
        self._last_failure = ""
        self._num_dropped = 0
        self._last_drop = ""
        self._late: deque[LeaseId] = deque(maxlen=RECENT_GROUPS)

    def arrived(self, arrival: Arrival, *, filtered: bool, num_lost: int) -> None:
        """A group was accepted; `num_lost` rollouts are missing in it."""
        since = self._since
        since.num_rollouts_lost += num_lost
        since.num_groups += 1
        since.num_filtered += filtered
        since.rewards += arrival.rewards
        since.lengths += arrival.lengths
        since.num_truncated += arrival.num_truncated
        if arrival.reward_mean is not None:
            self.recent_rewards.append(arrival.reward_mean)
        if filtered:
            self.num_useless_in_a_row += 1
            if arrival.reward_mean is None:
                self._num_unscored_in_a_row += 1
            else:
                self._solve_rates[round(arrival.reward_mean, 1)] += 1
            return
        self.num_useless_in_a_row = self._num_failed_in_a_row = self._num_unscored_in_a_row = 0
        self._solve_rates.clear()

    def failed(self, reason: str) -> None:
        self._since.num_failed += 1
        self.num_useless_in_a_row += 1
        self._num_failed_in_a_row += 1
        self._last_failure = reason

    def dropped(self, reason: str) -> None:
        """A prompt that no attempt can help. It says nothing about the others."""
        self._since.num_failed += 1
        self._num_dropped += 1
        self._last_drop = reason

    def let_go(self, lease: LeaseId) -> None:
        """A group in flight at its deadline is waited for no longer."""
        self._since.num_late += 1
        self._late.append(lease)

    def given_up(self, lease: LeaseId, lengths: Sequence[int]) -> None:
        """A generator has given up a lease that was void, with so many tokens sampled."""
        if lease in self._late:
            self._late.remove(lease)
            self._since.late_lengths += lengths

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self.staleness += _token_ages(step, groups)

    def staleness_json(self) -> str:
        return json.dumps(dict(self.staleness))

    def restore(self, staleness_json: str, *, recent_rewards: Sequence[float]) -> None:
        """Goes on from what `staleness_json` gave, and from the mean rewards of groups that have
        arrived, the newest at the end."""
        self.recent_rewards.extend(recent_rewards)
        self.staleness = Counter({int(age): n for age, n in json.loads(staleness_json).items()})

    def why_useless(self) -> str:
        """The groups in a row that gave nothing, in words and numbers."""
        rates = ", ".join(f"{rate:.1f}: {n}" for rate, n in sorted(self._solve_rates.items()))
        failed, unscored = self._num_failed_in_a_row, self._num_unscored_in_a_row
        alike = self.num_useless_in_a_row - failed - unscored
        text = (
            f"{self.num_useless_in_a_row} groups in a row gave nothing to train on: {alike} "
            f"filtered because their rewards do not differ (mean reward: groups; "
            f"{rates or 'none'}), {unscored} because the reward function scored no response of "
            f"theirs (the generator's log has its first error), {failed} failed."
        )
        if self._last_failure:
            text += f" Last failure: {self._last_failure}."
        if self._num_dropped:
            text += f" {self._num_dropped} prompts were dropped, the last one: {self._last_drop}."
        return text + " Is the task too easy or too hard, or is the reward function wrong?"

    def take_step(self, step: int, groups: Sequence[Group]) -> Values:
        """Metrics of the batch of `step`, just closed; counting starts anew."""
        since, self._since = self._since, _SinceLastStep()
        ages = _token_ages(step, groups)
        total = sum(age * count for age, count in ages.items())
        reward: Values = {"reward_mean": mean(since.rewards)} if since.rewards else {}
        late: Values = {"late_length_mean": mean(since.late_lengths)} if since.late_lengths else {}
        return (
            reward
            | late
            | {
                "num_arrived": since.num_groups,
                "num_filtered": since.num_filtered,
                "num_failed": since.num_failed,
                "num_late": since.num_late,
                "num_rollouts_lost": since.num_rollouts_lost,
                "response_length_mean": mean(since.lengths),
                "truncated_share": since.num_truncated / max(1, len(since.lengths)),
                "num_groups": len(groups),
                "staleness_min": min(ages, default=0),
                "staleness_mean": total / max(1, ages.total()),
                "staleness_max": max(ages, default=0),
            }
        )


def _token_ages(step: int, groups: Sequence[Group]) -> Counter[int]:
    """Tokens by staleness."""
    ages: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in group.token_versions.items():
            ages[versions.staleness(step, version)] += num_tokens
    return ages
