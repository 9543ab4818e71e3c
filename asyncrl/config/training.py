"""Which settings decide what is trained, and how; what two configurations differ in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncrl.config.load import config_digest
from asyncrl.config.schema import Config

ON_BATCHES = ("model", "learner")
"""Top-level keys that decide what a learner makes of the batches that it gets."""
OF_BATCHES = (
    *("seed", "max_staleness", "prompts_per_step", "group_size"),
    *("data", "reward", "sampling"),
)
"""Top-level keys that decide what the batches are."""


def training_digest(config: Config) -> str:
    """Hash of all that decides what is trained and how; the same digest means the same run."""
    return config_digest(config, (*ON_BATCHES, *OF_BATCHES))


def differences(before: Config, now: Config, keys: Iterable[str]) -> list[str]:
    """One line for each setting below these top-level keys that differs, with both values."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    return [line for key in keys for line in _differences(key, old[key], new[key])]


def _differences(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = {**old, **new}
        return [
            line
            for part in names
            for line in _differences(f"{name}.{part}", old.get(part), new.get(part))
        ]
    return [] if old == new else [f"{name} is {new}, it was {old}"]
