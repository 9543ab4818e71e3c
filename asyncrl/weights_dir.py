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
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from asyncrl.disk import sync
from asyncrl.types import WeightId

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK_BYTES = 4 << 20

TensorSpec = tuple[str, tuple[int, ...]]
"""dtype name without the `torch.` and shape: ("bfloat16", (576, 576))."""


class WeightsError(ValueError):
    """Published weights that are not whole, or not those of the reader's model."""


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
        digest = _digest(entries)
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


def weights_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest that `write_version` gives these tensors (host memory), in files of any size."""
    return _digest({name: _describe(tensor) for name, tensor in named})


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
            _check_names(location, entries, expected)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted({entry["file"] for entry in entries.values()}):
            tensors.update(_read_bucket(location / file))
        for name, entry in entries.items():
            _check_tensor(location, name, entry, tensors)
        return StagedWeights(WeightId(manifest["inc"], manifest["version"]), tensors)


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
            entries[name] = {"file": file, **_describe(tensor)}
    return entries


def _describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": _dtype_name(tensor),
        "shape": list(tensor.shape),
        "crc32": _crc32(tensor),
    }


def _digest(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Over what the tensors are, not over the files that they lie in."""
    what = {n: {k: v for k, v in entry.items() if k != "file"} for n, entry in entries.items()}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


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


def _check_names(
    location: Path, entries: Mapping[str, Any], expected: Mapping[str, TensorSpec]
) -> None:
    for name, (dtype, shape) in expected.items():
        entry = entries.get(name)
        if entry is None:
            raise WeightsError(f"tensor {name} is missing in {location}")
        found = (entry["dtype"], tuple(entry["shape"]))
        if found != (dtype, tuple(shape)):
            raise WeightsError(
                f"tensor {name} in {location} is {found[0]}{list(found[1])}, but the model takes "
                f"{dtype}{list(shape)}"
            )
    for name in entries:
        if name not in expected:
            raise WeightsError(f"tensor {name} in {location} is not one of the model's")


def _check_tensor(
    location: Path, name: str, entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise WeightsError(f"tensor {name} is missing in {location}/{entry['file']}")
    if (_dtype_name(tensor), list(tensor.shape)) != (entry["dtype"], entry["shape"]):
        raise WeightsError(
            f"tensor {name} in {location} does not have its manifest's type or shape"
        )
    if _crc32(tensor) != entry["crc32"]:
        raise WeightsError(f"tensor {name} in {location} is damaged: its checksum does not fit")


def _crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
