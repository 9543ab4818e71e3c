"""From a YAML file and `key=value` overrides to a checked Config, and back to a file.

Three layers, the later one wins: the preset that `algorithm` names, the file, the overrides. All
that is wrong is told at once, each problem on a line: where it stands, what it is, how to mend it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from asyncrl.config.complaints import Sources, explain, idle_settings
from asyncrl.config.fields import dotted, nearest, required_keys, section_at, type_at
from asyncrl.config.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.config.yaml_text import KeyPath, YamlError, dump, parse
from asyncrl.disk import write_whole


class ConfigError(ValueError):
    """The user's configuration cannot be used; the message says all that is wrong with it."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run, from the user's file and `dotted.key=value` overrides.

    Values of overrides are YAML. Relative paths (data files, reward file, model directory) are
    looked up in the working directory, then beside the file, and made absolute where they exist.
    Raises ConfigError with every problem found.
    """
    file = Path(path)
    sources = Sources(file)
    tree = _read(file, sources)
    problems = _override_all(tree, overrides, sources)
    layered = _merged(_preset(tree), _fill_sections(tree, ()))
    problems += idle_settings(layered, sources)
    return _with_absolute_paths(_validate(layered, sources, problems), file.parent)


def load_recorded(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of an earlier run, from the resolved file in its directory, and overrides.

    Where they name another `algorithm`, its preset is laid over the file. Raises ConfigError with
    every problem found.
    """
    file = Path(path)
    sources, only_overrides = Sources(file), Sources(file)
    recorded = _read(file, sources)
    tree: dict[str, Any] = {}
    problems = _override_all(tree, overrides, only_overrides)
    preset = _preset(tree) if "algorithm" in tree else {}
    layered = _merged(_merged(recorded, preset), _fill_sections(tree, ()))
    problems += idle_settings(layered, only_overrides)
    sources.places |= only_overrides.places
    return _with_absolute_paths(_validate(layered, sources, problems), Path.cwd())


def load_resolved(path: str | Path) -> Config:
    """The configuration that `save_resolved` wrote. Raises ConfigError, also for a missing key:
    nothing may come from a default that has changed since, or from a preset."""
    file = Path(path)
    sources = Sources(file)
    tree = _read(file, sources)
    config = _validate(tree, sources, [])
    missing = sorted(_paths(config.model_dump(mode="json")) - _paths(tree))
    if missing:
        raise ConfigError(
            f"{file}: not a resolved configuration, {dotted(missing[0])} is missing: start runs "
            "with asyncrl-launch, which writes the resolved config.yaml into the run directory"
        )
    return config


def save_resolved(config: Config, path: str | Path) -> None:
    """Writes every value of the configuration as YAML, whole or not at all."""
    write_whole(Path(path), dump(config.model_dump(mode="json")))


def config_digest(config: Config, sections: Iterable[str]) -> str:
    """Hash over the named top-level keys: same digest, same values. Raises KeyError on others."""
    values = config.model_dump(mode="json")
    chosen = {name: values[name] for name in sorted(set(sections))}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def _read(file: Path, sources: Sources) -> dict[str, Any]:
    try:
        parsed = parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = file.parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        raise ConfigError(f"{file}: no such file{nearest(file.name, names)}") from None
    except YamlError as error:
        place = f"{file}:{error.line}" if error.line else f"{file}"
        raise ConfigError(f"{place}: not usable as YAML: {error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text file in UTF-8: {error.reason}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    if not isinstance(parsed.value, dict):
        found = "empty" if parsed.value is None else f"a {type(parsed.value).__name__}"
        raise ConfigError(
            f"{file}: the file is {found}: expected keys with values, at least "
            f"{', '.join(required_keys(Config))} (see configs/demo.yaml)"
        )
    sources.places |= {path: f"{file}:{line}" for path, line in parsed.lines.items()}
    return parsed.value


def _override_all(tree: dict[str, Any], overrides: Sequence[str], sources: Sources) -> list[str]:
    """Sets them in the tree; returns what is wrong with any."""
    problems = []
    for text in overrides:
        try:
            _override(tree, text, sources)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def _preset(tree: dict[str, Any]) -> dict[str, Any]:
    """What `algorithm` names in the tree, or by default."""
    algorithm = tree.get("algorithm", Config.model_fields["algorithm"].default)
    return PRESETS.get(algorithm, {}) if isinstance(algorithm, str) else {}


def _override(tree: dict[str, Any], text: str, sources: Sources) -> None:
    """Sets one `key=value` in the tree; a mapping is merged as that of a file would be."""
    key, equals, value_text = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {text!r}: expected key=value, as in learner.optim.lr=1e-5")
    try:
        value = parse(value_text).value
    except YamlError as error:
        raise ConfigError(f"override {text!r}: the value is not usable as YAML: {error}") from None
    place: Any = tree
    path: KeyPath = ()
    for part in parts[:-1]:
        step = _step(place, part, path, text)
        if isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place, path = place[step], (*path, step)
    last = _step(place, parts[-1], path, text)
    place[last] = _merged(place.get(last), value) if isinstance(place, dict) else value
    path = (*path, last)
    if not isinstance(value, dict):  # what stood below is gone
        sources.places = {p: w for p, w in sources.places.items() if p[: len(path)] != path}
    sources.places |= {path + sub: f"override {text!r}" for sub in [(), *_all_paths(value)]}


def _step(place: Any, part: str, path: KeyPath, text: str) -> str | int:
    """The key or index that `part` means in `place`."""
    if isinstance(place, dict):
        return part
    if not isinstance(place, list):
        raise ConfigError(f"override {text!r}: {dotted(path)} holds a value, it has no keys")
    if part.isdecimal() and int(part) < len(place):
        return int(part)
    raise ConfigError(
        f"override {text!r}: {dotted(path)} is a list of {len(place)}, there is no item {part!r} "
        "(they count from 0)"
    )


def _merged(base: Any, over: Any) -> Any:
    """`over` laid on `base`: mappings key by key, anything else replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: _merged(base.get(key), value) for key, value in over.items()}


def _fill_sections(tree: Any, path: KeyPath) -> Any:
    """A section without content (`learner:`, all below commented out) is an empty section."""
    if tree is None and path and type_at(path) is section_at(path):
        return {}
    if not isinstance(tree, dict) or section_at(path) is None:
        return tree
    return {key: _fill_sections(value, (*path, key)) for key, value in tree.items()}


def _validate(tree: dict[str, Any], sources: Sources, problems: list[str]) -> Config:
    """The checked tree. Raises ConfigError with `problems` and all that is wrong with the tree."""
    try:
        config = Config.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        problems = problems + explain(error, tree, sources)
    if problems:
        raise ConfigError(
            problems[0]
            if len(problems) == 1
            else "\n  ".join([f"{len(problems)} problems in the configuration:", *problems])
        )
    return config


def _all_paths(value: Any) -> list[KeyPath]:
    items = (
        value.items()
        if isinstance(value, dict)
        else (enumerate(value) if isinstance(value, list) else [])
    )
    return [
        path for key, item in items for path in [(key,), *((key, *p) for p in _all_paths(item))]
    ]


def _paths(tree: Any) -> set[KeyPath]:
    """Paths of all keys down to values, not into lists."""
    if not isinstance(tree, dict):
        return set()
    return {p for key, value in tree.items() for p in [(key,), *((key, *s) for s in _paths(value))]}


def _with_absolute_paths(config: Config, beside: Path) -> Config:
    def found(path: str) -> str:
        for folder in (Path.cwd(), beside.resolve()):
            if (folder / path).exists():
                return str((folder / path).resolve())
        return path

    def sources(entries: list[Any]) -> list[Any]:
        return [found(entry) if isinstance(entry, str) else entry for entry in entries]

    reward_file, colon, function = config.reward.path.rpartition(":")
    reward = (
        found(reward_file) + colon + function if reward_file.endswith(".py") else config.reward.path
    )
    data = config.data
    files = {"train_files": sources(data.train_files), "val_files": sources(data.val_files)}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": found(config.model.path)}),
            "data": data.model_copy(update=files),
            "reward": config.reward.model_copy(update={"path": reward}),
        }
    )
