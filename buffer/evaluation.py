"""Evaluations: one version at a time, all validation rows, each response by pinned weights.

An evaluation becomes due, is leased row by row beside the training groups, and ends when every
row is answered or given up, or when its time is over. It has no part in the ledger. Time is passed
in, in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.messages import Record
from asyncrl.types import Row
from buffer.arrivals import Arrival

MAX_FAILURES = 3
"""Failures after which a row of one evaluation is given up."""

Outcome = Literal["accepted", "duplicate", "superseded", "stale", "unknown"]


@dataclass(slots=True)
class _Item:
    """One row of the running evaluation."""

    index: int
    attempt: int = 0
    failures: int = 0
    member: str | None = None
    arrival: Arrival | None = None
    given_up: bool = False


@dataclass(frozen=True, slots=True)
class EvalLease:
    """What a generator needs to know of a row to evaluate."""

    version: int
    index: int
    attempt: int
    failures: int
    timeout_s: float


@dataclass(slots=True)
class _Running:
    version: int
    items: list[_Item]
    due_at: float
    first_lease_at: float | None = None
    waiting: list[int] = field(default_factory=list)
    """Rows to be leased, the next one last."""

    @property
    def since(self) -> float:
        """When its time began: with its first lease, or else when it became due."""
        return self.due_at if self.first_lease_at is None else self.first_lease_at


class Evaluations:
    """Which version is evaluated now, and what came out of the ones before."""

    def __init__(self, rows: Sequence[Row], *, temperature: float, timeout_s: float) -> None:
        self.rows = rows
        self.results: list[Record] = []
        """One record for each finished evaluation, oldest first."""
        self.num_told = 0
        """How many of the results a learner has received."""
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._running: _Running | None = None
        self._next: int | None = None

    @property
    def idle(self) -> bool:
        return self._running is None and self._next is None

    @property
    def versions_due(self) -> list[int]:
        """The version that is evaluated, and the one that waits for it."""
        running = [self._running.version] if self._running is not None else []
        return running + ([self._next] if self._next is not None else [])

    @property
    def versions_done(self) -> set[int]:
        return {record.step for record in self.results}

    def due(self, version: int, *, now: float) -> None:
        """Asks for an evaluation of `version`; of several that wait only the newest is made."""
        running = self._running.version if self._running else None
        if not self.rows or version in self.versions_done or version == running:
            return
        self._next = version if self._next is None else max(self._next, version)
        self._begin(now)

    def has_row(self, serving_version: int) -> bool:
        """Whether `lease` has a row for a generator that serves `serving_version`."""
        running = self._running
        return running is not None and bool(running.waiting) and serving_version >= running.version

    def lease(self, member: str, *, serving_version: int, now: float) -> EvalLease | None:
        """A row for a generator that serves `serving_version`, if there is one for it."""
        running = self._running
        if running is None or not self.has_row(serving_version):
            return None
        item = running.items[running.waiting.pop()]
        item.member = member
        if running.first_lease_at is None:
            running.first_lease_at = now
        left = running.first_lease_at + self._timeout_s - now
        return EvalLease(running.version, item.index, item.attempt, item.failures, max(left, 0.1))

    def judge(self, version: int, index: int, attempt: int, oldest: int | None) -> Outcome:
        """What submitted responses to a row are worth; changes nothing."""
        running = self._running
        if running is None or running.version != version or index >= len(running.items):
            return "superseded" if version in self.versions_done else "unknown"
        item = running.items[index]
        if attempt > item.attempt:
            return "unknown"
        if item.arrival is not None or item.given_up:
            return "duplicate" if attempt == item.attempt else "superseded"
        return "stale" if oldest is not None and oldest < version else "accepted"

    def accept(self, index: int, arrival: Arrival, *, now: float) -> None:
        """Takes responses that were judged `accepted`."""
        assert self._running is not None
        item = self._running.items[index]
        item.arrival, item.member = arrival, None
        if index in self._running.waiting:
            self._running.waiting.remove(index)
        self._end_if_over(now)

    def fail(
        self, version: int, index: int, attempt: int, *, now: float, hopeless: bool = False
    ) -> Outcome:
        """A generator gives a row back; it is leased again, MAX_FAILURES times at most, and never
        when that is hopeless."""
        outcome = self.judge(version, index, attempt, None)
        running = self._running
        if outcome != "accepted" or running is None:
            return outcome
        item = running.items[index]
        if attempt < item.attempt or item.member is None:
            return "superseded"
        item.failures += 1
        if hopeless or item.failures >= MAX_FAILURES:
            item.given_up, item.member = True, None
        else:
            self._reissue(item)
        self._end_if_over(now)
        return "accepted"

    def release_member(self, member: str) -> None:
        """Passes the rows of a dead generator on."""
        for item in self._running.items if self._running else []:
            if item.member == member:
                self._reissue(item)

    def expire(self, *, now: float) -> None:
        """Ends an evaluation whose time is over, with what is there."""
        running = self._running
        if running is None:
            return
        if now - running.since > self._timeout_s:
            self._end(now)

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long: that was no time to evaluate in."""
        if (running := self._running) is not None:
            running.due_at += seconds
            if running.first_lease_at is not None:
                running.first_lease_at += seconds

    def running_s(self, *, now: float) -> float:
        """For how long the running evaluation has been made, or has been due; 0 when none runs."""
        return now - self._running.since if self._running is not None else 0.0

    def holders(self) -> list[str]:
        """Generators that have rows of the running evaluation."""
        items = self._running.items if self._running is not None else []
        return sorted({item.member for item in items if item.member is not None})

    def describe(self) -> str:
        """What the running evaluation waits for; empty when none runs."""
        running = self._running
        if running is None:
            return ""
        done = sum(item.arrival is not None for item in running.items)
        holders = self.holders()
        where = f"in flight at {', '.join(holders)}" if holders else "none in flight"
        return f"evaluation of version {running.version}: {done} of {len(self.rows)} rows, {where}"

    def _begin(self, now: float) -> None:
        if self._running is None and self._next is not None:
            items = [_Item(index) for index in range(len(self.rows))]
            waiting = list(reversed(range(len(items))))
            self._running = _Running(self._next, items, due_at=now, waiting=waiting)
            self._next = None

    def _reissue(self, item: _Item) -> None:
        assert self._running is not None
        item.attempt, item.member = item.attempt + 1, None
        self._running.waiting.append(item.index)

    def _end_if_over(self, now: float) -> None:
        assert self._running is not None
        if all(item.arrival is not None or item.given_up for item in self._running.items):
            self._end(now)

    def _end(self, now: float) -> None:
        assert self._running is not None
        running, self._running = self._running, None
        arrivals = [item.arrival for item in running.items if item.arrival is not None]
        values = _values(arrivals, len(running.items))
        values |= {
            "version": running.version,
            "temperature": self._temperature,
            "duration_s": round(now - running.since, 3),
        }
        self.results.append(Record(name="eval", step=running.version, values=values))
        if self._next in self.versions_done:
            self._next = None
        self._begin(now)


def _values(arrivals: list[Arrival], num_rows: int) -> dict[str, float | int | str]:
    """Accuracy is the mean reward of the scored responses, over all and by source."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for arrival in arrivals:
        rewards[arrival.source] += arrival.rewards
    scored = [reward for source in rewards.values() for reward in source]
    lengths = [length for arrival in arrivals for length in arrival.lengths]
    used = [version for arrival in arrivals for version in arrival.token_versions]
    values: dict[str, float | int | str] = {
        "count": len(scored),
        "num_unscored": len(lengths) - len(scored),
        "num_rows": num_rows,
        "num_rows_missing": num_rows - len(arrivals),
        "response_length_mean": sum(lengths) / max(1, len(lengths)),
    }
    if scored:
        values["accuracy"] = sum(scored) / len(scored)
        values |= {f"accuracy/{s}": sum(r) / len(r) for s, r in sorted(rewards.items()) if r}
    if used:
        values |= {"oldest_token_version": min(used), "newest_token_version": max(used)}
    return values
