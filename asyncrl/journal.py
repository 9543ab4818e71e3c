"""The journal of a run: what the buffer must not forget when it is killed.

State is a SQLite database in WAL mode, payloads are bytes in append-only segment files. One thread
writes: it takes everything that is queued, appends the payloads, commits the rows in one
transaction, and only then completes the futures (group commit). A completed future survives
SIGKILL of the process; it does not survive loss of power.

    run directory/
      journal.sqlite      journal.lock (held by the one process that writes)
      segments/000001     payloads one after the other; the rows know offset and length

    meta(key, value)      schema, run_id, and what the buffer keeps by name (committed, inc, ...)
    groups(number, ...)   one row for each admitted prompt group: GroupRow, number = admission order
    steps(step, ...)      one row for each assigned batch: StepRow; its groups are those of the step
    weights(inc, ...)     every publication: WeightsRow
    evals(version, ...)   every finished evaluation: EvalRow

A payload is appended before the row that refers to it, so a row never points at missing bytes.
After a restart writing goes on in a new segment. A segment is deleted whole, when none of its
groups can be asked for again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

log = logging.getLogger(__name__)

SCHEMA = 2
"""Raised by any change to a table. A journal of another schema is refused."""
SEGMENT_BYTES = 64 << 20
"""A segment is closed when it would grow over this."""

_TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups(
  number INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, position INTEGER NOT NULL,
  state TEXT NOT NULL, attempt INTEGER NOT NULL, strikes INTEGER NOT NULL,
  seed_k INTEGER NOT NULL, member TEXT NOT NULL, version INTEGER, started INTEGER NOT NULL,
  step INTEGER,
  accepted_attempt INTEGER, segment INTEGER, offset INTEGER, length INTEGER,
  token_versions TEXT NOT NULL, reason TEXT NOT NULL, UNIQUE(epoch, position));
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(step);
CREATE INDEX IF NOT EXISTS groups_by_segment ON groups(segment);
CREATE TABLE IF NOT EXISTS steps(
  step INTEGER PRIMARY KEY, num_groups INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
  waited_for TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS weights(
  inc INTEGER, version INTEGER, location TEXT NOT NULL, digest TEXT NOT NULL,
  PRIMARY KEY(inc, version));
CREATE TABLE IF NOT EXISTS evals(version INTEGER PRIMARY KEY, record TEXT NOT NULL);
"""


class PayloadRef(NamedTuple):
    """Where a payload lies."""

    segment: int
    offset: int
    length: int


class GroupRow(NamedTuple):
    """What is kept of one prompt group (buffer/ledger.py gives the fields their meaning)."""

    number: int
    epoch: int
    position: int
    state: str
    attempt: int
    strikes: int
    seed_k: int
    member: str
    version: int | None
    started: int
    """1: generation has begun, 0: leased only, or not even that."""
    step: int | None
    accepted_attempt: int | None
    segment: int | None
    offset: int | None
    length: int | None
    token_versions: str
    """JSON: trained tokens by version."""
    reason: str


class StepRow(NamedTuple):
    """One assigned batch, immutable once written."""

    step: int
    num_groups: int
    max_staleness: int
    waited_for: str
    record: str
    """JSON: the metrics record of the step."""


class WeightsRow(NamedTuple):
    """One publication."""

    inc: int
    version: int
    location: str
    digest: str


class EvalRow(NamedTuple):
    """One finished evaluation; `record` is JSON."""

    version: int
    record: str


@dataclass(frozen=True, slots=True)
class Change:
    """Rows that are written in one transaction; a row replaces the one with the same key."""

    groups: tuple[GroupRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    weights: tuple[WeightsRow, ...] = ()
    evals: tuple[EvalRow, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """Everything that a journal held when it was opened."""

    groups: tuple[GroupRow, ...]
    steps: tuple[StepRow, ...]
    weights: tuple[WeightsRow, ...]
    evals: tuple[EvalRow, ...]
    meta: dict[str, str]


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

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises ValueError when another process has it open, or when its schema is another."""
        self._segments = directory / "segments"
        self._segments.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(directory)
        self._segment_bytes = segment_bytes
        self._database = sqlite3.connect(
            directory / "journal.sqlite", check_same_thread=False, isolation_level=None
        )
        self._prepare(directory)
        self.stored = self._load()
        self._segment = 1 + max(self._segments_there(), default=0)
        self._offset = 0
        self._file: IO[bytes] | None = None
        self._file_segment = 0
        self._queue: queue.SimpleQueue[_Payload | _Write | _Retain | None] = queue.SimpleQueue()
        self._error: OSError | sqlite3.Error | None = None
        self._writer = threading.Thread(target=self._write_for_ever, name="journal", daemon=True)
        self._writer.start()

    def append(self, payload: bytes) -> PayloadRef:
        """Queues a payload. It is on disk before any change that is written after this call."""
        if self._offset and self._offset + len(payload) > self._segment_bytes:
            self._segment, self._offset = self._segment + 1, 0
        ref = PayloadRef(self._segment, self._offset, len(payload))
        self._offset += len(payload)
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
        with self._path(ref.segment).open("rb") as file:
            data = os.pread(file.fileno(), ref.length, ref.offset)
        if len(data) != ref.length:
            raise RuntimeError(f"payload {ref} has {len(data)} bytes: the journal is damaged")
        return data

    def close(self) -> None:
        """Writes what is queued and lets go of the files."""
        self._queue.put(None)
        self._writer.join()
        if self._file is not None:
            self._file.close()
        self._database.close()
        self._lock.close()

    def _prepare(self, directory: Path) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_TABLES)
        self._database.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (str(SCHEMA),))
        (found,) = self._database.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
        if found != str(SCHEMA):
            raise ValueError(
                f"{directory / 'journal.sqlite'} has schema {found}, this program reads {SCHEMA}: "
                "go on with the version of asyncrl that began the run, or start a new run"
            )

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
                    self._append_bytes(item)
            self._database.execute("BEGIN")
            for item in items:
                if isinstance(item, _Write):
                    self._upsert(item.change)
            self._database.execute("COMMIT")
            for item in items:
                if isinstance(item, _Retain):
                    self._delete_segments(item)
        except (OSError, sqlite3.Error) as error:
            self._error = error
        for done in waiting:
            if not done.set_running_or_notify_cancel():
                continue  # nobody waits for it any more; what it asked for is done all the same
            if self._error is None:
                done.set_result(None)
            else:
                done.set_exception(self._error)

    def _append_bytes(self, payload: _Payload) -> None:
        if self._file is None or self._file_segment != payload.ref.segment:
            if self._file is not None:
                self._file.close()
            self._file = self._path(payload.ref.segment).open("ab", buffering=0)
            self._file_segment = payload.ref.segment
        rest = memoryview(payload.data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _upsert(self, change: Change) -> None:
        tables: tuple[tuple[str, tuple[tuple[object, ...], ...]], ...] = (
            ("groups", change.groups),
            ("steps", change.steps),
            ("weights", change.weights),
            ("evals", change.evals),
            ("meta", tuple(change.meta.items())),
        )
        for table, rows in tables:
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                self._database.executemany(f"INSERT OR REPLACE INTO {table} VALUES({marks})", rows)

    def _delete_segments(self, retain: _Retain) -> None:
        marks = ", ".join("?" * len(retain.settled))
        needed = self._database.execute(
            "SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL AND "
            f"NOT (CASE WHEN step IS NULL THEN state IN ({marks}) ELSE step < ? END)",
            (*retain.settled, retain.from_step),
        )
        keep = {segment for (segment,) in needed} | {self._file_segment}
        for segment in self._segments_there():
            if segment in keep or segment > self._file_segment:
                continue
            self._database.execute("UPDATE groups SET segment=NULL WHERE segment=?", (segment,))
            try:
                self._path(segment).unlink()
            except OSError as error:
                log.warning("a segment stays until the next checkpoint: %s", error)

    def _segments_there(self) -> list[int]:
        names = [path.name for path in self._segments.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, segment: int) -> Path:
        return self._segments / f"{segment:06d}"


def fates(directory: Path) -> dict[str, int]:
    """Groups of a run directory by state. Adds up to what the data holds once the run has ended.

    Readable while the run goes on. Raises ValueError where there is no journal.
    """
    path = directory / "journal.sqlite"
    if not path.is_file():
        raise ValueError(f"there is no journal at {path}")
    database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        counts = dict(database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        rest = database.execute("SELECT value FROM meta WHERE key='not_issued'").fetchone()
    finally:
        database.close()
    if rest is not None and int(rest[0]):
        counts["not_issued"] = int(rest[0])
    return counts


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
