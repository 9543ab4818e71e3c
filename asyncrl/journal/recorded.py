"""A recorded run: the batches and publications in the journal of a run directory, to be trained on
once more. Every question is a short transaction of its own, so the run may go on meanwhile.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.journal.database import refuse_other_schema
from asyncrl.journal.journal import open_read_only
from asyncrl.journal.segments import DamagedError, read_payload
from asyncrl.journal.tables import PayloadRef, StepRow
from asyncrl.types import GroupId

_PREFIX = "version-"


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """One step's batch, as it was assigned."""

    row: StepRow
    frames: tuple[bytes, ...]
    """wire.encode_group, in order of admission."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Methods raise ValueError when the journal is not there, is of another schema or cannot be
    read."""

    path: Path

    def meta(self) -> dict[str, str]:
        """What the journal keeps by name (tables.py)."""
        return dict(self._select("SELECT key, value FROM meta"))

    def committed(self) -> int:
        """Highest version ever committed: as many steps were trained."""
        return int(self.meta().get("committed", 0))

    def missing_steps(self, *, before: int, since: int = 0) -> list[int]:
        """Steps from `since` on whose batch is not stored any more as a whole."""
        steps = self._select(
            "SELECT s.step, s.num_groups, COUNT(g.segment) FROM steps s "
            "LEFT JOIN groups g ON g.step = s.step GROUP BY s.step"
        )
        whole = {step for step, num_groups, num_there in steps if num_groups == num_there}
        segments = self._select(
            "SELECT DISTINCT step, segment FROM groups WHERE step IS NOT NULL AND segment NOT NULL"
        )
        there = {path.name for path in self._segments.glob("*")}
        whole -= {step for step, segment in segments if f"{segment:06d}" not in there}
        return [step for step in range(since, before) if step not in whole]

    def batch(self, step: int) -> RecordedBatch:
        """ValueError when some of it is not stored any more, or is damaged."""
        rows = self._select("SELECT * FROM steps WHERE step=?", step)
        refs = self._select(
            "SELECT epoch, position, segment, offset, length FROM groups "
            "WHERE step=? AND segment NOT NULL ORDER BY number",
            step,
        )
        stored = [self._payload(step, GroupId(*ref[:2]), PayloadRef(*ref[2:])) for ref in refs]
        frames = tuple(frame for frame in stored if frame is not None)
        row = StepRow._make(rows[0]) if rows else None
        if row is None or len(frames) != row.num_groups:
            raise ValueError(
                f"the batch of step {step} is not in {self.path} any more: "
                f"{len(frames)} of {row.num_groups if row else 'its'} groups are there. "
                "Runs with buffer.keep_payloads=always keep every batch"
            )
        return RecordedBatch(row, frames)

    def check_batches(self, *, since: int, before: int) -> None:
        """Reads the batches of these steps. ValueError for the first one that `batch` raises it
        for."""
        for step in range(since, before):
            self.batch(step)

    def digest(self, version: int) -> str | None:
        """Of the newest publication of this version; None when it was never published."""
        found = self._select(
            "SELECT digest FROM weights WHERE version=? ORDER BY inc DESC LIMIT 1", version
        )
        return found[0][0] if found else None

    def checkpoints(self) -> dict[int, Path]:
        """Its checkpoints by version, oldest first."""
        directories = sorted((self.path / "checkpoints").glob(f"{_PREFIX}*"))
        names = {path.name.removeprefix(_PREFIX): path for path in directories}
        return {int(name): path for name, path in names.items() if name.isdecimal()}

    def _payload(self, step: int, group: GroupId, ref: PayloadRef) -> bytes | None:
        try:
            return read_payload(self._segments, ref)
        except DamagedError as error:
            before = f". max_steps={step} replays what was trained before it" if step else ""
            raise ValueError(
                f"group {group} of step {step} cannot be read: {error}{before}"
            ) from None

    @property
    def _segments(self) -> Path:
        return self.path / "segments"

    def _select(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        file = self.path / "journal.sqlite"
        try:
            with closing(open_read_only(self.path)) as database:
                refuse_other_schema(database, file)
                return database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise ValueError(f"{file} cannot be read: {error}") from None
