"""What each process did and when: heartbeats as rows of the journal, for the report of a run.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from asyncrl.journal_tables import BeatRow
from buffer.members import Member

EARLY_SHARE = 0.9
"""A heartbeat that comes before this share of the interval has passed (after a swap) makes no row:
its sums are in the next one."""
IDLE_ROW_S = 60.0
"""A process that does nothing but stay in one state has a row this often."""


@dataclass(frozen=True, slots=True)
class _Last:
    now: float
    row: BeatRow
    seconds: dict[str, float]


class History:
    """Collects rows; `take_rows` gives them to the next transaction."""

    def __init__(self, *, interval_s: float, wall_offset: float) -> None:
        """`wall_offset` + a monotonic time is the wall-clock time."""
        self._interval_s = interval_s
        self._wall_offset = wall_offset
        self._last: dict[str, _Last] = {}
        self._rows: list[BeatRow] = []
        self._oldest: float | None = None

    def heard(self, member: Member, *, now: float) -> None:
        """After a heartbeat of `member`."""
        last = self._last.get(member.name)
        if last is None or self._is_news(member, last, now):
            self.note(member, now=now)

    def note(self, member: Member, *, now: float) -> None:
        """A row at any rate: it has left, or is dead."""
        row = BeatRow(
            at=now + self._wall_offset,
            member=member.name,
            role=member.role,
            state=member.state,
            seconds=json.dumps({k: round(v, 3) for k, v in member.seconds.items()}),
            tokens=member.num_tokens,
            version=member.serving.version,
        )
        self._last[member.name] = _Last(now, row, dict(member.seconds))
        self._rows.append(row)
        self._oldest = now if self._oldest is None else self._oldest

    def is_due(self, *, now: float) -> bool:
        """Whether rows have waited for a transaction of somebody else for long enough."""
        return self._oldest is not None and now - self._oldest > self._interval_s

    def take_rows(self) -> tuple[BeatRow, ...]:
        taken, self._rows, self._oldest = tuple(self._rows), [], None
        return taken

    def _is_news(self, member: Member, last: _Last, now: float) -> bool:
        if now - last.now < EARLY_SHARE * self._interval_s:
            return False
        before = (last.row.state, last.row.tokens, last.row.version)
        grown = [k for k, s in member.seconds.items() if s > last.seconds.get(k, 0.0)]
        is_idle = before == (member.state, member.num_tokens, member.serving.version)
        return not is_idle or len(grown) > 1 or (now - last.now >= IDLE_ROW_S and bool(grown))
