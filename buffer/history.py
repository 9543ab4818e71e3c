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
class _Said:
    now: float
    row: BeatRow
    seconds: dict[str, float]

    def grown_to(self, later: _Said) -> list[str]:
        """Phases that took time since."""
        return [k for k, s in later.seconds.items() if s > self.seconds.get(k, 0.0)]

    def is_same_as(self, later: _Said) -> bool:
        """Nothing but the time of one phase has gone on since."""
        mine, its = ((r.state, r.tokens, r.version) for r in (self.row, later.row))
        return mine == its and len(self.grown_to(later)) <= 1


class History:
    """Collects rows; `take_rows` gives them to the next transaction."""

    def __init__(self, *, interval_s: float, wall_offset: float) -> None:
        """`wall_offset` + a monotonic time is the wall-clock time."""
        self._interval_s = interval_s
        self._early_s = EARLY_SHARE * interval_s
        self._wall_offset = wall_offset
        self._last: dict[str, _Said] = {}
        """As the last row of each member says."""
        self._idle: dict[str, _Said] = {}
        """Heard after that row, and the same but for time: a row of its own as soon as there is
        news, so that the news is not spread over the time before."""
        self._rows: list[BeatRow] = []
        self._oldest: float | None = None
        self.lives = Lives()
        """What the status tells of all this."""

    def heard(self, member: Member, *, now: float) -> None:
        """After a heartbeat of `member`."""
        last = self._last.get(member.name)
        if last is None:
            self.note(member, now=now)
        elif now - last.now >= self._early_s:
            self._compare(last, self._said(member, now))

    def note(self, member: Member, *, now: float) -> None:
        """A row at any rate: it has left, or is dead."""
        said = self._said(member, now)
        last, idle = self._last.get(member.name), self._idle.get(member.name)
        if last is not None and idle is not None and not last.is_same_as(said):
            self._keep(idle)
        self._keep(said)

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
            self._idle.pop(name, None)

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

    def _said(self, member: Member, now: float) -> _Said:
        return _Said(now, self._row(member, now), dict(member.seconds))

    def _compare(self, last: _Said, said: _Said) -> None:
        """Rows for what is news in `said`, that comes an interval after `last` or later."""
        if last.is_same_as(said):
            if said.now - last.now >= IDLE_ROW_S and last.grown_to(said):
                self._keep(said)
            else:
                self._idle[said.row.member] = said
            return
        idle = self._idle.get(said.row.member)
        if idle is not None:
            self._keep(idle)
        if idle is None or said.now - idle.now >= self._early_s:
            self._keep(said)

    def _keep(self, said: _Said) -> None:
        self._last[said.row.member] = said
        self._idle.pop(said.row.member, None)
        self._rows.append(said.row)
        self.lives.add(said.row)
        self._oldest = said.now if self._oldest is None else self._oldest


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
