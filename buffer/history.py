"""What each process did and when: heartbeats as rows of the journal, for the report of a run.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.journal import open_read_only
from asyncrl.journal.tables import BeatRow
from buffer.lives import Lives
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
        self.lives = Lives()
        """What the status tells of all this."""

    def heard(self, member: Member, *, now: float) -> None:
        """After a heartbeat of `member`."""
        last = self._last.get(member.name)
        if last is None or self._is_news(member, last, now):
            self.note(member, now=now)

    def note(self, member: Member, *, now: float) -> None:
        """A row at any rate: it has left, or is dead."""
        row = self._row(member, now)
        self._last[member.name] = _Last(now, row, dict(member.seconds))
        self._rows.append(row)
        self.lives.add(row)
        self._oldest = now if self._oldest is None else self._oldest

    def note_last(self, members: Iterable[Member]) -> None:
        """A row for what each has said since its last one: this buffer ends."""
        for member in members:
            last = self._last.get(member.name)
            said = (member.state, member.seconds)
            if last is not None and (last.row.state, last.seconds) != said:
                self.note(member, now=member.last_seen)

    def forget_others(self, there: Collection[str]) -> None:
        """Of members that are not `there` no heartbeat is compared with the last one."""
        for name in self._last.keys() - set(there):
            del self._last[name]

    def up_to_now(self, members: Iterable[Member]) -> list[BeatRow]:
        """Enough rows for the shares of the last minutes and of the whole run: those that are
        kept, and what each of `members` has said last."""
        latest = [self._row(member, member.last_seen) for member in members if member.seconds]
        return [*self.lives.rows(), *latest]

    def wall(self, now: float) -> float:
        """The wall-clock time."""
        return now + self._wall_offset

    def is_due(self, *, now: float) -> bool:
        """Whether rows have waited for a transaction of somebody else for long enough."""
        return self._oldest is not None and now - self._oldest > self._interval_s

    def take_rows(self) -> tuple[BeatRow, ...]:
        taken, self._rows, self._oldest = tuple(self._rows), [], None
        return taken

    def _row(self, member: Member, at: float) -> BeatRow:
        return BeatRow(
            at=at + self._wall_offset,
            member=member.name,
            role=member.role,
            state=member.state,
            seconds=json.dumps({k: round(v, 3) for k, v in member.seconds.items()}),
            tokens=member.num_tokens,
            version=member.serving.version,
        )

    def _is_news(self, member: Member, last: _Last, now: float) -> bool:
        if now - last.now < EARLY_SHARE * self._interval_s:
            return False
        before = (last.row.state, last.row.tokens, last.row.version)
        grown = [k for k, s in member.seconds.items() if s > last.seconds.get(k, 0.0)]
        is_idle = before == (member.state, member.num_tokens, member.serving.version)
        return not is_idle or len(grown) > 1 or (now - last.now >= IDLE_ROW_S and bool(grown))


def earlier_beats(directory: Path) -> list[BeatRow]:
    """The first and the last row of each life in the journal of a run directory; none where there
    is no journal."""
    query = (
        "SELECT at, member, role, state, seconds, tokens, version FROM beats WHERE rowid IN "
        "(SELECT MIN(rowid) FROM beats GROUP BY member UNION "
        "SELECT MAX(rowid) FROM beats GROUP BY member) ORDER BY rowid"
    )
    try:
        with closing(open_read_only(directory)) as database:
            return [BeatRow._make(row) for row in database.execute(query)]
    except (ValueError, sqlite3.OperationalError):
        return []
