"""Version 0 of a run that begins from a checkpoint of another one, as a model directory.

RUN/start/
    config.json, tokenizer...  those of model.path
    model.safetensors          the checkpoint's float32 weights
    origin.txt                 the checkpoint, which has the optimizer's state as well
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

_COMPLETE = "complete.json"
_WEIGHTS = "model.safetensors"
_ORIGIN = "origin.txt"
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")
_MAY_BE_TIED = "lm_head.weight"


def check_checkpoint(directory: Path) -> None:
    """Raises ValueError unless every file of the checkpoint is there and of its size."""
    marker = directory / _COMPLETE
    try:
        files = json.loads(marker.read_text())
        wrong = [name for name, was in files.items() if _size(directory / name) != was["bytes"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"checkpoint.resume: {directory} is not a whole checkpoint: {_COMPLETE} cannot be read "
            f"({error}). Checkpoints are the directories RUN/checkpoints/version-*"
        ) from None
    if wrong or _WEIGHTS not in files:
        raise ValueError(
            f"checkpoint.resume: {directory} is damaged: "
            f"{', '.join(wrong) or _WEIGHTS} is missing or of another size"
        )


def make_start_model(target: Path, checkpoint: Path, *, model: Path) -> None:
    """Makes `target` from the checkpoint's weights and the other files of `model`, whole or not at
    all. Raises ValueError for a checkpoint of another model, and for one that is damaged."""
    _check_fit(checkpoint / _WEIGHTS, model)
    _check_bytes(checkpoint)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for pattern in _COMPANIONS:
        for file in model.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, temporary / file.name)
    link_or_copy(checkpoint / _WEIGHTS, temporary / _WEIGHTS)
    (temporary / _ORIGIN).write_text(str(checkpoint))
    temporary.rename(target)


def read_origin(target: Path) -> str:
    """The checkpoint that `target` was made from."""
    return (target / _ORIGIN).read_text().strip()


def link_or_copy(source: Path, target: Path) -> None:
    """A checkpoint's file under another name. Nobody changes such a file in place."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _check_fit(weights: Path, model: Path) -> None:
    there = _shapes(weights)
    here = {name: shape for file in model.glob("*.safetensors") for name, shape in _shapes(file)}
    found = dict(there)
    missing = sorted(here.keys() - found.keys() - {_MAY_BE_TIED})
    unknown = sorted(found.keys() - here.keys())
    if missing or unknown:
        raise ValueError(
            f"checkpoint.resume: {weights.parent} is of another model than {model}: only one of "
            f"them has {', '.join((missing + unknown)[:3])}. Set model.path to the model that the "
            "checkpoint's run began with"
        )
    for name, shape in there:
        if here[name] != shape:
            raise ValueError(
                f"checkpoint.resume: {weights.parent} is of another model than {model}: {name} is "
                f"{shape} there, {here[name]} here"
            )


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    try:
        with safe_open(file, framework="np") as tensors:
            return [(name, tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"checkpoint.resume: {file} is damaged: {error}") from None


def _check_bytes(checkpoint: Path) -> None:
    """The one file that is taken over is looked at as a whole; the learner checks the others."""
    written = json.loads((checkpoint / _COMPLETE).read_text())[_WEIGHTS]["sha256"]
    with (checkpoint / _WEIGHTS).open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != written:
            raise ValueError(f"checkpoint.resume: {checkpoint / _WEIGHTS} is damaged")


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None
