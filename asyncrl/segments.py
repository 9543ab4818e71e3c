"""Payloads one after the other in append-only files, `segments/000001` and so on.

A segment is closed when it would grow too large, and with its process; it is deleted whole.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO

from asyncrl.journal_tables import PayloadRef

log = logging.getLogger(__name__)


class Segments:
    """The segments of one run. One thread may `place`, one may write (all that follows `read`), and
    any may `read`."""

    def __init__(self, directory: Path, *, segment_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._next = PayloadRef(1 + max(self._there(), default=0), 0, 0)
        self._file: IO[bytes] | None = None
        self._writing = 0
        """The segment that is being written; 0: none yet."""

    def place(self, length: int) -> PayloadRef:
        """Where the next payload will lie. Payloads are written in the order of their places."""
        segment, offset, _ = self._next
        if offset and offset + length > self._segment_bytes:
            segment, offset = segment + 1, 0
        self._next = PayloadRef(segment, offset + length, 0)
        return PayloadRef(segment, offset, length)

    def read(self, ref: PayloadRef) -> bytes:
        """The payload at `ref`, which has been written."""
        with self._path(ref.segment).open("rb") as file:
            data = os.pread(file.fileno(), ref.length, ref.offset)
        if len(data) != ref.length:
            raise RuntimeError(f"payload {ref} has {len(data)} bytes: the journal is damaged")
        return data

    def write(self, ref: PayloadRef, payload: bytes) -> None:
        """Appends the payload for which `ref` is the place."""
        if self._file is None or self._writing != ref.segment:
            self.close()
            self._file = self._path(ref.segment).open("ab", buffering=0)
            self._writing = ref.segment
        rest = memoryview(payload)
        while rest:
            rest = rest[self._file.write(rest) :]

    def closed(self) -> list[int]:
        """Segments before the one that is being written."""
        return [segment for segment in self._there() if segment < self._writing]

    def delete(self, segment: int) -> None:
        """Deletes a closed segment. One that cannot be deleted is a warning."""
        try:
            self._path(segment).unlink()
        except OSError as error:
            log.warning("a segment stays until the next checkpoint: %s", error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _there(self) -> list[int]:
        names = [path.name for path in self._directory.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:06d}"
