"""The heartbeats that the status needs: where the time of each process went, of late and so far."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from asyncrl.journal.tables import BeatRow
from asyncrl.run_clock import RunClock
from asyncrl.shares import Shares, lanes, shares

RECENT_S = 300.0
"""What `recent` in the status goes back to."""
APART_S = RECENT_S / 20
"""Rows of a process that are kept lie at least so far apart."""
MAX_LIVES = 500
"""So many lives are told of; those that were last heard longest ago are forgotten."""


@dataclass(slots=True)
class _Life:
    first: BeatRow
    last: BeatRow
    recent: deque[BeatRow] = field(default_factory=deque)

    def add(self, row: BeatRow) -> None:
        if not self.recent or row.at - self.recent[-1].at >= APART_S:
            self.recent.append(row)
        self.last = row

    def forget(self, before: float) -> None:
        """All but the newest of the rows that are older."""
        while len(self.recent) > 1 and self.recent[1].at < before:
            self.recent.popleft()


class Lives:
    """A few rows of each life: sums in a heartbeat count from the start of its process, so the
    first and the last tell of all of it, and only of the last minutes there are more."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}

    def add(self, row: BeatRow) -> None:
        """Rows that have not counted anything yet tell nothing."""
        if row.seconds == "{}":
            return
        if row.member not in self._lives:
            self._make_room(row.at)
            self._lives[row.member] = _Life(first=row, last=row)
        life = self._lives[row.member]
        life.add(row)
        life.forget(row.at - RECENT_S)

    def rows(self) -> list[BeatRow]:
        return [
            row for life in self._lives.values() for row in (life.first, *life.recent, life.last)
        ]

    def _make_room(self, at: float) -> None:
        """For one more life, that begins about this time."""
        for life in self._lives.values():
            life.forget(at - RECENT_S)
        if len(self._lives) >= MAX_LIVES:
            del self._lives[min(self._lives, key=lambda member: self._lives[member].last.at)]


def time_values(rows: list[BeatRow], *, now: float) -> list[dict[str, Any]]:
    """For each process seconds by state, over the last RECENT_S and over the whole run until `now`
    (wall-clock time), pauses left out; each adds up to that time."""
    clock = RunClock((span.begin_s, span.end_s) for lane in lanes(rows) for span in lane.spans)
    found, until_s = lanes(rows, at=clock.seconds), clock.seconds(now)
    recent = shares(found, since_s=max(0.0, until_s - RECENT_S), until_s=until_s)
    late = {each.process: _rounded(each) for each in recent}
    return [
        {
            "process": each.process,
            "role": each.role,
            "recent": late.get(each.process, {}),
            "run": _rounded(each),
        }
        for each in shares(found, since_s=0.0, until_s=until_s)
    ]


def _rounded(each: Shares) -> dict[str, float]:
    return {state: round(seconds, 3) for state, seconds in each.seconds.items()}
