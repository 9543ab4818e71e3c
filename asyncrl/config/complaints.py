"""What is wrong with a configuration, in lines that a person can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from asyncrl.config.fields import (
    describe,
    dotted,
    keys_named,
    nearest,
    required_keys,
    section_at,
    type_at,
)
from asyncrl.config.yaml_text import KeyPath

_OF_VERL = {"actor_rollout_ref", "trainer", "custom_reward_function", "async_training"}
"""Sections that people coming from verl write."""
_ONLY_WITH: dict[KeyPath, str] = {
    ("learner", "loss", "clip_low"): "ppo_clip",
    ("learner", "loss", "clip_high"): "ppo_clip",
    ("learner", "loss", "mask_threshold"): "dppo_tv",
    ("learner", "loss", "ratio_cap"): "dppo_tv",
}
"""Settings that do nothing under another learner.loss.mask."""


class Sources:
    """Remembers where each value was set: `demo.yaml:12`, or which override."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.places: dict[KeyPath, str] = {}

    def complaint(self, path: KeyPath, reason: str) -> str:
        """One line: place, key, reason. A key that is nowhere set is placed at its section."""
        known = (self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places)
        place = next(known, str(self.file))
        return f"{place}: {dotted(path)}: {reason}" if path else f"{place}: {reason}"


def explain(error: ValidationError, tree: dict[str, Any], sources: Sources) -> list[str]:
    """pydantic's errors about `tree` as lines, at most one for each key."""
    reasons: dict[KeyPath, str] = {}
    for one in error.errors(include_url=False):
        path = _tree_path(one["loc"], tree)
        reasons.setdefault(path, _reason(one, path, tree))
    # A value that fits no branch of a union is refused once for each branch. Where a branch
    # complains about something inside the value, that branch was meant.
    outer = {path[:end] for path in reasons for end in range(1, len(path))}
    lines = [sources.complaint(p, reason) for p, reason in reasons.items() if p and p not in outer]
    return lines + [_about_several(line, sources) for line in reasons.get((), "").splitlines()]


def idle_settings(tree: dict[str, Any], sources: Sources) -> list[str]:
    """Settings that a person made and that would do nothing."""
    mask = _value_at(tree, ("learner", "loss", "mask"))
    return [
        sources.complaint(
            key,
            f"does nothing with learner.loss.mask {mask!r}: remove it, or set learner.loss.mask "
            f"to {needed!r}",
        )
        for key, needed in _ONLY_WITH.items()
        if key in sources.places and mask in _ONLY_WITH.values() and mask != needed
    ]


def _value_at(tree: Any, path: KeyPath) -> Any:
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _about_several(line: str, sources: Sources) -> str:
    """A complaint about several keys (checks.py) begins with the first of them."""
    key, _, reason = line.partition(": ")
    return sources.complaint(tuple(key.split(".")), reason)


def _tree_path(loc: tuple[str | int, ...], tree: Any) -> KeyPath:
    """pydantic's location without the names of union branches that it puts in between."""
    path: KeyPath = ()
    for part in loc:
        if _holds(tree, part):
            path, tree = (*path, part), tree[part]
    section = section_at(path)
    if section is None or not isinstance(tree, dict) or loc[-1:] == path[-1:]:
        return path
    return (*path, loc[-1]) if loc[-1] in section.model_fields else path


def _holds(tree: Any, part: str | int) -> bool:
    if isinstance(tree, list):
        return isinstance(part, int) and part < len(tree)
    return isinstance(tree, dict) and part in tree


def _reason(error: ErrorDetails, path: KeyPath, tree: Any) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "extra_forbidden":
        return _unknown_key(path)
    for part in path:
        if not _holds(tree, part):
            section = section_at(path)
            needs = f" with at least {', '.join(required_keys(section))}" if section else ""
            return f"is required and not set: expected {_expected(path)}{needs}"
        tree = tree[part]
    shown = json.dumps(tree, ensure_ascii=False)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"expected {_expected(path)}, got {shown}{_hint(tree, _expected(path))}"


def _expected(path: KeyPath) -> str:
    return "a section" if type_at(path) is section_at(path) else describe(type_at(path))


def _unknown_key(path: KeyPath) -> str:
    section = section_at(path[:-1])
    known = list(section.model_fields) if section else []
    key = str(path[-1])
    if path[0] in _OF_VERL:
        return "is a key of verl: docs/verl.md says what it is called here"
    elsewhere = [f", did you mean {full!r}?" for full in keys_named(key)]
    guess = "".join(elsewhere[:1]) or nearest(key, known)
    return f"unknown key{guess} (known here: {', '.join(known)})"


def _hint(value: Any, expected: str) -> str:
    if isinstance(value, str):
        return nearest(value, [word.strip("'") for word in expected.split(" or ")])
    if isinstance(value, (int, float)) and "text" in expected:
        return f" (put it in quotes: '\"{json.dumps(value)}\"')"
    return ""
