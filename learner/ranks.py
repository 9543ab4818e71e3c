"""The learner's processes: rank, device, mesh, and the few things that ranks tell each other.

The one place that chooses device and backend. Under torch.distributed.run each process is one rank;
started plainly, a process is the only rank and opens no port.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the learner's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """One axis, "dp": parameters, gradients and optimizer state are sharded over it."""

    @property
    def is_lead(self) -> bool:
        """Rank 0: it alone talks to the buffer, publishes and writes files."""
        return self.rank == 0

    def broadcast(self, parts: Sequence[bytes | memoryview]) -> list[bytes]:
        """Rank 0's byte strings, on every rank; what the others pass is not looked at."""
        packed = _pack(parts) if self.is_lead else b""
        if self.size == 1:
            return _unpack(packed)
        size = torch.tensor([len(packed)], dtype=torch.int64)
        dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_lead:
            data.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        dist.broadcast(data, src=0)
        return _unpack(data.numpy().tobytes())

    def gather_columns(self, columns: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """All ranks' float32 columns [k, lengths[rank]] side by side: [k, sum(lengths)], on host.

        Every rank knows all lengths beforehand, so one exchange is enough.
        """
        columns = columns.detach().float().cpu()
        if self.size == 1:
            return columns
        padded = torch.zeros(columns.shape[0], max(lengths))
        padded[:, : columns.shape[1]] = columns
        everyone = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(everyone, padded)
        return torch.cat([part[:, :n] for part, n in zip(everyone, lengths, strict=True)], dim=1)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' numbers, place by place; on the host, int32."""
        values = values.to("cpu", torch.int32)
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values


def start_ranks() -> Ranks:
    """Joins the process group, made by torch.distributed.run's environment or of this process only.

    Calling it again in the same process returns the same ranks.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    return Ranks(dist.get_rank(), dist.get_world_size(), device, mesh)


def _pack(parts: Sequence[bytes | memoryview]) -> bytes:
    lengths = struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts))
    return b"".join([lengths, *parts])


def _unpack(packed: bytes) -> list[bytes]:
    (num_parts,) = struct.unpack_from("<Q", packed)
    lengths = struct.unpack_from(f"<{num_parts}Q", packed, 8)
    parts, start = [], 8 * (num_parts + 1)
    for length in lengths:
        parts.append(packed[start : start + length])
        start += length
    return parts
