"""The wire format: everything comes back equal, and nothing that a peer sends can do harm."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import messages as m
from asyncrl.types import GroupId, Rollout, RolloutGroup
from asyncrl.wire import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    WireError,
    decode,
    decode_group,
    encode,
    encode_group,
    view,
)

EXAMPLES: list[m.Message] = [
    m.Hello(role="generator", member="generator-0-8f3a", run_id=None, host="h", pid=1),
    m.Welcome(run_id="r", run_name="run", heartbeat_s=5.0, settings={}),
    m.Refused(code="fenced", reason="a later learner is registered"),
    m.Ok(),
    m.LeaseRequest(slots=3, serving=[1, 12]),
    m.Leases(
        leases=[
            m.Lease(
                kind="train", group=[0, 7], attempt=1, seed_k=0, num_rollouts=8, temperature=1.0,
                row={"prompt": "2 + 2 =", "source": "s", "answer": "4", "extra": {"n": [1, None]}},
                min_version=11, timeout_s=60.0,
            )
        ]
    ),
    m.Started(kind="eval", group=[3, 0], attempt=0, version=3),
    m.Submit(kind="train", group=[0, 7], attempt=1),
    m.Failed(kind="train", group=[0, 7], attempt=1, reason="too long", content=True),
    m.Verdict(verdict="stale", reason="version 3 at step 9 with a bound of 2"),
    m.Heartbeat(
        state="generating", serving=[1, 2], held=[[0, 1, 0]], num_running=8, num_tokens=99,
        paused_s=0.5,
    ),
    m.Beat(inc=1, version=2, done=False),
    m.WatchWeights(have=[0, 0]),
    m.Weights(inc=1, version=2, transport="disk", location="/dev/shm/x"),
    m.Weights(inc=1, version=2, transport="collective"),
    m.Ready(inc=1, version=2, devices=["cpu"]),
    m.Seat(roster=1, host="::1", port=1, rank=1, size=2),
    m.Staged(inc=1, version=2, roster=1, error="damaged"),
    m.Served(inc=1, version=2, seconds={"load": 0.5}),
    m.CloseRoster(inc=1, version=2),
    m.Roster(roster=1, members=[m.RosterMember(name="g", devices=["cpu"])], refusals={"h": "no"}),
    m.OpenGroup(inc=1, version=2, roster=1, host="::1", port=1, backend="gloo", bucket_bytes=9),
    m.AwaitStaged(inc=1, version=2, roster=1, wait_s=1.5),
    m.Outcome(staged=["g"], failed={"h": "lost"}, missing=["i"]),
    m.Register(checkpoint_version=4, config_digest="d"),
    m.Registered(inc=1, committed=0),
    m.Fetch(inc=1, step=2),
    m.Batch(
        step=2, max_staleness=2, replayed=False,
        records=[m.Record(name="eval", step=1, values={"accuracy": 0.5, "n": 512, "why": "x"})],
    ),
    m.Waiting(step=2, reason="need 16 groups, have 12, 4 in flight", records=[]),
    m.End(reason="max_steps reached", records=[]),
    m.Commit(inc=1, version=3, metrics={"loss": 0.5}),
    m.Committed(stop=False),
    m.Leave(reason="SIGTERM"),
    m.Published(inc=1, version=3, transport="disk", location="/dev/shm/x/3", digest="d"),
    m.Checkpointed(inc=1, versions=[2, 4]),
    m.StatusRequest(),
    m.Status(values={"step": 3, "members": [{"name": "g", "alive": True}]}),
]  # fmt: skip


def test_there_is_an_example_of_every_message() -> None:
    known = get_args(get_args(m.AnyMessage)[0])
    assert {type(example) for example in EXAMPLES} == set(known)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.type)
def test_every_message_comes_back_equal(message: m.Message) -> None:
    packet = decode(encode(message, id=7, frames=(b"one", b"")))
    assert packet.message == message
    assert packet.id == 7
    assert packet.frames == (b"one", b"")


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.type)
def test_an_unknown_field_or_a_wrong_type_is_refused(message: m.Message) -> None:
    header = msgpack.unpackb(encode(message)[0])
    header["m"]["surprise"] = 1
    with pytest.raises(WireError, match="surprise"):
        decode([msgpack.packb(header)])
    del header["m"]["surprise"]
    for field, value in header["m"].items():
        if field not in ("run_id", "row", "values") and not isinstance(value, dict):
            broken = header | {"m": header["m"] | {field: {"not": "this"}}}
            with pytest.raises(WireError):
                decode([msgpack.packb(broken)])


@pytest.mark.parametrize(
    "header",
    [
        {"p": m.PROTOCOL + 1, "id": 0, "m": {"type": "ok"}},
        {"id": 0, "m": {"type": "ok"}},
        {"p": m.PROTOCOL, "id": -1, "m": {"type": "ok"}},
        {"p": m.PROTOCOL, "id": True, "m": {"type": "ok"}},
        {"p": m.PROTOCOL, "id": 0, "m": {"type": "no such"}},
        {"p": m.PROTOCOL, "id": 0, "m": None},
        {"p": m.PROTOCOL, "id": 0, "m": {"type": "fetch", "inc": True, "step": 0}},
        {"p": m.PROTOCOL, "id": 0, "m": {"type": "fetch", "inc": 1.0, "step": 0}},
        {"p": m.PROTOCOL, "id": 0, "m": {"type": "fetch", "inc": -1, "step": 0}},
        {"p": m.PROTOCOL, "id": 0, "m": {"type": "submit", "kind": "train", "group": [1],
                                         "attempt": 0}},
        [1, 2],
        "ok",
    ],
)  # fmt: skip
def test_a_header_that_is_not_of_this_protocol_is_refused(header: Any) -> None:
    with pytest.raises(WireError):
        decode([msgpack.packb(header)])


def test_messages_over_the_limits_are_refused_on_both_sides() -> None:
    row = {"prompt": "x" * (MAX_HEADER_BYTES + 1)}
    lease = EXAMPLES[5].leases[0].model_copy(update={"row": row})  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="very large data row"):
        encode(m.Leases(leases=[lease]))
    with pytest.raises(WireError, match="over the limit"):
        decode([b"\x00" * (MAX_HEADER_BYTES + 1)])
    with pytest.raises(WireError, match="frames"):
        decode([])
    with pytest.raises(WireError, match="frames"):
        decode([b""] * (MAX_FRAMES + 1))


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_any_bytes_are_decoded_or_refused_and_nothing_else(parts: list[bytes]) -> None:
    with suppress(WireError):
        decode(parts)


@given(st.integers(0, 24), st.integers(0, 400), st.integers(0, 255))
def test_a_message_with_one_changed_byte_is_decoded_or_refused(
    which: int, place: int, byte: int
) -> None:
    [header] = encode(EXAMPLES[which], id=3)
    changed = bytearray(view(header))
    changed[place % len(changed)] = byte
    with suppress(WireError):
        decode([bytes(changed)])


# ---- groups ----

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
int32 = st.integers(0, 2**31 - 1)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(0, 6))

    def column(values: st.SearchStrategy[Any], dtype: Any) -> Any:
        return np.array(draw(st.lists(values, min_size=length, max_size=length)), dtype)

    return Rollout(
        token_ids=column(int32, np.int32),
        logprobs=column(finite, np.float32),
        versions=column(int32, np.int32),
        loss_mask=column(st.booleans(), np.bool_),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        reward_parts=draw(
            st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False))
        ),
    )


groups = st.builds(
    RolloutGroup,
    id=st.builds(GroupId, st.integers(0, 99), st.integers(0, 2**40)),
    attempt=st.integers(0, 5),
    source=st.text(max_size=8),
    prompt_ids=st.lists(int32, max_size=5).map(lambda ids: np.array(ids, np.int32)),
    temperature=st.floats(0, 2),
    inc=st.integers(0, 9),
    rollouts=st.lists(rollouts(), max_size=4).map(tuple),
)

ARRAYS = ("token_ids", "logprobs", "versions", "loss_mask")


@given(groups)
def test_a_group_comes_back_equal_bit_for_bit(group: RolloutGroup) -> None:
    found = decode_group(encode_group(group))
    for name in ("id", "attempt", "source", "temperature", "inc"):
        assert getattr(found, name) == getattr(group, name)
    assert found.prompt_ids.tobytes() == group.prompt_ids.tobytes()
    assert len(found.rollouts) == len(group.rollouts)
    for back, sent in zip(found.rollouts, group.rollouts, strict=True):
        for name in ARRAYS:
            assert getattr(back, name).dtype == getattr(sent, name).dtype
            assert getattr(back, name).tobytes() == getattr(sent, name).tobytes()
        assert (back.finish_reason, back.reward) == (sent.finish_reason, sent.reward)
        assert back.reward_parts == sent.reward_parts


def test_no_reward_is_told_from_a_reward_of_zero() -> None:
    def with_reward(reward: float | None) -> RolloutGroup:
        empty: Any = np.zeros(0, np.int32)
        rollout = Rollout(
            token_ids=empty, logprobs=empty.astype(np.float32), versions=empty,
            loss_mask=empty.astype(bool), finish_reason="stop", reward=reward,
        )  # fmt: skip
        return RolloutGroup(
            id=GroupId(0, 0), attempt=0, source="", prompt_ids=empty, temperature=1.0, inc=1,
            rollouts=(rollout,),
        )  # fmt: skip

    assert decode_group(encode_group(with_reward(None))).rewards == [None]
    assert decode_group(encode_group(with_reward(0.0))).rewards == [0.0]
    with pytest.raises(WireError, match="finite number"):
        decode_group(encode_group(with_reward(math.nan)))


@given(groups, st.data())
def test_a_group_cut_short_is_refused(group: RolloutGroup, data: st.DataObject) -> None:
    frame = encode_group(group)
    with pytest.raises(WireError):
        decode_group(frame[: data.draw(st.integers(0, len(frame) - 1))])
    with pytest.raises(WireError):
        decode_group(frame + b"\x00")


@given(groups, st.data())
def test_a_group_with_changed_bytes_is_decoded_or_refused(
    group: RolloutGroup, data: st.DataObject
) -> None:
    frame = bytearray(encode_group(group))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode_group(bytes(frame))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_group_or_refused(frame: bytes) -> None:
    with suppress(WireError):
        decode_group(frame)


HEADER: dict[str, Any] = {
    "group": [0, 1], "attempt": 0, "source": "", "temperature": 1.0, "inc": 1, "prompt": 0,
    "lengths": [1], "finish": [0], "rewards": [1.0], "parts": [{}],
}  # fmt: skip
JUNK: list[Any] = [
    None, -1, 2**63, 2**64 - 1, math.nan, math.inf, True, "1", b"x", [], {}, [None], ["a"], [-1],
    [2**40], [[1]], [{"a": None}], [{"a": "x"}], [{"a": math.nan}], [9], [True], [1, 2, 3],
    [math.inf], [0, -1], [0, 2**63],
]  # fmt: skip


@pytest.mark.parametrize("key", HEADER)
def test_a_group_with_junk_in_its_header_is_refused(key: str) -> None:
    def frame(header: dict[str, Any]) -> bytes:
        packed = msgpack.packb(header)
        return struct.pack("<I", len(packed)) + packed + bytes(13)

    assert decode_group(frame(HEADER)).id == GroupId(0, 1)
    fits: dict[str, list[Any]] = {
        "source": ["1"],
        "temperature": [2**63, 2**64 - 1],
        "rewards": [[None], [-1], [2**40], [9]],
    }
    for junk in JUNK:
        if junk not in fits.get(key, []):
            with pytest.raises(WireError):
                decode_group(frame(HEADER | {key: junk}))
    with pytest.raises(WireError):
        decode_group(frame({name: value for name, value in HEADER.items() if name != key}))
