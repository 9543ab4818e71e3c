"""Payloads, each with its checksum behind it, one after the other in append-only files,
`segments/000001` and so on.

A segment is closed when it would grow too large, and with its process; it is deleted whole.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import IO

from asyncrl.disk import sync
from asyncrl.journal.tables import PayloadRef
from asyncrl.wire import Frame, view

log = logging.getLogger(__name__)

CHECKSUM_BYTES = 4
"""CRC-32 (zlib.crc32) of a payload, little-endian."""
MAX_AT_ONCE = 1024
"""Buffers that one call of writev takes (IOV_MAX)."""


class DamagedError(ValueError):
    """A payload cannot be read as it was written; the text names segment and offset."""


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
        """Of all payloads that are there or have a place, with their checksums."""
        return self._placed_bytes - self._deleted_bytes

    def place(self, length: int) -> PayloadRef:
        """Where the next payload will lie. Payloads are written in the order of their places."""
        segment, offset, _ = self._next
        num_bytes = length + CHECKSUM_BYTES
        if offset and offset + num_bytes > self._segment_bytes:
            segment, offset = segment + 1, 0
        self._next = PayloadRef(segment, offset + num_bytes, 0)
        self._placed_bytes += num_bytes
        return PayloadRef(segment, offset, length)

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at `ref`, which has been written. Raises DamagedError."""
        data = read_payload(self._directory, ref)
        if data is None:
            raise DamagedError(f"{self._path(ref.segment)} is not there (byte {ref.offset})")
        return data

    def write(self, payloads: Sequence[tuple[PayloadRef, Frame]]) -> None:
        """Appends payloads, each with its place, in the order of their places."""
        for segment, found in groupby(payloads, key=lambda each: each[0].segment):
            if self._file is None or self._writing != segment:
                self.sync()
                self._begin(segment)
            parts = [view(payload) for _, payload in found]
            self._append([part for data in parts for part in (data, memoryview(_checksum(data)))])

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
    """The payload at `ref` in the segments of `directory`; None where that segment is not there,
    as it is deleted. Raises DamagedError when what is there is not what was written."""
    path = _path(directory, ref.segment)
    try:
        with path.open("rb") as file:
            data = os.pread(file.fileno(), ref.length, ref.offset)
            checksum = os.pread(file.fileno(), CHECKSUM_BYTES, ref.offset + ref.length)
            end = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read at byte {ref.offset}: {error}") from None
    if len(data) + len(checksum) < ref.length + CHECKSUM_BYTES:
        raise DamagedError(
            f"{path} is cut: it ends at byte {end}, before the end of the {ref.length} bytes from "
            f"byte {ref.offset} on and their checksum"
        )
    if checksum != _checksum(memoryview(data)):
        raise DamagedError(
            f"{path} is damaged: the {ref.length} bytes from byte {ref.offset} on are not those "
            "that were written (their checksum is another)"
        )
    return data


def _checksum(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")


def _path(directory: Path, segment: int) -> Path:
    return directory / f"{segment:06d}"
