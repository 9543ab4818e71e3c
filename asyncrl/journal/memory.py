"""The journal of a run that keeps nothing (durability `none`): payloads in memory, until no
checkpoint can ask for them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from asyncrl.journal.claim import note_nothing_kept, refuse_lost_books, take_lock
from asyncrl.journal.tables import Change, GroupRow, PayloadRef, Stored
from asyncrl.wire import Frame


class MemoryJournal:
    """As journal.Journal, for one thread (`read`: any), and gone with its process."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError when another process has it open, and in the directory of a run that
        has begun."""
        refuse_lost_books(directory)
        if (directory / "journal.sqlite").exists():
            raise ValueError(
                f"the run in {directory} has a journal, which buffer.durability=none would not go "
                "on with: set buffer.durability back, or take another run_name"
            )
        self._directory = directory
        self._lock = take_lock(directory)
        self.stored = Stored((), (), (), (), {})
        self._payloads: dict[PayloadRef, Frame] = {}
        self._rows: dict[int, GroupRow] = {}
        """By number, of the groups that have a payload."""
        self._num_placed = 0
        self._is_noted = False
        self.num_bytes = 0
        """Of all payloads that are held."""

    def append(self, payload: Frame, *, is_read_soon: bool = True) -> PayloadRef:
        """Keeps a payload, until `retain` lets go of its group or a change takes it off it."""
        ref = PayloadRef(0, self._num_placed, len(payload))
        self._num_placed += 1
        self._payloads[ref] = payload
        self.num_bytes += len(payload)
        return ref

    def write(self, change: Change) -> Future[None]:
        """Takes over a change; the future is complete."""
        if change.groups and not self._is_noted:
            note_nothing_kept(self._directory)
            self._is_noted = True
        for row in change.groups:
            before = self._rows.pop(row.number, None)
            if before is not None and _ref(before) != _ref(row):
                self._free(before)
            if _ref(row) is not None:
                self._rows[row.number] = row
        return _done()

    def retain(self, *, from_step: int, settled: Iterable[str]) -> Future[None]:
        """Lets go of the payloads of groups that were trained before `from_step`, or are in a state
        of `settled` without a step."""
        fates = frozenset(settled)
        for row in list(self._rows.values()):
            is_over = row.state in fates if row.step is None else row.step < from_step
            if is_over:
                self._free(self._rows.pop(row.number))
        return _done()

    def read(self, ref: PayloadRef) -> Frame:
        """The payload at `ref`."""
        return self._payloads[ref]

    def close(self) -> None:
        """Lets go of the directory."""
        self._lock.close()

    def _free(self, row: GroupRow) -> None:
        ref = _ref(row)
        if ref is not None:
            self.num_bytes -= len(self._payloads.pop(ref))


def _ref(row: GroupRow) -> PayloadRef | None:
    if row.segment is None or row.offset is None or row.length is None:
        return None
    return PayloadRef(row.segment, row.offset, row.length)


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
