"""Transport `disk`: one directory of safetensors files for each published version.

    ROOT/1.12/                      weights (inc 1, version 12)
        00000.safetensors ...       tensors in Hugging Face names, `bucket_bytes` each
        manifest.json               written last: names, dtypes, shapes, files and checksums

A directory is written under a temporary name, synced, renamed, and never changed afterwards, so
whatever has its final name is whole. There is no membership: readers may come, die and stay away.
A reader holds a shared lock on the manifest while it copies; `prune` passes over what is locked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from asyncrl.disk import sync
from asyncrl.manifest import (
    TensorSpec,
    WeightsError,
    check_names,
    check_tensor,
    describe,
    digest_of,
)
from asyncrl.types import WeightId

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """Where a version lies, and the hash of its tensors (same digest, same weights)."""

    location: Path
    digest: str


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A verified private copy of one version, in host memory."""

    weights: WeightId
    tensors: dict[str, torch.Tensor]
    read_s: float
    verify_s: float


def write_version(
    root: Path,
    weights: WeightId,
    tensors: Mapping[str, torch.Tensor],
    *,
    bucket_bytes: int,
    max_bytes_per_s: int | None = None,
) -> Written:
    """Writes one whole version. The caller keeps `tensors` (host memory) unchanged meanwhile, and
    is the only writer of `root`.

    `max_bytes_per_s` bounds the mean speed. Raises OSError when the disk does not take it; no
    directory with a final name is left then.
    """
    root.mkdir(parents=True, exist_ok=True)
    for left_behind in root.glob(".*.tmp"):
        shutil.rmtree(left_behind, ignore_errors=True)
    final = root / str(weights)
    temporary = root / f".{weights}.tmp"
    temporary.mkdir()
    try:
        entries = _write_buckets(temporary, tensors, bucket_bytes, max_bytes_per_s)
        digest = digest_of({n: _without_file(entry) for n, entry in entries.items()})
        manifest = {
            "format": _FORMAT,
            "inc": weights.inc,
            "version": weights.version,
            "tensors": entries,
            "digest": digest,
        }
        _write_file(temporary / MANIFEST, json.dumps(manifest).encode(), None)
        sync(temporary)
        temporary.rename(final)
        sync(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Written(final, digest)


def read_version(
    location: Path, *, expected: Mapping[str, TensorSpec] | None = None
) -> StagedWeights:
    """Copies one version into memory and verifies every byte of it.

    `expected` are the tensors that the reader's own model takes. Raises WeightsError that names
    the first tensor or file that is missing, renamed, misshapen, of another type, or damaged.
    """
    with _locked_manifest(location) as manifest:
        entries: dict[str, Any] = manifest["tensors"]
        if expected is not None:
            check_names(entries, expected, where=str(location))
        began = time.monotonic()
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted({entry["file"] for entry in entries.values()}):
            tensors.update(_read_bucket(location / file))
        read = time.monotonic()
        for name, entry in entries.items():
            check_tensor(name, entry, tensors.get(name), where=f"{location}/{entry['file']}")
        weights = WeightId(manifest["inc"], manifest["version"])
        return StagedWeights(weights, tensors, read - began, time.monotonic() - read)


def prune(root: Path, *, keep: int) -> None:
    """Deletes all but the `keep` newest versions, except those that a reader holds now.

    What cannot be deleted is a warning and is tried again at the next call.
    """
    for stale in list_versions(root)[: -keep or None]:
        directory = root / str(stale)
        try:
            with (directory / MANIFEST).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
        except BlockingIOError:
            continue
        except OSError as error:
            log.warning("old weights %s stay: %s", directory, error)


def list_versions(root: Path) -> list[WeightId]:
    """The whole versions under `root`, oldest first."""
    found = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        try:
            found.append(WeightId.parse(manifest.parent.name))
        except ValueError:
            continue
    return sorted(found)


def _write_buckets(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    bucket_bytes: int,
    max_bytes_per_s: int | None,
) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for number, bucket in enumerate(_buckets(tensors, bucket_bytes)):
        file = f"{number:05d}.safetensors"
        _write_file(directory / file, save_tensors(bucket), max_bytes_per_s)
        for name, tensor in bucket.items():
            entries[name] = {"file": file, **describe(tensor)}
    return entries


def _buckets(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors of at most `bucket_bytes` together (a larger one goes alone)."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


def _write_file(path: Path, data: bytes, max_bytes_per_s: int | None) -> None:
    started = time.monotonic()
    view = memoryview(data)
    with path.open("wb") as file:
        for start in range(0, len(view), _CHUNK_BYTES):
            file.write(view[start : start + _CHUNK_BYTES])
            if max_bytes_per_s is not None:
                done = min(start + _CHUNK_BYTES, len(view))
                time.sleep(max(0.0, started + done / max_bytes_per_s - time.monotonic()))
        file.flush()
        os.fsync(file.fileno())


def _read_bucket(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_tensors(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from None


@contextmanager
def _locked_manifest(location: Path) -> Iterator[dict[str, Any]]:
    try:
        with (location / MANIFEST).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            manifest = json.load(file)
            if manifest.get("format") != _FORMAT:
                raise WeightsError(
                    f"{location}/{MANIFEST} has format {manifest.get('format')!r}, expected "
                    f"{_FORMAT}: learner and generators run different versions of asyncrl"
                )
            yield manifest
    except FileNotFoundError as error:
        raise WeightsError(f"no weights at {location}: {error}") from None
    except json.JSONDecodeError as error:
        raise WeightsError(f"{location}/{MANIFEST} is damaged: {error}") from None


def _without_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The digest is over what a tensor is, not over where it lies."""
    return {key: value for key, value in entry.items() if key != "file"}
