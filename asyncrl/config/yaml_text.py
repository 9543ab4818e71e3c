"""YAML with the traps taken out: text to plain Python and back.

Numbers and words mean what they look like: `1e-6` is a number, `on`, `off`, `yes` and `no` are
text, nothing is a date or an octal number. Duplicate keys and keys that are not text are refused.
Every key's line is kept, so that a later complaint can name it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of mappings and indices of lists, from the top."""

_TEXT, _LIST, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
_SCALARS = {  # tag: (pattern, characters it can start with); all else is text
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", "~nN\0"),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class YamlError(ValueError):
    """Text that is not such YAML. `line` counts from 1, None where there is none to name."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012


class _Writer(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _SCALARS.items():
    for _kind in (_Reader, _Writer):
        _resolvers = [c if c != "\0" else "" for c in _first]
        _kind.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _resolvers)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed text and the line of every key and list item in it."""

    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def parse(text: str) -> Parsed:
    """Text to plain Python. Raises YamlError."""
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Reader(text)
        node = loader.get_single_node()
        return Parsed(None if node is None else _construct(loader, node, (), lines), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(reason, mark.line + 1 if mark else None) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except RecursionError:
        raise YamlError("it is nested too deeply") from None


def dump(value: Any) -> str:
    """The inverse of `parse` for plain Python: `parse(dump(value)).value == value`."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=100)


def _construct(loader: _Reader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if node.tag not in (_TEXT, _LIST, _MAPPING, *_SCALARS):
        raise YamlError(f"the tag {node.tag} is not allowed here", node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            items.append(_construct(loader, item, (*path, index), lines))
        return items
    if isinstance(node, yaml.MappingNode):
        return _construct_mapping(loader, node, path, lines)
    try:
        return loader.construct_object(node)
    except ValueError as error:  # a number that Python refuses, say of 10,000 digits
        raise YamlError(str(error), node.start_mark.line + 1) from None


def _construct_mapping(
    loader: _Reader, node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int]
) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str) or key_node.tag != _TEXT:
            raise YamlError(f"the key {key!r} is not text: put it in quotes", line)
        if key in mapping:
            first = lines[(*path, key)]
            raise YamlError(
                f"the key {key!r} stands here a second time (first: line {first})", line
            )
        lines[(*path, key)] = line
        mapping[key] = _construct(loader, value_node, (*path, key), lines)
    return mapping
