"""What one version of the weights consists of: names, types, shapes and checksums of its tensors.

Both transports say it in these words. A version in memory is one flat buffer: the tensors lie in
it one after the other, each at a multiple of ALIGN bytes, so that any slice can be sent as it is.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from asyncrl.types import WeightId

ALIGN = 64
"""Bytes. No element of any type straddles what tensors are aligned to."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""What weights may travel in, by name."""

TensorSpec = tuple[str, tuple[int, ...]]
"""dtype name without the `torch.` and shape: ("bfloat16", (576, 576))."""


class WeightsError(ValueError):
    """Published weights that are not whole, or not those of the reader's model."""


class TensorEntry(BaseModel):
    """One tensor of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    dtype: str
    shape: list[int] = Field(max_length=8)
    crc32: int = Field(ge=0, lt=1 << 32)


class Manifest(BaseModel):
    """All tensors of one version, in the order in which they lie in memory."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    inc: int
    version: int
    tensors: list[TensorEntry]

    @classmethod
    def of(cls, weights: WeightId, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Reads every byte of `tensors` (host memory) for its checksum."""
        entries = [TensorEntry(name=n, **describe(tensor)) for n, tensor in tensors.items()]
        return cls(inc=weights.inc, version=weights.version, tensors=entries)

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Self:
        """From its JSON. Raises WeightsError."""
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError as error:
            raise WeightsError(f"a manifest cannot be read: {error}") from None

    @property
    def weights(self) -> WeightId:
        return WeightId(self.inc, self.version)

    @property
    def digest(self) -> str:
        """Same digest, same weights."""
        return digest_of({e.name: e.model_dump(exclude={"name"}) for e in self.tensors})

    def entries(self) -> dict[str, dict[str, Any]]:
        """By name: dtype, shape, crc32."""
        return {entry.name: entry.model_dump(exclude={"name"}) for entry in self.tensors}


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in the flat buffer of a version."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte."""
    num_bytes: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor itself, in the buffer `flat` (uint8)."""
        return flat[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat buffer of a version: where each tensor lies, and how many bytes there are."""

    places: tuple[Place, ...]
    num_bytes: int

    @classmethod
    def of(cls, specs: Iterable[tuple[str, TensorSpec]]) -> Self:
        """Of tensors in this order. Raises WeightsError for a type that is not in DTYPES."""
        places, start = [], 0
        for name, (dtype_name, shape) in specs:
            dtype = DTYPES.get(dtype_name)
            if dtype is None:
                raise WeightsError(f"tensor {name} is {dtype_name}, which weights do not travel in")
            num_bytes = dtype.itemsize
            for size in shape:
                num_bytes *= size
            places.append(Place(name, dtype, tuple(shape), start, num_bytes))
            start += -(-num_bytes // ALIGN) * ALIGN
        return cls(tuple(places), start)

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> Self:
        return cls.of((e.name, (e.dtype, tuple(e.shape))) for e in manifest.tensors)

    def tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of all tensors in `flat` (uint8, num_bytes long), by name."""
        return {place.name: place.view(flat) for place in self.places}


def weights_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of the version that consists of these tensors (host memory)."""
    return digest_of({name: describe(tensor) for name, tensor in named})


def digest_of(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Over what the tensors are (dtype, shape, crc32), in any order."""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """dtype, shape and checksum of a tensor in host memory."""
    return {"dtype": dtype_name(tensor), "shape": list(tensor.shape), "crc32": crc32(tensor)}


def check_names(
    entries: Mapping[str, Mapping[str, Any]], expected: Mapping[str, TensorSpec], *, where: str
) -> None:
    """Raises WeightsError that names the first tensor of `expected` that is missing, of another
    type or of another shape in `entries`, or the first one that is not expected. `where` says in
    words which weights these are."""
    for name, (dtype, shape) in expected.items():
        entry = entries.get(name)
        if entry is None:
            raise WeightsError(f"tensor {name} is missing in {where}")
        found = (entry["dtype"], tuple(entry["shape"]))
        if found != (dtype, tuple(shape)):
            raise WeightsError(
                f"tensor {name} in {where} is {found[0]}{list(found[1])}, but the model takes "
                f"{dtype}{list(shape)}"
            )
    for name in entries:
        if name not in expected:
            raise WeightsError(f"tensor {name} in {where} is not one of the model's")


def check_tensor(
    name: str, entry: Mapping[str, Any], tensor: torch.Tensor | None, *, where: str
) -> None:
    """Raises WeightsError unless `tensor` (host memory) is what `entry` says, to the last bit."""
    if tensor is None:
        raise WeightsError(f"tensor {name} is missing in {where}")
    if (dtype_name(tensor), list(tensor.shape)) != (entry["dtype"], entry["shape"]):
        raise WeightsError(f"tensor {name} in {where} does not have its manifest's type or shape")
    if crc32(tensor) != entry["crc32"]:
        raise WeightsError(f"tensor {name} in {where} is damaged: its checksum does not fit")


def crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
