"""Whole parameters on the lead, out of the shards of all ranks: a few large messages to one rank.

Shards travel in the type they are wanted in. An all-gather of each parameter would bring
everything to everybody, one small message at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 8 << 20
"""What the lead receives at a time, of all other ranks together."""


@dataclass(frozen=True, slots=True)
class Piece:
    """So many elements of every rank's shard of one parameter, and where a bucket holds them."""

    name: str
    first: int
    """Of the flattened shard."""
    count: int
    offset: int
    """In elements, from the beginning of the bucket."""


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard; the whole tensor where it is not sharded. Fastest under no_grad."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_whole(
    sharded: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    rank: int,
    size: int,
) -> float:
    """Copies every tensor of `sharded` (float32, its rows cut over the ranks) whole into its
    contiguous target of the same name and shape, in `dtype`, on rank 0; others have no targets.

    A collective. Memory on every rank: BUCKET_BYTES. When it returns the targets can be read.
    Returns the seconds that rank 0 spent on the shards of others (on GPUs: on asking for them).
    """
    gather_s = 0.0
    shards = {name: local_part(tensor) for name, tensor in sharded.items()}
    device = next(iter(shards.values())).device
    if rank == 0:
        for name, shard in shards.items():
            own = targets[name] if size == 1 else targets[name][: len(shard)]
            own.copy_(_cast_on_gpu(shard, dtype), non_blocking=True)
    if size > 1:
        lengths = {name: _shard_length(tensor, size) for name, tensor in sharded.items()}
        length = BUCKET_BYTES // dtype.itemsize // (size - 1)
        rows = torch.empty(size - 1 if rank == 0 else 1, length, dtype=dtype, device=device)
        for pieces in cut(lengths, length):
            if rank == 0:
                began = time.monotonic()
                _receive(rows[:, : _filled(pieces)])
                gather_s += time.monotonic() - began
                _unpack(rows, pieces, lengths, targets)
            else:
                _pack(shards, pieces, rows[0])
                _exchange([dist.P2POp(dist.isend, rows[0, : _filled(pieces)], 0)])
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return gather_s


def cut(lengths: Mapping[str, int], bucket: int) -> Iterator[list[Piece]]:
    """Shards of these lengths one after the other, cut into buckets of at most so many elements."""
    pieces: list[Piece] = []
    offset = 0
    for name, length in lengths.items():
        first = 0
        while first < length:
            count = min(length - first, bucket - offset)
            pieces.append(Piece(name, first, count, offset))
            first, offset = first + count, offset + count
            if offset == bucket:
                yield pieces
                pieces, offset = [], 0
    if pieces:
        yield pieces


def _shard_length(tensor: Tensor, size: int) -> int:
    """Elements of rank 0's shard: no rank has more, and those after it follow without a gap."""
    if not isinstance(tensor, DTensor) or tuple(tensor.placements) != (Shard(0),):
        raise RuntimeError(f"a parameter of shape {list(tensor.shape)} is not sharded by its rows")
    return -(-tensor.shape[0] // size) * tensor.shape[1:].numel()


def _filled(pieces: Sequence[Piece]) -> int:
    return pieces[-1].offset + pieces[-1].count


def _pack(shards: Mapping[str, Tensor], pieces: Sequence[Piece], bucket: Tensor) -> None:
    """What a rank has; where its shard is shorter than rank 0's, the bucket keeps what it held."""
    for piece in pieces:
        part = shards[piece.name].view(-1)[piece.first : piece.first + piece.count]
        bucket[piece.offset : piece.offset + len(part)].copy_(part)


def _receive(rows: Tensor) -> None:
    """Fills rows[r - 1] with what rank r has packed."""
    _exchange([dist.P2POp(dist.irecv, row, rank) for rank, row in enumerate(rows, start=1)])


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _unpack(
    rows: Tensor,
    pieces: Sequence[Piece],
    lengths: Mapping[str, int],
    targets: Mapping[str, Tensor],
) -> None:
    for piece in pieces:
        target = targets[piece.name].view(-1)
        for rank, row in enumerate(rows, start=1):
            part = target[rank * lengths[piece.name] :][piece.first :][: piece.count]
            part.copy_(row[piece.offset : piece.offset + len(part)], non_blocking=True)


def _cast_on_gpu(shard: Tensor, dtype: torch.dtype) -> Tensor:
    """On a GPU the cast comes first, so that half as much crosses to the host; on a CPU a copy
    casts as it goes."""
    return shard.to(dtype) if shard.is_cuda else shard
