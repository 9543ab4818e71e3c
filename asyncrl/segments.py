"""Payloads one after the other in append-only files, `segments/000001` and so on.

A segment is closed when it would grow too large, and with its process; it is deleted whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import IO

from asyncrl.disk import sync
from asyncrl.journal_tables import PayloadRef
from asyncrl.wire import Frame, view

log = logging.getLogger(__name__)

MAX_AT_ONCE = 1024
"""Buffers that one call of writev takes (IOV_MAX)."""


class Segments:
    """The segments of one run. One thread may `place`, one may write (all that follows `read`), and
    any may `read`."""

    def __init__(self, directory: Path, *, segment_bytes: int, is_synced: bool = False) -> None:
        """`is_synced`: `sync` waits for the disk, and segments and their names are on it by
        then."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._is_synced = is_synced
        self._writing = 1 + max(self._there(), default=0)
        """The segment that is being written, or will be first."""
        self._next = PayloadRef(self._writing, 0, 0)
        self._file: IO[bytes] | None = None
        self._placed_bytes = sum(self._path(segment).stat().st_size for segment in self._there())
        self._deleted_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all payloads that are there or have a place."""
        return self._placed_bytes - self._deleted_bytes

    def place(self, length: int) -> PayloadRef:
        """Where the next payload will lie. Payloads are written in the order of their places."""
        segment, offset, _ = self._next
        if offset and offset + length > self._segment_bytes:
            segment, offset = segment + 1, 0
        self._next = PayloadRef(segment, offset + length, 0)
        self._placed_bytes += length
        return PayloadRef(segment, offset, length)

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at `ref`, which has been written."""
        data = read_payload(self._directory, ref)
        if data is None:
            raise RuntimeError(f"payload {ref} is not whole: the journal is damaged")
        return data

    def write(self, payloads: Sequence[tuple[PayloadRef, Frame]]) -> None:
        """Appends payloads, each with its place, in the order of their places."""
        for segment, found in groupby(payloads, key=lambda each: each[0].segment):
            if self._file is None or self._writing != segment:
                self.sync()
                self._begin(segment)
            self._append([view(payload) for _, payload in found])

    def _append(self, rest: list[memoryview]) -> None:
        """In as few calls as can be: each gives the interpreter away, and waits to have it back."""
        assert self._file is not None
        rest = [data for data in rest if data.nbytes]
        while rest:
            written = os.writev(self._file.fileno(), rest[:MAX_AT_ONCE])
            while rest and written >= rest[0].nbytes:
                written -= rest.pop(0).nbytes
            if written:
                rest[0] = rest[0][written:]

    def sync(self) -> None:
        """What has been written survives loss of power, if `is_synced`."""
        if self._is_synced and self._file is not None:
            os.fsync(self._file.fileno())

    def closed(self) -> list[int]:
        """Segments before the one that is being written."""
        return [segment for segment in self._there() if segment < self._writing]

    def delete(self, segment: int) -> None:
        """Deletes a closed segment. One that cannot be deleted is a warning."""
        path = self._path(segment)
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except OSError as error:
            log.warning("a segment stays until the next checkpoint: %s", error)
        else:
            self._deleted_bytes += num_bytes

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self, segment: int) -> None:
        self.close()
        self._file = self._path(segment).open("ab", buffering=0)
        self._writing = segment
        if self._is_synced:
            sync(self._directory)

    def _there(self) -> list[int]:
        names = [path.name for path in self._directory.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, segment: int) -> Path:
        return _path(self._directory, segment)


def read_payload(directory: Path, ref: PayloadRef) -> bytes | None:
    """The payload at `ref` in the segments of `directory`; None where it is not, or not whole."""
    try:
        with _path(directory, ref.segment).open("rb") as file:
            data = os.pread(file.fileno(), ref.length, ref.offset)
    except FileNotFoundError:
        return None
    return data if len(data) == ref.length else None


def _path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:06d}"
