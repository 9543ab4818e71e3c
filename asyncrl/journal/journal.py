"""The journal of a run: what the buffer must not forget when it is killed (docs/journal.md).

State is a SQLite database in WAL mode, payloads are bytes in append-only segment files. One thread
writes: it takes everything that is queued, appends the payloads, commits the rows in one
transaction, and only then completes the futures (group commit). A completed future survives
SIGKILL of the process; with durability `full` it survives loss of power, too.

    run directory/
      journal.sqlite      journal.lock (held by the one process that writes)
      segments/000001     payloads one after the other, each with a checksum; the rows know offset
                          and length

    (the tables: asyncrl/journal/tables.py)

A payload is appended before the row that refers to it, so a row never points at missing bytes.
After a restart writing goes on in a new segment. A segment is deleted whole, when none of its
groups can be asked for again. A run with durability `none` has a MemoryJournal instead.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from asyncrl.disk import sync
from asyncrl.journal.claim import NOTHING_KEPT, is_nothing_kept, refuse_lost_books, take_lock
from asyncrl.journal.database import JournalDatabase
from asyncrl.journal.segments import Segments
from asyncrl.journal.tables import Change, PayloadRef
from asyncrl.wire import Frame

SEGMENT_BYTES = 64 << 20
"""A segment is closed when it would grow over this."""
RECENT_BYTES = 256 << 20
"""Payloads that are kept in memory, too, until they are read for the first time."""
MAX_BEATS = 100_000
"""Heartbeats that are kept, about 30 MB. Above it a quarter of them goes, where they lie closest.
The first and the last of a process stay, and the sums in all count from its start as before."""


@dataclass(frozen=True, slots=True)
class _Payload:
    ref: PayloadRef
    data: Frame


@dataclass(frozen=True, slots=True)
class _Write:
    change: Change
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Retain:
    from_step: int
    settled: frozenset[str]
    done: Future[None]


class _Recent:
    """The last payloads that came and were not read yet, up to RECENT_BYTES: most are asked for
    soon, and then need not come from the disk. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payloads: dict[PayloadRef, Frame] = {}
        self._num_bytes = 0

    def add(self, ref: PayloadRef, payload: Frame) -> None:
        with self._lock:
            self._payloads[ref] = payload
            self._num_bytes += ref.length
            while self._num_bytes > RECENT_BYTES:
                self._take(next(iter(self._payloads)))

    def take(self, ref: PayloadRef) -> Frame | None:
        with self._lock:
            return self._take(ref)

    def _take(self, ref: PayloadRef) -> Frame | None:
        payload = self._payloads.pop(ref, None)
        if payload is not None:
            self._num_bytes -= ref.length
        return payload


class Journal:
    """The journal of one run directory, open for writing by this process alone."""

    def __init__(
        self,
        directory: Path,
        *,
        durability: Literal["process", "full"] = "process",
        segment_bytes: int = SEGMENT_BYTES,
        max_beats: int = MAX_BEATS,
    ) -> None:
        """Raises ValueError when another process has it open, when its schema is another, and when
        the run was begun with durability `none`."""
        refuse_lost_books(directory)
        self._is_synced = durability == "full"
        self._lock = take_lock(directory)
        self._segments = Segments(
            directory / "segments", segment_bytes=segment_bytes, is_synced=self._is_synced
        )
        self._database = JournalDatabase(directory, is_synced=self._is_synced, max_beats=max_beats)
        if self._is_synced:
            sync(directory)
        self.stored = self._database.load()
        self._recent = _Recent()
        self._queue: queue.SimpleQueue[_Payload | _Write | _Retain | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._rowless_segment: int | None = None
        """The first segment with a payload whose row has not come yet."""
        self._writer = threading.Thread(target=self._write_for_ever, name="journal", daemon=True)
        self._writer.start()

    @property
    def num_bytes(self) -> int:
        """Of all payloads that are stored or queued, with their checksums."""
        return self._segments.num_bytes

    def append(self, payload: Frame, *, is_read_soon: bool = True) -> PayloadRef:
        """Queues a payload. It is on disk before any change that is written after this call, and
        the first such change has the row that refers to it.
        `is_read_soon`: it stays in memory, too, for the first `read`."""
        ref = self._segments.place(len(payload))
        self._queue.put(_Payload(ref, payload))
        if is_read_soon:
            self._recent.add(ref, payload)
        return ref

    def write(self, change: Change) -> Future[None]:
        """Queues a change; the future completes when it, and all before it, survive SIGKILL (with
        durability `full`: loss of power)."""
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

    def read(self, ref: PayloadRef) -> Frame:
        """The payload at `ref`, whose write has completed. May be called from any thread. Raises
        segments.DamagedError when the disk has not what was written."""
        payload = self._recent.take(ref)
        return self._segments.read(ref) if payload is None else payload

    def close(self) -> None:
        """Writes what is queued and lets go of the files."""
        self._queue.put(None)
        self._writer.join()
        self._segments.close()
        self._database.close()
        self._lock.close()

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
            self._append([item for item in items if isinstance(item, _Payload)])
            self._database.write(item.change for item in items if isinstance(item, _Write))
            self._note_rowless(items)
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

    def _append(self, payloads: list[_Payload]) -> None:
        if payloads:
            self._segments.write([(payload.ref, payload.data) for payload in payloads])
            self._segments.sync()

    def _note_rowless(self, items: list[_Payload | _Write | _Retain]) -> None:
        for item in items:
            if isinstance(item, _Write):
                self._rowless_segment = None
            elif isinstance(item, _Payload) and self._rowless_segment is None:
                self._rowless_segment = item.ref.segment

    def _delete_segments(self, retain: _Retain) -> None:
        keep = self._database.needed_segments(from_step=retain.from_step, settled=retain.settled)
        for segment in self._segments.closed():
            if self._rowless_segment is not None and segment >= self._rowless_segment:
                return
            if segment not in keep:
                self._database.forget_segment(segment)
                self._segments.delete(segment)


def open_read_only(directory: Path) -> sqlite3.Connection:
    """The journal of a run directory for reading, also while the run goes on. Close it soon: what a
    reader has open in the middle of a query, SQLite keeps beside the database.

    Raises ValueError where there is none, or none that can be read.
    """
    path = directory / "journal.sqlite"
    if not path.is_file():
        reason = f": {NOTHING_KEPT}" if is_nothing_kept(directory) else ""
        raise ValueError(f"there is no journal at {path}{reason}")
    try:
        return _open(path, "mode=ro")
    except sqlite3.OperationalError as error:  # SQLite may want to write a file beside it
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise ValueError(
                f"{path} cannot be read: {error}. Its newest rows are still in {log.name}, which "
                "SQLite reads only where it may write: copy the run directory to such a place"
            ) from None
    try:
        return _open(path, "mode=ro&immutable=1")
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _open(path: Path, options: str) -> sqlite3.Connection:
    database = sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True)
    try:
        database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.Error:
        database.close()
        raise
    return database


def fates(directory: Path) -> dict[str, int]:
    """Groups of a run directory by state, and `not_issued`: they add up to what the data holds.

    Readable while the run goes on. Raises ValueError where there is no journal.
    """
    with closing(open_read_only(directory)) as database:
        counts = dict(database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
        rest = database.execute("SELECT value FROM meta WHERE key='not_issued'").fetchone()
    not_issued = int(rest[0]) if rest else 0
    return counts | ({"not_issued": not_issued} if not_issued else {})
