"""Bytes on the wire: a msgpack header, then raw frames. Nothing that is read is ever executed.

A packet is a multipart message: one header frame `{"p": protocol, "id": request number, "m":
message}` and zero or more opaque frames. The only frames in use are groups, one frame each, laid
out by `encode_group`: header length (4 bytes, little-endian), msgpack header, then the arrays one
after the other. The buffer stores and forwards such a frame as it came.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

import msgpack
import numpy as np
import zmq
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from asyncrl.messages import PROTOCOL, AnyMessage, Count, Message, Pair
from asyncrl.types import (
    BoolArray,
    FinishReason,
    Float32Array,
    GroupId,
    Int32Array,
    Rollout,
    RolloutGroup,
)

MAX_HEADER_BYTES = 16 << 20
"""A header larger than this is refused. Leases carry data rows, so it is not tiny."""
MAX_FRAME_BYTES = 256 << 20
"""A frame larger than this is refused by the socket itself: 8 rollouts of 1M tokens fit."""
MAX_FRAMES = 65_536
_MAX_ITEMS = 65_536
"""Items of one list or mapping in a header: small bytes must not become large objects."""

_MESSAGES: TypeAdapter[Any] = TypeAdapter(AnyMessage)
_ARRAYS = (  # name, dtype on the wire, in the order in which they follow the header
    ("token_ids", "<i4"),
    ("logprobs", "<f4"),
    ("versions", "<i4"),
    ("loss_mask", "|b1"),
)
TOKEN_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _ARRAYS)
"""Of one token of a response in the frame of its group."""
_FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


class WireError(ValueError):
    """Bytes that are not a message of this protocol. The peer is at fault, the reader goes on."""


class OtherProtocol(WireError):
    """A packet of another protocol: it can be told so, in that protocol."""

    def __init__(self, protocol: int, id: int) -> None:
        super().__init__(f"protocol {protocol}, expected {PROTOCOL}: use the same asyncrl")
        self.protocol = protocol
        self.id = id


Frame = bytes | zmq.Frame
"""Opaque bytes behind a header; a zmq.Frame is one that came and was not copied."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One decoded message with the number that pairs request and reply (0: not answered)."""

    id: int
    message: Any
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GroupColumns:
    """A group as it lies in its frame: the arrays of all rollouts, one after the other. N is the
    sum of `lengths`; see types.RolloutGroup and types.Rollout for what the fields mean."""

    id: GroupId
    attempt: int
    source: str
    temperature: float
    inc: int
    lengths: list[int]
    """Tokens of each rollout."""
    finish_reasons: list[FinishReason]
    rewards: list[float | None]
    reward_parts: list[dict[str, float]]
    prompt_ids: Int32Array
    token_ids: Int32Array
    """[N]; so are the three below."""
    logprobs: Float32Array
    versions: Int32Array
    loss_mask: BoolArray


class _GroupHeader(BaseModel):
    """Everything about a group but its arrays."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    group: Pair
    attempt: Count
    source: str
    temperature: Annotated[float, Field(ge=0)]
    inc: Count
    prompt: Count
    lengths: list[Count]
    finish: list[Annotated[int, Field(ge=0, lt=len(_FINISH_REASONS))]]
    rewards: list[float | None]
    parts: list[dict[str, float]]


def encode(
    message: Message, *, id: int = 0, frames: tuple[Frame, ...] = (), protocol: int = PROTOCOL
) -> list[Frame]:
    """The parts of one multipart message. Raises ValueError for a header over the limit."""
    header = msgpack.packb({"p": protocol, "id": id, "m": message.model_dump()})
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"a {message.__class__.__name__} of {len(header)} bytes is over the limit of "
            f"{MAX_HEADER_BYTES}: is there a very large data row?"
        )
    return [header, *frames]


def decode(parts: Sequence[Frame]) -> Packet:
    """The inverse of `encode`; the header is bytes. Raises WireError, and nothing else, on bytes
    that do not fit."""
    if not 1 <= len(parts) <= MAX_FRAMES:
        raise WireError(f"{len(parts)} frames in one message (1 to {MAX_FRAMES} are possible)")
    header = _unpack(view(parts[0]), MAX_HEADER_BYTES)
    if not isinstance(header, dict) or not _is_count(header.get("p")):
        found = header.get("p") if isinstance(header, dict) else type(header).__name__
        raise WireError(f"protocol {found!r}, expected {PROTOCOL}")
    id = header.get("id")
    if not _is_count(id):
        raise WireError(f"request number {id!r} is not a count")
    if header["p"] != PROTOCOL:
        raise OtherProtocol(header["p"], id)
    try:
        message = _MESSAGES.validate_python(header.get("m"))
    except (ValidationError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {str(error)[:500]}") from None
    return Packet(id, message, tuple(parts[1:]))


def view(frame: Frame) -> memoryview:
    """The bytes of a frame, not copied."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def encode_group(group: RolloutGroup) -> bytes:
    """One frame that holds a whole group."""
    header = msgpack.packb(
        {
            "group": list(group.id),
            "attempt": group.attempt,
            "source": group.source,
            "temperature": group.temperature,
            "inc": group.inc,
            "prompt": len(group.prompt_ids),
            "lengths": [len(r.token_ids) for r in group.rollouts],
            "finish": [_FINISH_REASONS.index(r.finish_reason) for r in group.rollouts],
            "rewards": [r.reward for r in group.rollouts],
            "parts": [r.reward_parts for r in group.rollouts],
        }
    )
    arrays = [np.ascontiguousarray(group.prompt_ids, "<i4").tobytes()]
    for name, dtype in _ARRAYS:
        arrays += [np.ascontiguousarray(getattr(r, name), dtype).tobytes() for r in group.rollouts]
    return b"".join([struct.pack("<I", len(header)), header, *arrays])


def decode_columns(frame: Frame) -> GroupColumns:
    """What is in the frame of a group; arrays are read-only views of it.

    Raises WireError when the header, a length or a value does not fit.
    """
    data = view(frame).toreadonly()
    try:
        (header_length,) = struct.unpack_from("<I", data)
        header = _GroupHeader.model_validate(_unpack(data[4 : 4 + header_length], MAX_HEADER_BYTES))
    except (ValidationError, RecursionError, struct.error) as error:
        raise WireError(f"not a group: {str(error)[:500]}") from None
    num_tokens, num_rollouts = sum(header.lengths), len(header.lengths)
    expected = 4 + header_length + 4 * header.prompt + TOKEN_BYTES * num_tokens
    if len(data) != expected:
        raise WireError(f"a group of {expected} bytes came in a frame of {len(data)}")
    columns: list[list[Any]] = [header.finish, header.rewards, header.parts]
    if any(len(column) != num_rollouts for column in columns):
        raise WireError(f"columns of {[len(c) for c in columns]} for {num_rollouts} rollouts")

    offset, arrays = 4 + header_length, {}
    for name, dtype in (("prompt_ids", "<i4"), *_ARRAYS):
        count = header.prompt if name == "prompt_ids" else num_tokens
        arrays[name] = np.frombuffer(data, dtype, count, offset)
        offset += arrays[name].nbytes
    return GroupColumns(
        id=GroupId(*header.group),
        attempt=header.attempt,
        source=header.source,
        temperature=header.temperature,
        inc=header.inc,
        lengths=header.lengths,
        finish_reasons=[_FINISH_REASONS[number] for number in header.finish],
        rewards=header.rewards,
        reward_parts=header.parts,
        **arrays,
    )


def decode_group(frame: Frame) -> RolloutGroup:
    """The inverse of `encode_group`; arrays are read-only views of `frame`. Raises as
    `decode_columns`."""
    columns = decode_columns(frame)
    ends = np.cumsum(columns.lengths)
    return RolloutGroup(
        id=columns.id,
        attempt=columns.attempt,
        source=columns.source,
        prompt_ids=columns.prompt_ids,
        temperature=columns.temperature,
        inc=columns.inc,
        rollouts=tuple(
            Rollout(
                token_ids=columns.token_ids[end - length : end],
                logprobs=columns.logprobs[end - length : end],
                versions=columns.versions[end - length : end],
                loss_mask=columns.loss_mask[end - length : end],
                finish_reason=columns.finish_reasons[i],
                reward=columns.rewards[i],
                reward_parts=columns.reward_parts[i],
            )
            for i, (length, end) in enumerate(zip(columns.lengths, ends, strict=True))
        ),
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _unpack(data: memoryview, limit: int) -> Any:
    if len(data) > limit:
        raise WireError(f"a header of {len(data)} bytes is over the limit of {limit}")
    try:
        return msgpack.unpackb(
            data, strict_map_key=True, max_array_len=_MAX_ITEMS, max_map_len=_MAX_ITEMS
        )
    except Exception as error:  # msgpack's own errors share no base with its ValueErrors
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from None
