"""The journal of a run: what the buffer must not forget when it is killed.

State is a SQLite database in WAL mode, payloads are bytes in append-only segment files. One thread
writes: it takes everything that is queued, appends the payloads, commits the rows in one
transaction, and only then completes the futures (group commit). A completed future survives
SIGKILL of the process; it does not survive loss of power.

    run directory/
      journal.sqlite      journal.lock (held by the one process that writes)
      segments/000001     payloads one after the other; the rows know offset and length

    (the tables: asyncrl/journal_tables.py)

A payload is appended before the row that refers to it, so a row never points at missing bytes.
After a restart writing goes on in a new segment. A segment is deleted whole, when none of its
groups can be asked for again.
"""

from __future__ import annotations

import fcntl
import queue
import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

from asyncrl.journal_tables import (
    SCHEMA,
    TABLES,
    Change,
    EvalRow,
    GroupRow,
    PayloadRef,
    StepRow,
    Stored,
    WeightsRow,
)
from asyncrl.segments import Segments

SEGMENT_BYTES = 64 << 20
"""A segment is closed when it would grow over this."""
MAX_BEATS = 100_000
"""Heartbeats that are kept, about 30 MB. Above it a quarter of them goes, where they lie closest.
The first and the last of a process stay, and the sums in all count from its start as before."""
_THIN_OUT = """
DELETE FROM beats WHERE rowid IN (
  SELECT id FROM (
    SELECT rowid AS id, state, row_number() OVER one AS place,
           lead(at) OVER one - lag(at) OVER one AS gap
    FROM beats WINDOW one AS (PARTITION BY member ORDER BY rowid))
  WHERE place % 2 = 0 AND gap IS NOT NULL AND state NOT IN ('left', 'dead')
  ORDER BY gap LIMIT ?)"""


@dataclass(frozen=True, slots=True)
class _Payload:
    ref: PayloadRef
    data: bytes


@dataclass(frozen=True, slots=True)
class _Write:
    change: Change
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Retain:
    from_step: int
    settled: frozenset[str]
    done: Future[None]


class Journal:
    """The journal of one run directory, open for writing by this process alone."""

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, max_beats: int = MAX_BEATS
    ) -> None:
        """Raises ValueError when another process has it open, or when its schema is another."""
        self._segments = Segments(directory / "segments", segment_bytes=segment_bytes)
        self._lock = _lock(directory)
        self._database = sqlite3.connect(
            directory / "journal.sqlite", check_same_thread=False, isolation_level=None
        )
        self._prepare(directory)
        self.stored = self._load()
        (self._num_beats,) = self._database.execute("SELECT COUNT(*) FROM beats").fetchone()
        self._max_beats = max_beats
        self._queue: queue.SimpleQueue[_Payload | _Write | _Retain | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._writer = threading.Thread(target=self._write_for_ever, name="journal", daemon=True)
        self._writer.start()

    def append(self, payload: bytes) -> PayloadRef:
        """Queues a payload. It is on disk before any change that is written after this call."""
        ref = self._segments.place(len(payload))
        self._queue.put(_Payload(ref, payload))
        return ref

    def write(self, change: Change) -> Future[None]:
        """Queues a change; the future completes when it, and all before it, survive SIGKILL."""
        done: Future[None] = Future()
        self._queue.put(_Write(change, done))
        return done

    def retain(self, *, from_step: int, settled: Iterable[str]) -> Future[None]:
        """Deletes the closed segments whose groups all were trained before `from_step`, or are in
        a state of `settled` without a step (filtered, for example). One that cannot be deleted is a
        warning, and is tried again at the next call."""
        done: Future[None] = Future()
        self._queue.put(_Retain(from_step, frozenset(settled), done))
        return done

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at `ref`, whose write has completed. May be called from any thread."""
        return self._segments.read(ref)

    def close(self) -> None:
        """Writes what is queued and lets go of the files."""
        self._queue.put(None)
        self._writer.join()
        self._segments.close()
        self._database.close()
        self._lock.close()

    def _prepare(self, directory: Path) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        found = self._found_schema()
        if found != str(SCHEMA):
            raise ValueError(
                f"{directory / 'journal.sqlite'} has schema {found}, this program reads {SCHEMA}: "
                "go on with the version of asyncrl that began the run, or start a new run"
            )
        self._database.executescript(TABLES)
        self._database.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (str(SCHEMA),))

    def _found_schema(self) -> str:
        """That of the tables that are there; SCHEMA where there are none yet."""
        if not self._database.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
            return str(SCHEMA)
        row = self._database.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
        return str(row[0]) if row else str(SCHEMA)

    def _load(self) -> Stored:
        def rows(table: str, key: str) -> list[tuple[object, ...]]:
            return self._database.execute(f"SELECT * FROM {table} ORDER BY {key}").fetchall()

        return Stored(
            groups=tuple(GroupRow._make(row) for row in rows("groups", "number")),
            steps=tuple(StepRow._make(row) for row in rows("steps", "step")),
            weights=tuple(WeightsRow._make(row) for row in rows("weights", "inc, version")),
            evals=tuple(EvalRow._make(row) for row in rows("evals", "version")),
            meta=dict(self._database.execute("SELECT key, value FROM meta").fetchall()),
        )

    def _write_for_ever(self) -> None:
        while True:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            self._write_together([item for item in items if item is not None])
            if None in items:
                return

    def _write_together(self, items: list[_Payload | _Write | _Retain]) -> None:
        waiting = [item.done for item in items if not isinstance(item, _Payload)]
        try:
            if self._error is not None:
                raise self._error
            for item in items:
                if isinstance(item, _Payload):
                    self._segments.write(item.ref, item.data)
            self._database.execute("BEGIN")
            for item in items:
                if isinstance(item, _Write):
                    self._upsert(item.change)
            self._database.execute("COMMIT")
            for item in items:
                if isinstance(item, _Retain):
                    self._delete_segments(item)
        except Exception as error:  # whatever it is: those who wait must hear of it
            self._error = error
        for done in waiting:
            if not done.set_running_or_notify_cancel():
                continue  # nobody waits for it any more; what it asked for is done all the same
            if self._error is None:
                done.set_result(None)
            else:
                done.set_exception(self._error)

    def _upsert(self, change: Change) -> None:
        tables: tuple[tuple[str, tuple[tuple[object, ...], ...]], ...] = (
            ("groups", change.groups),
            ("steps", change.steps),
            ("weights", change.weights),
            ("evals", change.evals),
            ("beats", change.beats),
            ("meta", tuple(change.meta.items())),
        )
        for table, rows in tables:
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                self._database.executemany(f"INSERT OR REPLACE INTO {table} VALUES({marks})", rows)
        self._num_beats += len(change.beats)
        if self._num_beats > self._max_beats:
            thinned = self._database.execute(_THIN_OUT, (self._num_beats // 4,))
            self._num_beats -= thinned.rowcount
            # More where many processes have few each: not every heartbeat is to look for some.
            self._max_beats = max(self._max_beats, self._num_beats * 9 // 8)

    def _delete_segments(self, retain: _Retain) -> None:
        marks = ", ".join("?" * len(retain.settled))
        needed = self._database.execute(
            "SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL AND "
            f"NOT (CASE WHEN step IS NULL THEN state IN ({marks}) ELSE step < ? END)",
            (*retain.settled, retain.from_step),
        )
        keep = {segment for (segment,) in needed}
        for segment in self._segments.closed():
            if segment not in keep:
                self._database.execute("UPDATE groups SET segment=NULL WHERE segment=?", (segment,))
                self._segments.delete(segment)


def open_read_only(directory: Path) -> sqlite3.Connection:
    """The journal of a run directory for reading, also while the run goes on. Close it.

    Raises ValueError where there is none.
    """
    path = directory / "journal.sqlite"
    if not path.is_file():
        raise ValueError(f"there is no journal at {path}")
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)


def fates(directory: Path) -> dict[str, int]:
    """Groups of a run directory by state, and `not_issued`: they add up to what the data holds.

    Readable while the run goes on. Raises ValueError where there is no journal.
    """
    with closing(open_read_only(directory)) as database:
        counts = dict(database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        rest = database.execute("SELECT value FROM meta WHERE key='not_issued'").fetchone()
    not_issued = int(rest[0]) if rest else 0
    return counts | ({"not_issued": not_issued} if not_issued else {})


def _lock(directory: Path) -> IO[bytes]:
    file = (directory / "journal.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(
            f"another buffer has the journal in {directory} open: end it first"
        ) from None
    return file
