"""What the buffer says about itself: metrics of a step, what is waited for, status."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl import versions
from buffer.arrivals import Arrival
from buffer.groups import Group, State
from buffer.ledger import Ledger
from buffer.members import Member, Members

Values = dict[str, float | int | str]

RECENT_GROUPS = 256
"""Groups over which status takes the mean reward."""


@dataclass(slots=True)
class _SinceLastStep:
    """Sums over the groups that arrived since the last batch was closed."""

    num_groups: int = 0
    num_filtered: int = 0
    num_failed: int = 0
    rewards: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_truncated: int = 0


class Tally:
    """Counts what arrives: for the record of each step, and to see when nothing usable comes."""

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

    def arrived(self, arrival: Arrival, *, filtered: bool) -> None:
        since = self._since
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

    def trained(self, step: int, groups: Sequence[Group]) -> None:
        self.staleness += _token_ages(step, groups)

    def staleness_json(self) -> str:
        return json.dumps(dict(self.staleness))

    def restore(self, staleness_json: str) -> None:
        """Goes on from what `staleness_json` gave."""
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
        return text + " Is the task too easy or too hard, or is the reward function wrong?"

    def take_step(self, step: int, groups: Sequence[Group]) -> Values:
        """Metrics of the batch of `step`, just closed; counting starts anew."""
        since, self._since = self._since, _SinceLastStep()
        ages = _token_ages(step, groups)
        total = sum(age * count for age, count in ages.items())
        reward: Values = {"reward_mean": _mean(since.rewards)} if since.rewards else {}
        return reward | {
            "num_arrived": since.num_groups,
            "num_filtered": since.num_filtered,
            "num_failed": since.num_failed,
            "response_length_mean": _mean(since.lengths),
            "truncated_share": since.num_truncated / max(1, len(since.lengths)),
            "num_groups": len(groups),
            "staleness_min": min(ages, default=0),
            "staleness_mean": total / max(1, ages.total()),
            "staleness_max": max(ages, default=0),
        }


def waiting_text(ledger: Ledger, members: Members, *, newest: int, now: float) -> str:
    """What the next batch waits for. `newest` is the newest published version."""
    policy = ledger.policy
    size, missing = policy.batch_size, policy.num_missing()
    text = f"step {policy.next_step}: need {size} groups, have {size - missing}"
    flying = ledger.leased()
    text += f", {len(flying)} in flight"
    if flying:
        first = flying[0]
        started = [g.started_at for g in flying if g.started_at is not None]
        age = f"oldest {now - min(started):.0f} s" if started else "none started"
        return f"{text}, {age}; first is group {first.id} at {first.member}"
    alive = members.alive()
    if not alive:
        return f"{text}; no generator is connected"
    needed = ledger.next_min_version()
    if needed is None:
        return f"{text}; the next one may start when version {policy.committed + 1} is committed"
    serving = ", ".join(f"{m.name} serves {m.serving.version} ({m.state})" for m in alive)
    return f"{text}; the next needs version {needed}, newest published {newest}, {serving}"


def status_values(ledger: Ledger, members: Members, tally: Tally, *, now: float) -> dict[str, Any]:
    """The part of Status that ledger, members and tally know (docs/watching.md)."""
    counts = {state.value: count for state, count in ledger.counts.items() if count}
    rewards = tally.recent_rewards
    return {
        "step": ledger.policy.next_step,
        "version": ledger.policy.committed,
        "max_staleness": ledger.policy.max_staleness,
        "counts": counts,
        "admitted": ledger.policy.admitted,
        "trained": counts.get(State.TRAINED.value, 0),
        "filtered": counts.get(State.FILTERED.value, 0),
        "members": [
            _member_values(m, now) for m in members.by_name.values() if m.role != "monitor"
        ],
        "leases": [_lease_values(group, now) for group in ledger.leased()],
        "staleness": {str(age): count for age, count in sorted(tally.staleness.items())},
        "tokens_per_s": round(members.tokens_per_s(), 1),
        "reward_mean": _mean(rewards) if rewards else None,
    }


def _member_values(member: Member, now: float) -> dict[str, Any]:
    return {
        "name": member.name,
        "role": member.role,
        "host": member.host,
        "pid": member.pid,
        "alive": member.alive,
        "state": member.state,
        "version": member.serving.version,
        "inc": member.serving.inc,
        "last_seen_s": round(now - member.last_seen, 3),
        "num_running": member.num_running,
        "tokens": member.num_tokens,
        "tokens_per_s": round(member.tokens_per_s, 1),
        "paused_s": round(member.paused_s, 3),
    }


def _lease_values(group: Group, now: float) -> dict[str, Any]:
    since = group.granted_at if group.started_at is None else group.started_at
    return {
        "group": str(group.id),
        "attempt": group.attempt,
        "member": group.member,
        "age_s": round(now - since, 3),
        "started": group.started_at is not None,
    }


def _token_ages(step: int, groups: Sequence[Group]) -> Counter[int]:
    """Tokens by staleness."""
    ages: Counter[int] = Counter()
    for group in groups:
        for version, num_tokens in group.token_versions.items():
            ages[versions.staleness(step, version)] += num_tokens
    return ages


def _mean(values: Sequence[float] | deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0
