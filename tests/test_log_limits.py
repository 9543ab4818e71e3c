"""What others say is logged seldom and cut: a log is not to be filled from outside."""

from __future__ import annotations

import asyncio
import logging

import pytest
import zmq
import zmq.asyncio

from asyncrl import log_limits
from asyncrl.handshake import mismatches
from asyncrl.log_limits import MAX_TEXT, Seldom, cut
from asyncrl.messages import Failed, Hello, Leave
from asyncrl.transport import Server
from asyncrl.wire import decode, encode


def test_a_long_text_keeps_its_ends_and_says_how_long_it_was() -> None:
    text = "begin" + "x" * 100_000 + "the cause"
    short = cut(text)
    assert len(short) == MAX_TEXT
    assert short.startswith("beginx")
    assert short.endswith("xthe cause")
    assert f"({len(text)} characters)" in short
    assert cut("short") == "short"


def test_the_first_warning_is_told_at_once_and_the_rest_by_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(log_limits.time, "monotonic", lambda: now[0])
    seldom = Seldom(logging.getLogger("outside"))
    for second in range(21):
        now[0] = float(second)
        seldom.warning(f"at {second}")
    assert caplog.messages == [
        "at 0",
        "at 10 (9 more like it before)",
        "at 20 (9 more like it before)",
    ]


def test_reasons_of_any_length_reach_nobody_whole() -> None:
    long = "x" * 100_000
    failed = Failed(kind="train", group=[0, 0], attempt=0, reason=long, content=True)
    raw = failed.model_construct(**{**failed.model_dump(), "reason": long})
    assert len(decode(encode(raw)).message.reason) == MAX_TEXT
    assert len(failed.reason) == len(Leave(reason=long).reason) == MAX_TEXT


def test_a_name_over_255_characters_is_no_name() -> None:
    with pytest.raises(ValueError, match="255"):
        Hello(role="learner", member="x" * 256, run_id=None, host="h", pid=1)


def test_a_refusal_shows_values_as_long_as_they_can_be_read() -> None:
    [line] = mismatches("learner", {"seed": "x" * 100_000}, {"seed": "y" * 100_000})
    assert len(line) < 1000


def test_rubbish_in_any_number_makes_one_short_line_of_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def flood() -> int:
        async def nobody(peer: bytes, packet: object) -> None:
            raise AssertionError("no rubbish gets here")

        server = Server("tcp://127.0.0.1:0", nobody)
        reading = asyncio.create_task(server.serve())
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IDENTITY, b"i" * 255)
        socket.connect(server.address)
        for number in range(500):
            await socket.send_multipart([b"rubbish %d" % number])
        while server.num_refused < 500:
            await asyncio.sleep(0.01)
        socket.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await server.close()
        return server.num_refused

    assert asyncio.run(flood()) == 500
    [line] = [text for text in caplog.messages if "was refused" in text]
    assert len(line) < 300
