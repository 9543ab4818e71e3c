"""`asyncrl-launch export`: the rollouts of a run as one Parquet file, a row for each response.

The journal is read in short looks and the file written group by group of rows, so memory is bounded
and the run may go on meanwhile. The file is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet

from asyncrl.disk import replaceable, sync
from asyncrl.journal import fates, open_read_only
from asyncrl.journal.database import refuse_other_schema
from asyncrl.journal.segments import DamagedError
from asyncrl.journal.tables import GroupRow
from asyncrl.report.reading import find_rollouts, read_config, read_group, setting
from asyncrl.report.rollouts import Decode, find_decoder, why_not_stored
from asyncrl.report.summary import fates_text
from asyncrl.types import Rollout, RolloutGroup
from asyncrl.versions import staleness
from asyncrl.wire import WireError, decode_group

ROW_GROUP_BYTES = 16 << 20
"""Stored bytes after which the rows so far are written."""
_LOOK_ROWS = 256
"""Prompts that one look at the journal reads."""
COLUMNS = pa.schema(
    [
        ("epoch", pa.int64()),
        ("position", pa.int64()),
        ("sample", pa.int32()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("step", pa.int64()),
        ("attempt", pa.int64()),
        ("source", pa.string()),
        ("generator", pa.string()),
        ("inc", pa.int64()),
        ("temperature", pa.float64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("reward", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        ("finish_reason", pa.string()),
        ("staleness", pa.int64()),
        ("group_staleness", pa.int64()),
        ("prompt", pa.string()),
        ("response", pa.string()),
    ]
)
"""docs/journal.md says what they mean."""


def export_run(name: str, *, out: Path | None, step: int | None, fate: str | None) -> int:
    """Writes the stored rollouts of run `name`, of one step or fate if they are given, to `out` or
    to RUN/rollouts.parquet. Returns the exit code.

    Raises ValueError when there is no such run, nothing to write, or no place to write it: only a
    regular file whose name ends in .parquet is replaced.
    """
    path = find_rollouts(name)
    out = out or path / "rollouts.parquet"
    target = replaceable(out)
    if target.suffix != ".parquet":
        raise ValueError(f"{out}: what is written is Parquet, name a file that ends in .parquet")
    export = _Export(path, find_decoder(setting(read_config(path), "model.path")))
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        export.write(partial, _groups(path, step=step, fate=fate))
        if not export.num_rollouts:
            why = export.left_out() if export.missing else _what_there_is(path)
            raise ValueError(f"{path}: nothing to export. {why}")
        sync(partial)
        partial.replace(target)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{out} cannot be written: {error}") from None
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written there is nothing
            partial.unlink(missing_ok=True)
    print(
        f"{export.num_rollouts} rollouts of {export.num_groups} prompts in {out} "
        f"({out.stat().st_size / 1e6:.3g} MB). {export.left_out()}"
    )
    return 0


def _what_there_is(path: Path) -> str:
    with closing(open_read_only(path)) as database:
        (newest,) = database.execute("SELECT MAX(step) FROM groups").fetchone()
    steps = "no step" if newest is None else f"steps 0 to {newest}"
    return f"There are {steps}, and prompts: {fates_text(fates(path))}"


@dataclass(slots=True)
class _Export:
    """One export, and what it has counted."""

    path: Path
    decode: Decode | None
    num_groups: int = 0
    num_rollouts: int = 0
    missing: Counter[str] = field(default_factory=Counter)
    """Prompts without stored rollouts, by reason."""
    damage: dict[int, str] = field(default_factory=dict)
    """By damaged segment: what is said of it, with the first group that was met."""

    def write(self, file: Path, rows: Iterator[GroupRow]) -> None:
        with parquet.ParquetWriter(file, COLUMNS, compression="zstd") as writer:
            for groups in self._row_groups(rows):
                writer.write_table(_table(groups, self.decode))

    def left_out(self) -> str:
        """The closing line's end."""
        if not self.missing:
            return "No prompt is left out."
        parts = (f"{count} ({why})" for why, count in self.missing.most_common())
        return f"Left out, prompts: {', '.join(parts)}."

    def _row_groups(self, rows: Iterator[GroupRow]) -> Iterator[list[_Stored]]:
        """Groups that are stored, about ROW_GROUP_BYTES at a time."""
        groups: list[_Stored] = []
        num_bytes = 0
        for row in rows:
            group = self._stored(row)
            if group is None:
                continue
            groups.append(_Stored(row, group))
            num_bytes += row.length or 0
            self.num_groups += 1
            self.num_rollouts += len(group.rollouts)
            if num_bytes >= ROW_GROUP_BYTES:
                yield groups
                groups, num_bytes = [], 0
        if groups:
            yield groups

    def _stored(self, row: GroupRow) -> RolloutGroup | None:
        """None for a group that is left out, and counted as that."""
        try:
            data = read_group(self.path, row)
            if data is not None:
                return decode_group(data)
            why = why_not_stored(row)
        except DamagedError as error:
            first = f"group {row.epoch}/{row.position}"
            why = self.damage.setdefault(row.segment or 0, f"{error}; {first} is the first")
        except WireError:
            why = "what is stored cannot be read"
        self.missing[why] += 1
        return None


@dataclass(frozen=True, slots=True)
class _Stored:
    row: GroupRow
    group: RolloutGroup


def _groups(path: Path, *, step: int | None, fate: str | None) -> Iterator[GroupRow]:
    """In order of admission. Each look at the journal is a transaction of its own."""
    wanted = {"step": step, "state": fate}
    given = {column: value for column, value in wanted.items() if value is not None}
    where = "".join(f" AND {column} = ?" for column in given)
    query = f"SELECT * FROM groups WHERE number > ?{where} ORDER BY number LIMIT {_LOOK_ROWS}"
    number = -1
    while True:
        try:
            with closing(open_read_only(path)) as database:
                refuse_other_schema(database, path / "journal.sqlite")
                found = database.execute(query, (number, *given.values())).fetchall()
            rows = [GroupRow._make(row) for row in found]
        except (sqlite3.Error, TypeError) as error:
            raise ValueError(f"{path / 'journal.sqlite'} cannot be read: {error}") from None
        if not rows:
            return
        yield from rows
        number = rows[-1].number


def _table(groups: Sequence[_Stored], decode: Decode | None) -> pa.Table:
    rollouts = [
        (stored, sample, rollout)
        for stored in groups
        for sample, rollout in enumerate(stored.group.rollouts)
    ]
    rows = [_scalars(stored, sample, rollout, decode) for stored, sample, rollout in rollouts]
    arrays: dict[str, list[Any]] = {
        "prompt_ids": [stored.group.prompt_ids for stored, _, _ in rollouts],
        "token_ids": [rollout.token_ids for _, _, rollout in rollouts],
        "logprobs": [rollout.logprobs for _, _, rollout in rollouts],
        "versions": [rollout.versions for _, _, rollout in rollouts],
        "loss_mask": [rollout.loss_mask for _, _, rollout in rollouts],
    }
    columns = [
        _lists(arrays[column.name], column.type)
        if column.name in arrays
        else pa.array([row[column.name] for row in rows], column.type)
        for column in COLUMNS
    ]
    return pa.Table.from_arrays(columns, schema=COLUMNS)


def _lists(arrays: Sequence[Any], kind: Any) -> pa.Array:
    """A list column from one numpy array for each row."""
    ends = np.cumsum([0, *(len(array) for array in arrays)]).astype(np.int32)
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate(arrays), kind.value_type))


def _scalars(
    stored: _Stored, sample: int, rollout: Rollout, decode: Decode | None
) -> dict[str, Any]:
    row, group = stored.row, stored.group
    written = rollout.versions[rollout.loss_mask]
    oldest = int(written.min()) if len(written) else None
    return {
        "epoch": row.epoch,
        "position": row.position,
        "sample": sample,
        "state": row.state,
        "reason": row.reason,
        "step": row.step,
        "attempt": group.attempt,
        "source": group.source,
        "generator": row.member,
        "inc": group.inc,
        "temperature": group.temperature,
        "reward": rollout.reward,
        "reward_parts": list(rollout.reward_parts.items()),
        "finish_reason": rollout.finish_reason,
        "staleness": _age(row.step, oldest),
        "group_staleness": _age(row.step, row.version),
        "prompt": decode(group.prompt_ids.tolist()) if decode else None,
        "response": decode(rollout.token_ids.tolist()) if decode else None,
    }


def _age(step: int | None, version: int | None) -> int | None:
    return None if step is None or version is None else staleness(step, version)
