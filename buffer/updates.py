"""Weight updates: what each version cost every generator, and how long it was on its way.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.journal.tables import ServedRow
from asyncrl.messages import Record, Served
from asyncrl.types import WeightId
from buffer.members import Member

STAGED = ("rendezvous", "transfer", "verify")
SWAPPED = ("pause", "load", "reset", "resume")
PHASES = (*STAGED, "wait", *SWAPPED, "stage", "paused")
"""Of messages.Served, and two sums: `stage`, and what the engine stood still for."""
MAX_KNOWN = 32
"""Versions that are remembered; a record is made of the oldest one at the latest then."""


@dataclass(slots=True)
class _Update:
    """One published version."""

    weights: WeightId
    published_at: float | None
    """None: before this buffer began."""
    served: dict[str, ServedRow] = field(default_factory=dict)
    """By generator."""
    num_skipped: int = 0
    """Generators that went from an older version to a newer one."""
    is_told: bool = False


class Updates:
    """Follows the newest versions from publication to the generators."""

    def __init__(
        self, published: Iterable[WeightId], *, is_under_pause: bool, wall_offset: float
    ) -> None:
        """`published` are the versions of earlier buffers. `is_under_pause`: generators stand still
        while they stage. `wall_offset` + a monotonic time is the wall-clock time."""
        self._is_under_pause = is_under_pause
        self._wall_offset = wall_offset
        self._newest_before = max(published, default=None)
        self._updates: dict[WeightId, _Update] = {}
        """Oldest first."""
        self._asked_at: dict[str, float] = {}
        """When each generator, its model loaded, asked for weights first."""
        self._serves: dict[str, WeightId] = {}
        """What each has said last that it serves."""
        self._rows: list[ServedRow] = []
        self.unread: list[Record] = []
        """Records of name `weights`, the oldest first, that the learner has yet to read. There are
        few: a learner that reads nothing publishes nothing."""

    def asked(self, generator: str, have: WeightId, *, now: float) -> None:
        """It would take newer weights than it has from now on."""
        self._asked_at.setdefault(generator, now)
        self._serves.setdefault(generator, have)

    def published(self, weights: WeightId, *, now: float) -> None:
        """They can be taken; a second time changes nothing."""
        is_old = self._newest_before is not None and weights <= self._newest_before
        self._updates.setdefault(weights, _Update(weights, None if is_old else now))
        while len(self._updates) > MAX_KNOWN:
            oldest = next(iter(self._updates))
            self._tell(self._updates[oldest])
            del self._updates[oldest]

    def served(self, generator: str, message: Served, *, now: float) -> None:
        """It serves a version; a second time changes nothing."""
        weights = WeightId(message.inc, message.version)
        before = self._serves.get(generator)
        if before is not None and weights <= before:
            return
        self._serves[generator] = weights
        update = self._updates.get(weights) or _Update(weights, None)
        since = self._available_since(update, generator)
        row = ServedRow(
            inc=weights.inc,
            version=weights.version,
            member=generator,
            at=now + self._wall_offset,
            propagation_s=None if since is None else round(now - since, 6),
            seconds=json.dumps(self._seconds(message.seconds)),
        )
        update.served[generator] = row
        self._rows.append(row)
        for other in self._updates.values():
            if before is not None and before < other.weights < weights:
                other.num_skipped += self._was_there(generator, other)

    def settle(self, alive: Collection[Member]) -> None:
        """Makes the records of versions that no generator of those `alive` is on its way to."""
        there = {member.name for member in alive}
        self._asked_at = {name: at for name, at in self._asked_at.items() if name in there}
        self._serves = {name: weights for name, weights in self._serves.items() if name in there}
        oldest, newest = min(self._serves.values(), default=None), max(self._updates, default=None)
        for update in self._updates.values():
            is_over = bool(update.served) or update.weights != newest
            if is_over and (oldest is None or oldest >= update.weights):
                self._tell(update)

    def settle_all(self) -> None:
        """The run ends: records are made of all versions that some generator serves."""
        for update in self._updates.values():
            if update.served or update.num_skipped:
                self._tell(update)

    def take_rows(self) -> tuple[ServedRow, ...]:
        """For the next transaction."""
        taken, self._rows = tuple(self._rows), []
        return taken

    @property
    def has_rows(self) -> bool:
        return bool(self._rows)

    def last_values(self) -> dict[str, Any]:
        """Of the newest version that a generator serves: which it is, propagation and pause in
        seconds, the longest; empty where none is known."""
        served = [update for update in self._updates.values() if update.served]
        if not served:
            return {}
        newest = max(served, key=lambda update: update.weights)
        values = _measures(newest.served.values())
        return {
            "last_version": newest.weights.version,
            "propagation_s": values.get("propagation_max_s"),
            "paused_s": values["paused_max_s"],
        }

    def _was_there(self, generator: str, update: _Update) -> bool:
        """Whether it already asked for weights when this version was published."""
        asked_at = self._asked_at.get(generator, float("inf"))
        return update.published_at is not None and update.published_at >= asked_at

    def _available_since(self, update: _Update, generator: str) -> float | None:
        """Since when this generator could have had the version; None: not known."""
        asked_at = self._asked_at.get(generator)
        if update.published_at is None or asked_at is None:
            return None
        return max(update.published_at, asked_at)

    def _seconds(self, said: Mapping[str, float]) -> dict[str, float]:
        """By phase, the two sums among them."""
        seconds = {phase: said.get(phase, 0.0) for phase in (*STAGED, "wait", *SWAPPED)}
        stage = sum(seconds[phase] for phase in STAGED)
        swap = sum(seconds[phase] for phase in SWAPPED)
        sums = {"stage": stage, "paused": swap + stage * self._is_under_pause}
        return {phase: round(spent, 6) for phase, spent in (seconds | sums).items()}

    def _tell(self, update: _Update) -> None:
        if update.is_told:
            return
        update.is_told = True
        values: dict[str, float | int | str] = {
            "inc": update.weights.inc,
            "num_served": len(update.served),
            "num_skipped": update.num_skipped,
            **_measures(update.served.values()),
        }
        self.unread.append(Record(name="weights", step=update.weights.version, values=values))


def _measures(rows: Collection[ServedRow]) -> dict[str, float]:
    """Mean and maximum over generators of propagation and of each phase, in seconds; and the sum of
    the pauses."""
    seconds = [json.loads(row.seconds) for row in rows]
    columns = {phase: [each[phase] for each in seconds] for phase in PHASES}
    columns["propagation"] = [row.propagation_s for row in rows if row.propagation_s is not None]
    values: dict[str, float] = {}
    for name, spent in columns.items():
        if spent:
            mean_s = round(sum(spent) / len(spent), 6)
            values |= {f"{name}_mean_s": mean_s, f"{name}_max_s": max(spent)}
    return values | ({"paused_sum_s": round(sum(columns["paused"]), 6)} if rows else {})
