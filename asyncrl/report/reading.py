"""The records of a run directory. Nothing is locked or written, so the run may go on meanwhile.

Directories of runs that failed early lack some of the files, and journals of other versions of
asyncrl some of the columns: what is not there is empty.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from asyncrl.config.fields import nearest
from asyncrl.config.yaml_text import YamlError, parse
from asyncrl.journal import open_read_only
from asyncrl.journal.segments import read_payload
from asyncrl.journal.tables import (
    SCHEMA,
    BeatRow,
    EvalRow,
    GroupRow,
    PayloadRef,
    ServedRow,
    StepRow,
)
from asyncrl.run_dir import RunDir

Record = dict[str, Any]
Row = TypeVar("Row", bound=NamedTuple)

RUNS = Path("runs")
"""Where runs lie unless output_dir says otherwise: a name alone is looked up here."""
_STATES = (
    *("trained", "assigned", "ready", "leased", "waiting"),
    *("filtered", "quarantined", "dropped", "cancelled", "not_issued"),
)


@dataclass(frozen=True, slots=True)
class RunRecords:
    """One look at a run directory."""

    path: Path
    config: Record
    """config.yaml as it stands there; empty when there is none."""
    meta: dict[str, str]
    groups: list[GroupRow]
    """In order of admission."""
    steps: list[StepRow]
    served: list[ServedRow]
    """In order of versions."""
    evals: list[EvalRow]
    beats: list[BeatRow]
    """In order of time, without those of members that had not yet said what they do."""
    metrics: list[Record]
    """Records of metrics.jsonl in the order of the file."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def fates(self) -> dict[str, int]:
        """Prompts by state; after the end they add up to what the data holds."""
        counts = Counter(group.state for group in self.groups)
        counts["not_issued"] = int(self.meta.get("not_issued", 0))
        return in_order({state: count for state, count in counts.items() if count})

    @property
    def committed(self) -> int:
        """Highest version ever committed."""
        return int(self.meta.get("committed", 0))

    def setting(self, key: str) -> Any:
        """A value of the configuration by its dotted key; None where there is none."""
        return setting(self.config, key)

    def payload(self, group: GroupRow) -> bytes | None:
        """As read_group. Raises ValueError for a journal of another schema, too."""
        if (schema := self.meta.get("schema")) != str(SCHEMA):
            raise ValueError(f"its journal has schema {schema}, this program reads {SCHEMA}")
        return read_group(self.path, group)


def find_run(name: str) -> Path:
    """The run directory that `name` is, or the one of that name in runs/. Raises ValueError."""
    for path in (Path(name), RUNS / name):
        try:
            if any((path / file).is_file() for file in ("run_id", "journal.sqlite")):
                return path
        except OSError as error:
            raise ValueError(f"{path} cannot be looked at: {error.strerror}") from None
    here = [path.name for path in RUNS.iterdir()] if RUNS.is_dir() else []
    raise ValueError(
        f"{name}: neither a run directory (it would hold run_id) nor the name of one in "
        f"{RUNS}/{nearest(name, here)}"
    )


def find_rollouts(name: str) -> Path:
    """As find_run; ValueError also for a replay, which has no prompts of its own, naming the run
    that has them."""
    path = find_run(name)
    replay_of = RunDir(path).replay_of
    if replay_of.is_file():
        recorded = json.loads(replay_of.read_text())["path"]
        raise ValueError(f"{path} is a replay: its prompts and responses are those of {recorded}")
    return path


def read_run(path: Path) -> RunRecords:
    """Everything. Raises ValueError, naming the file, for one that cannot be read."""
    run_dir = RunDir(path)
    journal = path / "journal.sqlite"
    tables = _Tables(journal)
    return RunRecords(
        path=path,
        config=read_config(path),
        meta=tables.meta,
        groups=sorted(tables.rows("groups", GroupRow)),
        steps=sorted(tables.rows("steps", StepRow)),
        served=sorted(tables.rows("served", ServedRow), key=lambda row: row[:3]),
        evals=sorted(tables.rows("evals", EvalRow)),
        beats=sorted(beat for beat in tables.rows("beats", BeatRow) if beat.seconds != "{}"),
        metrics=read_metrics(run_dir.metrics),
    )


def read_config(path: Path) -> Record:
    """config.yaml of a run directory; empty when there is none. Raises ValueError, naming it, when
    it cannot be read."""
    file = RunDir(path).config
    try:
        config = parse(file.read_text()).value if file.exists() else {}
    except (YamlError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return config if isinstance(config, dict) else {}


def setting(config: Record, key: str) -> Any:
    """A value of a configuration by its dotted key; None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def read_group(path: Path, row: GroupRow) -> bytes | None:
    """The stored group (wire.encode_group) of a run directory; None when it is deleted, was not
    kept, or never came. Raises segments.DamagedError."""
    if row.segment is None or row.offset is None or row.length is None:
        return None
    return read_payload(path / "segments", PayloadRef(row.segment, row.offset, row.length))


def why_failed(path: Path) -> str:
    """The reason of a run that has failed, as its buffer declared it; empty for any other."""
    try:
        with closing(open_read_only(path)) as database:
            found = database.execute("SELECT value FROM meta WHERE key='end'").fetchone()
    except (ValueError, sqlite3.Error):
        return ""
    end = json.loads(found[0]) if found and found[0] else {}
    return str(end["reason"]) if end.get("failed") else ""


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file. Torn lines, and those that lack a number that every record
    has, are passed over."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        numbers = (
            [record.get(name) for name in ("step", "time")] if isinstance(record, dict) else []
        )
        if numbers and all(isinstance(number, int | float) for number in numbers):
            records.append(record)
    return records


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by state, in the order of a prompt's life, fates without training last."""
    return {state: counts[state] for state in sorted(counts, key=_place)}


def _place(state: str) -> tuple[int, str]:
    return (_STATES.index(state) if state in _STATES else len(_STATES), state)


class _Tables:
    """All tables of a journal at one moment; none where there is no journal."""

    def __init__(self, path: Path) -> None:
        self._rows: dict[str, list[Record]] = {}
        if not path.is_file():
            return
        try:
            database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            database.row_factory = sqlite3.Row
            try:
                self._read(database)
            finally:
                database.close()
        except sqlite3.Error as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    @property
    def meta(self) -> dict[str, str]:
        return {row["key"]: row["value"] for row in self._rows.get("meta", [])}

    def rows(self, table: str, kind: type[Row]) -> list[Row]:
        """Rows as the named tuple `kind`; None for a column that this journal lacks."""
        rows = self._rows.get(table, [])
        return [kind._make(row.get(name) for name in kind._fields) for row in rows]

    def _read(self, database: sqlite3.Connection) -> None:
        database.execute("BEGIN")  # one snapshot for all tables
        there = database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
        for (table,) in there:
            self._rows[table] = [dict(row) for row in database.execute(f"SELECT * FROM {table}")]
