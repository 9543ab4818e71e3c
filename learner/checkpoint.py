"""Checkpoints: everything a learner needs to go on bit for bit, whole or not there at all.

    checkpoints/version-00000012/
        model.safetensors         float32 master weights, Hugging Face names
        exp_avg.safetensors       AdamW's two moments, same names
        exp_avg_sq.safetensors
        state.json                version, counts, seed, digest of the configuration
        complete.json             written last: size and hash of every other file

Tensors are whole, so a learner with another number of ranks can load them. A directory is written
under a temporary name, synced and renamed; its name alone says that the writing ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.disk import gone_on_failure, sync
from learner.optimizer import MOMENTS, Optimizer
from learner.policy import Policy, check_finite, check_tied, fill, gather_tensor

log = logging.getLogger(__name__)

_COMPLETE = "complete.json"
_STATE = "state.json"
_PREFIX = "version-"


@dataclass(frozen=True, slots=True)
class State:
    """The part of a checkpoint that is not tensors."""

    version: int
    num_steps: int
    num_updates: int
    seed: int
    config_digest: str


def save_checkpoint(
    root: Path, policy: Policy, optimizer: Optimizer, state: State, *, is_lead: bool
) -> None:
    """Writes one checkpoint under `root`. A collective: every rank gathers, the lead writes, and
    raises OSError when the disk does not take it.

    Memory: one float32 copy of the model on the lead's host at a time.
    """
    final = root / f"{_PREFIX}{state.version:08d}"
    temporary = root / f".{final.name}.tmp"
    if is_lead:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    with gone_on_failure(temporary):
        _save_tensors(temporary / "model.safetensors", policy.masters(), is_lead=is_lead)
        for kind in MOMENTS:
            moments = optimizer.moments(kind).items()
            _save_tensors(temporary / f"{kind}.safetensors", moments, is_lead=is_lead)
        if is_lead:
            (temporary / _STATE).write_text(json.dumps(asdict(state), indent=1))
            _seal(temporary, final)


def load_checkpoint(directory: Path, policy: Policy, optimizer: Optimizer) -> State:
    """Fills policy and optimizer from a directory that `newest_checkpoint` found.

    Every rank reads it. ValueError when it is of another model.
    """
    _load_tensors(directory / "model.safetensors", dict(policy.masters()))
    check_tied(policy)
    return load_optimizer(directory, optimizer)


def load_optimizer(directory: Path, optimizer: Optimizer) -> State:
    """Fills the optimizer alone: its moments, and the counts that belong to them."""
    state = State(**json.loads((directory / _STATE).read_text()))
    for kind in MOMENTS:
        _load_tensors(directory / f"{kind}.safetensors", optimizer.moments(kind))
    optimizer.restore(num_steps=state.num_steps, num_updates=state.num_updates)
    return state


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written.

    Damaged ones are warnings; they are renamed to damaged-*, so that they count as checkpoints no
    more.
    """
    for directory in reversed(_directories(root)):
        damage = find_damage(directory)
        if damage is None:
            return directory
        log.warning("checkpoint %s is passed over: %s", directory, damage)
        aside = root / f"damaged-{directory.name}"
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
    return None


def find_damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None when nothing is."""
    try:
        files = json.loads((directory / _COMPLETE).read_text())
        for name, written in files.items():
            found = _fingerprint(directory / name)
            if found != written:
                return f"{name} is not as it was written: {found}, expected {written}"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def list_versions(root: Path) -> list[int]:
    """Versions of the checkpoints under `root`, oldest first."""
    return [int(directory.name.removeprefix(_PREFIX)) for directory in _directories(root)]


def prune_checkpoints(root: Path, *, keep_last: int) -> None:
    """Deletes all but the newest; what cannot be deleted is a warning."""
    for directory in _directories(root)[:-keep_last]:
        try:
            shutil.rmtree(directory)
        except OSError as error:
            log.warning("old checkpoint %s stays: %s", directory, error)


def _directories(root: Path) -> list[Path]:
    return sorted(d for d in root.glob(f"{_PREFIX}*") if d.name.removeprefix(_PREFIX).isdigit())


def _save_tensors(path: Path, named: Iterable[tuple[str, Tensor]], *, is_lead: bool) -> None:
    whole: dict[str, Tensor] = {}
    for name, tensor in named:
        gathered = gather_tensor(tensor.detach())
        check_finite(name, gathered)
        if is_lead:
            whole[name] = gathered.cpu().contiguous()
    if is_lead:
        try:
            save_file(whole, path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None


def _load_tensors(path: Path, targets: dict[str, Any]) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(targets):
                names = sorted(set(file.keys()) ^ set(targets))[:3]
                raise ValueError(f"{path} is of another model: only one side has {names}")
            for name, target in targets.items():
                whole = file.get_tensor(name)
                if whole.shape != target.shape or whole.dtype != torch.float32:
                    raise ValueError(
                        f"{path} is of another model: {name} is {whole.dtype}{list(whole.shape)}, "
                        f"the model has float32{list(target.shape)}"
                    )
                fill(target, whole.to(target.device))
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _seal(temporary: Path, final: Path) -> None:
    """Syncs all files, adds the marker, and gives the directory its final name."""
    files = sorted(temporary.iterdir())
    marker = temporary / _COMPLETE
    marker.write_text(json.dumps({file.name: _fingerprint(file) for file in files}, indent=1))
    for path in [*files, marker, temporary]:
        sync(path)
    if final.exists():  # a replayed or damaged one of the same version
        aside = final.with_name(f".{final.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
        temporary.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        temporary.rename(final)
    sync(final.parent)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
