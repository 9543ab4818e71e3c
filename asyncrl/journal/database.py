"""The SQLite side of the journal: the rows of asyncrl/journal/tables.py, for its one writer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from asyncrl.journal.tables import (
    SCHEMA,
    TABLES,
    Change,
    EvalRow,
    GroupRow,
    StepRow,
    Stored,
    WeightsRow,
)

ROWS_AT_ONCE = 256
"""Rows of one statement."""
LOCKED_S = 60.0
"""How long another program may keep the database locked, before the writer gives up."""
WAL_BYTES = 16 << 20
"""What SQLite's write-ahead log (journal.sqlite-wal) shrinks to once no reader holds it longer."""
_THIN_OUT = """
DELETE FROM beats WHERE rowid IN (
  SELECT id FROM (
    SELECT rowid AS id, state, row_number() OVER one AS place,
           lead(at) OVER one - lag(at) OVER one AS gap
    FROM beats WINDOW one AS (PARTITION BY member ORDER BY rowid))
  WHERE place % 2 = 0 AND gap IS NOT NULL AND state NOT IN ('left', 'dead')
  ORDER BY gap LIMIT ?)"""


class JournalLocked(Exception):
    """Another program keeps the writer out; the message says so to a person."""


class JournalDatabase:
    """journal.sqlite of one run directory, open for writing. Any thread may use it, one at a
    time."""

    def __init__(self, directory: Path, *, is_synced: bool, max_beats: int) -> None:
        """`is_synced`: every transaction waits for the disk. Raises ValueError when its schema is
        another."""
        self._path = directory / "journal.sqlite"
        self._sql = sqlite3.connect(
            self._path, timeout=LOCKED_S, check_same_thread=False, isolation_level=None
        )
        self._sql.execute("PRAGMA journal_mode=WAL")
        self._sql.execute(f"PRAGMA synchronous={'FULL' if is_synced else 'NORMAL'}")
        self._sql.execute(f"PRAGMA journal_size_limit={WAL_BYTES}")
        self._make_tables()
        (self._num_beats,) = self._sql.execute("SELECT COUNT(*) FROM beats").fetchone()
        self._max_beats = max_beats

    def load(self) -> Stored:
        """Everything that a run goes on from."""

        def rows(table: str, key: str) -> list[tuple[object, ...]]:
            return self._sql.execute(f"SELECT * FROM {table} ORDER BY {key}").fetchall()

        return Stored(
            groups=tuple(GroupRow._make(row) for row in rows("groups", "number")),
            steps=tuple(StepRow._make(row) for row in rows("steps", "step")),
            weights=tuple(WeightsRow._make(row) for row in rows("weights", "inc, version")),
            evals=tuple(EvalRow._make(row) for row in rows("evals", "version")),
            meta=dict(self._sql.execute("SELECT key, value FROM meta").fetchall()),
        )

    def write(self, changes: Iterable[Change]) -> None:
        """One transaction for all of them. JournalLocked when another program has had the database
        locked for LOCKED_S."""
        try:
            self._sql.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise JournalLocked(
                f"another program has {self._path} locked for {LOCKED_S:g} s: end it (only "
                "`sqlite3 -readonly` may look at it), and go on with checkpoint.resume=auto"
            ) from None
        for change in changes:
            self._upsert(change)
        self._sql.execute("COMMIT")

    def needed_segments(self, *, from_step: int, settled: frozenset[str]) -> set[int]:
        """Those with a group of step `from_step` or later, or without a step and in none of the
        states `settled`."""
        marks = ", ".join("?" * len(settled))
        needed = self._sql.execute(
            "SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL AND "
            f"NOT (CASE WHEN step IS NULL THEN state IN ({marks}) ELSE step < ? END)",
            (*settled, from_step),
        )
        return {segment for (segment,) in needed}

    def forget_segment(self, segment: int) -> None:
        """No row refers to this segment any more."""
        self._sql.execute("UPDATE groups SET segment=NULL WHERE segment=?", (segment,))

    def close(self) -> None:
        self._sql.close()

    def _make_tables(self) -> None:
        refuse_other_schema(self._sql, self._path)
        self._sql.executescript(TABLES)
        self._sql.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (str(SCHEMA),))

    def _upsert(self, change: Change) -> None:
        tables: tuple[tuple[str, tuple[tuple[object, ...], ...]], ...] = (
            ("groups", change.groups),
            ("steps", change.steps),
            ("weights", change.weights),
            ("served", change.served),
            ("evals", change.evals),
            ("beats", change.beats),
            ("meta", tuple(change.meta.items())),
        )
        for table, rows in tables:
            for start in range(0, len(rows), ROWS_AT_ONCE):
                self._insert(table, rows[start : start + ROWS_AT_ONCE])
        self._thin_out(len(change.beats))

    def _insert(self, table: str, rows: tuple[tuple[object, ...], ...]) -> None:
        """In one statement: each gives the interpreter away, and waits to have it back."""
        marks = f"({', '.join('?' * len(rows[0]))})"
        values = ", ".join([marks] * len(rows))
        flat = [value for row in rows for value in row]
        self._sql.execute(f"INSERT OR REPLACE INTO {table} VALUES {values}", flat)

    def _thin_out(self, num_new: int) -> None:
        self._num_beats += num_new
        if self._num_beats > self._max_beats:
            thinned = self._sql.execute(_THIN_OUT, (self._num_beats // 4,))
            self._num_beats -= thinned.rowcount
            # More where many processes have few each: not every heartbeat is to look for some.
            self._max_beats = max(self._max_beats, self._num_beats * 9 // 8)


def refuse_other_schema(sql: sqlite3.Connection, path: Path) -> None:
    """Raises ValueError, naming `path`, for a database with tables of another schema."""
    found = None
    if sql.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
        found = sql.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
    if found is not None and found[0] != str(SCHEMA):
        raise ValueError(
            f"{path} has schema {found[0]}, this program reads {SCHEMA}: "
            "go on with the version of asyncrl that began the run, or start a new run"
        )
