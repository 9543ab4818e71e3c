"""One receiver of a broadcast: takes one version in, slice by slice, and verifies its bytes.

Everything here blocks, and runs in threads that nobody has to wait for. The group is always left,
whatever happens, before the caller hears of it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.manifest import Layout, Manifest, WeightsError
from asyncrl.process_groups import Disposable, Group, GroupError, Seat
from generators.engine import StageTimes

CRC_BYTES = 8 << 20
"""A checksum is computed in parts of so many bytes; those on a GPU are copied to the host."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a transfer may take."""

    timeout_s: float
    """The whole of it (weights.timeout_s)."""
    stall_s: float
    """Until all members are there, and any one slice (weights.stall_timeout_s)."""


class Receiver:
    """One place in one broadcast. Use it once."""

    def __init__(
        self,
        seat: Seat,
        manifest: Manifest,
        *,
        bucket_bytes: int,
        limits: Limits,
        device: torch.device,
    ) -> None:
        """`device` is that of the group: a GPU for nccl, the CPU for gloo."""
        self.rendezvous_s = self.transfer_s = self.verify_s = 0.0
        self.device, self.limits = device, limits
        self.layout = Layout.of_manifest(manifest)
        self.bucket_bytes = max(1, min(bucket_bytes, self.layout.num_bytes))
        self._seat = seat
        self._checksums = {entry.name: entry.crc32 for entry in manifest.tensors}
        self._where = f"weights {manifest.weights} as they came"
        self._ends = time.monotonic() + limits.timeout_s

    @property
    def times(self) -> StageTimes:
        return StageTimes(self.rendezvous_s, self.transfer_s, self.verify_s)

    def receive(self, flat: torch.Tensor) -> None:
        """Fills `flat` (uint8, `layout.num_bytes` long). Raises GroupError when the group breaks,
        WeightsError that names a tensor whose bytes are not those of the manifest."""
        with self.joined() as group:
            began = time.monotonic()
            if flat.device == self.device:
                for start, stop in self.slices():
                    group.broadcast(flat[start:stop])
            else:
                self._receive_through_buckets(group, flat)
            self.transfer_s = time.monotonic() - began
        for place in self.layout.places:
            self.verify(place.name, flat[place.start : place.start + place.num_bytes])

    @contextmanager
    def joined(self) -> Iterator[Group]:
        """In the group; out of it afterwards. Raises GroupError."""
        stall_s, began = self.limits.stall_s, time.monotonic()
        group = Group(self._seat, device=self.device, join_s=stall_s, stall_s=stall_s)
        self.rendezvous_s = time.monotonic() - began
        try:
            yield group
        except BaseException:
            group.abort()
            raise
        finally:
            with suppress(TimeoutError):
                Disposable(group.close, name="leave-weights").result(timeout_s=stall_s)

    def slices(self) -> Iterator[tuple[int, int]]:
        """First byte of each broadcast, and the one after its last. Raises GroupError when the
        next one would begin after the deadline."""
        num_bytes = self.layout.num_bytes
        for start in range(0, num_bytes, self.bucket_bytes):
            if time.monotonic() > self._ends:
                raise GroupError(
                    f"after weights.timeout_s = {self.limits.timeout_s:g} only {start} of "
                    f"{num_bytes} bytes had come"
                )
            yield start, min(start + self.bucket_bytes, num_bytes)

    def verify(self, name: str, data: torch.Tensor) -> None:
        """Raises WeightsError unless `data` (uint8) has the checksum of tensor `name`."""
        began = time.monotonic()
        found = 0
        for part in data.split(CRC_BYTES):
            found = zlib.crc32(part.cpu().numpy(), found)
        self.verify_s += time.monotonic() - began
        if found != self._checksums[name]:
            raise WeightsError(
                f"tensor {name} of {self._where} is damaged: its checksum does not fit"
            )

    def _receive_through_buckets(self, group: Group, flat: torch.Tensor) -> None:
        """One of `flat` and the group is on a GPU, the other on the host. Two buckets in turn: one
        is copied on while the other is filled."""
        gpu = flat.device if flat.is_cuda else self.device
        buckets = [
            torch.empty(
                self.bucket_bytes, dtype=torch.uint8, device=self.device, pin_memory=flat.is_cuda
            )
            for _ in range(2)
        ]
        copies: Any = torch.cuda.Stream(gpu)
        # Memory is handed out again while what used it before may still be under way.
        copies.wait_stream(torch.cuda.current_stream(gpu))
        copied: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]
        for number, (start, stop) in enumerate(self.slices()):
            turn = number % 2
            copied[turn].synchronize()
            bucket = buckets[turn][: stop - start]
            group.broadcast(bucket)
            with torch.cuda.stream(copies):
                flat[start:stop].copy_(bucket, non_blocking=True)
                copied[turn].record(copies)
        copies.synchronize()
