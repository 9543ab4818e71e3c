"""Rows from Parquet and JSONL files, with the columns that verl uses or others by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.config.fields import nearest
from asyncrl.config.schema import DataKeys
from asyncrl.types import Row

Raw = tuple[int, dict[str, Any]]
"""Row number in its file (from 1; in JSONL the line) and the columns."""

_MISSING = object()


def read_rows(path: str, keys: DataKeys) -> tuple[list[Row], list[str]]:
    """The good rows of a file and a line for each bad one: file, row, field, what is wrong.

    Raises ValueError when the file as a whole cannot be used.
    """
    file = Path(path)
    raw = list(_read_raw(file))
    if not raw:
        raise ValueError(f"{file}: there is no row in it")
    _check_columns(file, raw, keys)
    rows, problems = [], []
    for number, columns in raw:
        try:
            rows.append(_row(columns, keys))
        except ValueError as error:
            problems.append(f"{file}: row {number}: {error}")
    return rows, problems


def _read_raw(file: Path) -> Iterator[Raw]:
    if not file.is_file():
        names = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        what = "is a directory, name the files in it" if file.is_dir() else "no such file"
        raise ValueError(
            f"{file}: {what}{nearest(file.name, names)} (relative paths are looked up in the "
            "working directory, then beside the configuration file)"
        )
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix in (".jsonl", ".ndjson"):
        return _read_jsonl(file)
    raise ValueError(f"{file}: a data file ends in .parquet or .jsonl")


def _read_parquet(file: Path) -> Iterator[Raw]:
    try:
        table = pq.ParquetFile(file, memory_map=False).read()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not readable as Parquet: {error}") from None
    return iter(list(enumerate(table.to_pylist(), start=1)))


def _read_jsonl(file: Path) -> Iterator[Raw]:
    with file.open(encoding="utf-8") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _json_object(line)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: after line {number}: not UTF-8: {error.reason}") from None
        except ValueError as error:
            raise ValueError(f"{file}: row {number}: {error}") from None


def _json_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object with columns, got {type(value).__name__}")
    return value


def _check_columns(file: Path, raw: list[Raw], keys: DataKeys) -> None:
    """A column that no row has is one mistake, not one for each row."""
    for name in ("prompt", "source", "answer"):
        key = getattr(keys, name)
        if all(_at(columns, key) is _MISSING for _, columns in raw):
            known = sorted({path for _, columns in raw[:100] for path in _paths(columns)})
            raise ValueError(
                f"{file}: there is no column {key!r} for the {name}{nearest(key, known)} (columns: "
                f"{', '.join(known)}); name it in data.keys.{name}"
            )


def _row(columns: dict[str, Any], keys: DataKeys) -> Row:
    prompt = _required(columns, keys.prompt)
    source = _required(columns, keys.source)
    answer = _required(columns, keys.answer)
    extra = _at(columns, keys.extra)
    extra = {} if extra is _MISSING or extra is None else extra
    if not isinstance(source, str):
        raise ValueError(f"{keys.source}: expected text, got {_show(source)}")
    if not isinstance(extra, dict):
        raise ValueError(f"{keys.extra}: expected an object, got {_show(extra)}")
    return {
        "prompt": _prompt(prompt, keys.prompt),
        "source": source,
        "answer": _plain(answer, keys.answer),
        "extra": _plain(extra, keys.extra),
    }


def _required(columns: dict[str, Any], key: str) -> Any:
    value = _at(columns, key)
    if value is _MISSING:
        raise ValueError(f"{key}: is missing")
    if value is None:
        raise ValueError(f"{key}: is null")
    return value


def _prompt(value: Any, key: str) -> str | list[dict[str, str]]:
    """Text, or chat messages with a role and a content each; never empty."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key}: is empty")
        return value
    if not isinstance(value, list):
        raise ValueError(f"{key}: expected text or a list of messages, got {_show(value)}")
    if not value:
        raise ValueError(f"{key}: is an empty list of messages")
    messages = []
    for index, message in enumerate(value):
        parts = message if isinstance(message, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if not (isinstance(role, str) and role and isinstance(content, str)):
            raise ValueError(
                f"{key}.{index}: expected a message {{role: text, content: text}}, "
                f"got {_show(message)}"
            )
        messages.append({"role": role, "content": content})
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{key}: all messages are empty")
    return messages


def _plain(value: Any, key: str) -> Any:
    """Checks that a value can travel: null, booleans, numbers, text, lists, objects."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"{key}: {_show(value)} does not fit into 64 bits: store it as text")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{key}: {value} is not a number")
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{key}.{index}") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {str(name): _plain(item, f"{key}.{name}") for name, item in value.items()}
    raise ValueError(f"{key}: a {type(value).__name__} cannot be sent along: store it as text")


def _at(columns: Any, key: str) -> Any:
    """The value under a key whose dots reach into nested columns; a whole name wins."""
    if isinstance(columns, dict):
        if key in columns:
            return columns[key]
        head, dot, rest = key.partition(".")
        if dot and head in columns:
            return _at(columns[head], rest)
    return _MISSING


def _paths(columns: dict[str, Any]) -> list[str]:
    """Names of the columns and of what is nested in them, as they are written in data.keys."""
    names = []
    for name, value in columns.items():
        inner = _paths(value) if isinstance(value, dict) else []
        names += [f"{name}.{path}" for path in inner] if inner else [str(name)]
    return names


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
