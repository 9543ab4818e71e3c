"""The configuration tree seen from outside: what stands at a path, in words."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from asyncrl.config.schema import Config, Section
from asyncrl.config.yaml_text import KeyPath

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Any: "anything",
    type(None): "null",
}
_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


def dotted(path: KeyPath) -> str:
    """The path as it is written on the command line: `data.train_files.0.size`."""
    return ".".join(str(part) for part in path)


def describe(annotation: Any) -> str:
    """A type in plain words, as `a whole number >= 1 or 'auto'`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(arguments[0]) + _bounds(arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in arguments)
    if origin is Literal:
        return " or ".join(repr(value) for value in arguments)
    if origin is list:
        return f"a list ({describe(arguments[0])})"
    if origin is tuple:
        return f"a list of {len(arguments)} ({describe(arguments[0])})"
    if origin is dict or annotation is dict:
        return "keys with values"
    if is_section(annotation):
        return "a section with " + ", ".join(annotation.model_fields)
    return _WORDS[annotation]


def field_type(info: FieldInfo) -> Any:
    """The field's type with its bounds put back."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def type_at(path: KeyPath) -> Any:
    """The type that belongs at `path`; Any where the tree does not say, or says no such key."""
    found: Any = Config
    for part in path:
        found = _step(found, part)
    return found


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def section_at(path: KeyPath) -> type[Section] | None:
    """The section that belongs at `path`, None where no section can stand."""
    return next((member for member in _members(type_at(path)) if is_section(member)), None)


def required_keys(section: type[Section]) -> list[str]:
    return [name for name, info in section.model_fields.items() if info.is_required()]


def keys_named(name: str, section: type[Section] = Config) -> list[str]:
    """Full keys in the whole tree whose last part is `name`."""
    found = []
    for key, info in section.model_fields.items():
        if key == name:
            found.append(key)
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found += [f"{key}.{sub}" for sub in keys_named(name, inner)]
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` when a known name is near, else an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.55)
    return f", did you mean {close[0]!r}?" if close else ""


def _step(annotation: Any, part: str | int) -> Any:
    for member in _members(annotation):
        if is_section(member) and part in member.model_fields:
            return field_type(member.model_fields[part])
        arguments = get_args(member)
        if get_origin(member) is list and isinstance(part, int):
            return arguments[0]
        if get_origin(member) is tuple and isinstance(part, int) and part < len(arguments):
            return arguments[part]
    return Any


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _bounds(metadata: tuple[Any, ...]) -> str:
    words = []
    for item in metadata:
        for one in item.metadata if isinstance(item, FieldInfo) else [item]:
            bounds = [(kind, getattr(one, name, None), sign) for kind, name, sign in _BOUNDS]
            words += [f"{sign} {_number(v)}" for kind, v, sign in bounds if isinstance(one, kind)]
            if isinstance(one, MinLen):
                words.append(f"with at least {one.min_length}")
    return " " + ", ".join(words) if words else ""


def _number(value: Any) -> str:
    """`2^63` for what nobody recognises by its digits."""
    big_power = isinstance(value, int) and value >= 1 << 32 and value.bit_count() == 1
    return f"2^{value.bit_length() - 1}" if big_power else str(value)
