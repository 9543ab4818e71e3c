"""Request and reply over real sockets: nothing lost, nothing waits for ever, errors are clear."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import zmq

from asyncrl.client import RESEND_S, Client, RefusedError, Unreachable
from asyncrl.messages import (
    Fetch,
    Hello,
    Ok,
    Refused,
    Started,
    Status,
    StatusRequest,
    Submit,
    Verdict,
    Waiting,
    Welcome,
)
from asyncrl.thread_client import ThreadClient
from asyncrl.transport import Handler, Server
from asyncrl.wire import MAX_HEADER_BYTES, Packet

HELLO = Hello(role="monitor", member="monitor-1", run_id=None, host="here", pid=1)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, timeout=30))


async def answer(peer: bytes, packet: Packet) -> Any:
    """Greets, waits 0.3 s for a Fetch, and sends the frames of a Submit back."""
    match packet.message:
        case Hello():
            return Welcome(run_id="r", run_name="run", heartbeat_s=1.0, settings={})
        case Fetch(step=step):
            await asyncio.sleep(0.3)
            return Waiting(step=step, reason="nothing yet", records=[])
        case Submit():
            return Verdict(verdict="accepted"), packet.frames
        case StatusRequest():
            return Status(values={})
    return Ok()


class Serving:
    """A server with its reading task, for `async with`."""

    def __init__(self, handler: Handler = answer, address: str = "tcp://127.0.0.1:0") -> None:
        self.server = Server(address, handler)
        self.address = self.server.address

    async def __aenter__(self) -> Serving:
        self._task = asyncio.create_task(self.server.serve())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.server.close()


def test_a_request_and_its_frames_come_back() -> None:
    async def main() -> None:
        async with Serving() as serving:
            client = Client(serving.address, hello=HELLO)
            assert (await client.connect(deadline_s=5)).run_id == "r"
            submit = Submit(kind="train", group=[0, 1], attempt=0)
            reply = await client.call(submit, frames=(b"x" * 1_000_000, b""), deadline_s=5)
            assert reply.message == Verdict(verdict="accepted")
            assert reply.frames == (b"x" * 1_000_000, b"")
            await client.close()

    run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_every_way_to_write_loopback_connects(host: str) -> None:
    async def main() -> None:
        async with Serving(address=f"tcp://{host}:0") as serving:
            port = serving.address.rpartition(":")[2]
            assert serving.address in (f"tcp://{host}:{port}", f"tcp://127.0.0.1:{port}")
            client = Client(f"tcp://{host}:{port}", hello=HELLO)
            await client.connect(deadline_s=5)
            await client.close()

    run(main())


def test_a_request_that_waits_holds_up_no_other() -> None:
    async def main() -> None:
        async with Serving() as serving:
            client = Client(serving.address, hello=HELLO)
            slow = asyncio.create_task(client.call(Fetch(inc=1, step=0), deadline_s=5))
            await client.call(StatusRequest(), deadline_s=5)
            assert not slow.done()
            assert (await slow).message.reason == "nothing yet"
            await client.close()

    run(main())


def test_requests_that_wait_are_sent_again_as_soon_as_the_server_is_back() -> None:
    arrived: set[int] = set()

    async def never(peer: bytes, packet: Packet) -> Any:
        arrived.add(packet.id)
        await asyncio.sleep(60)

    async def main() -> None:
        first = Serving(never)
        async with first:
            client = Client(first.address, hello=HELLO)
            calls = [
                asyncio.create_task(client.call(StatusRequest(), deadline_s=20)) for _ in range(3)
            ]
            while len(arrived) < 3:
                await asyncio.sleep(0.01)
        calls.append(asyncio.create_task(client.call(StatusRequest(), deadline_s=20)))
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in calls)
        async with Serving(address=first.address):
            began = time.monotonic()
            for call in calls:
                assert (await call).message == Status(values={})
            assert time.monotonic() - began < 2 < RESEND_S
        await client.close()

    run(main())


def test_after_the_first_welcome_a_client_stays_with_its_run() -> None:
    heard: list[str | None] = []

    def of_run(run_id: str) -> Handler:
        async def handle(peer: bytes, packet: Packet) -> Any:
            match packet.message:
                case Hello(run_id=wanted):
                    heard.append(wanted)
                    if wanted not in (None, run_id):
                        return Refused(code="wrong_run", reason=f"{wanted} is not {run_id}")
                    return Welcome(run_id=run_id, run_name="run", heartbeat_s=1.0, settings={})
                case _ if heard[-1] == run_id or run_id == "a":
                    return Ok()
            return Refused(code="hello_first", reason="say hello first")

        return handle

    async def main() -> None:
        first = Serving(of_run("a"))
        async with first:
            client = Client(first.address, hello=HELLO)
            await client.connect(deadline_s=5)
        async with Serving(of_run("b"), address=first.address):
            with pytest.raises(RefusedError, match="a is not b") as refused:
                await client.call(StatusRequest(), deadline_s=5)
            assert refused.value.code == "wrong_run"
        await client.close()

    run(main())
    assert heard[0] is None
    assert heard[-1] == "a"


def test_a_buffer_of_other_settings_is_refused_by_the_client_too_with_both_values() -> None:
    async def other(peer: bytes, packet: Packet) -> Any:
        return Welcome(run_id="r", run_name="run", heartbeat_s=1.0, settings={"group_size": "8"})

    async def main() -> None:
        async with Serving(other) as serving:
            hello = HELLO.model_copy(update={"settings": {"group_size": "4", "engine": "scripted"}})
            client = Client(serving.address, hello=hello)
            with pytest.raises(RefusedError, match="group_size is 4 there, .* has 8") as refused:
                await client.connect(deadline_s=5)
            assert refused.value.code == "mismatch"
            await client.close()

    run(main())


def test_a_process_that_stood_still_does_not_blame_the_buffer() -> None:
    async def slow(peer: bytes, packet: Packet) -> Any:
        await asyncio.sleep(0.3)
        return Ok()

    async def main() -> None:
        async with Serving(slow) as serving:
            client = Client(serving.address, hello=HELLO)
            call = asyncio.create_task(client.call(StatusRequest(), deadline_s=0.8))
            await asyncio.sleep(0.1)
            time.sleep(2.2)  # as after SIGSTOP and SIGCONT
            assert (await call).message == Ok()
            await client.close()

    run(main())


def test_a_process_that_stood_still_has_time_to_greet_a_buffer_that_has_forgotten_it() -> None:
    greeted: list[bytes] = []

    async def forgetful(peer: bytes, packet: Packet) -> Any:
        if isinstance(packet.message, Hello):
            await asyncio.sleep(0.3)
            greeted.append(peer)
            return Welcome(run_id="r", run_name="run", heartbeat_s=1.0, settings={})
        return Ok() if greeted else Refused(code="hello_first", reason="say hello first")

    async def main() -> None:
        async with Serving(forgetful) as serving:
            client = Client(serving.address, hello=HELLO)
            call = asyncio.create_task(client.call(StatusRequest(), deadline_s=0.8))
            await asyncio.sleep(0)  # it has been sent
            await asyncio.sleep(0)
            time.sleep(2.2)  # as after SIGSTOP and SIGCONT
            assert (await call).message == Ok()
            await client.close()

    run(main())


class Link:
    """A TCP line to `port` that can be cut: then nothing passes and nobody is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Link:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()

    def cut(self) -> None:
        """What goes over present connections is lost from now on; new ones are fine."""
        for pump in self._pumps:
            pump.cancel()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, target)))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)


def test_a_link_that_was_cut_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.client.PING_S", 0.1)

    async def main() -> None:
        async with Serving() as serving, Link(int(serving.address.rpartition(":")[2])) as link:
            client = Client(link.address, hello=HELLO)
            await client.connect(deadline_s=5)
            link.cut()
            began = time.monotonic()
            await client.call(StatusRequest(), deadline_s=8)
            assert time.monotonic() - began < 5 < RESEND_S
            await client.close()

    run(main())


def test_a_server_that_has_forgotten_the_client_is_greeted_again() -> None:
    greeted: set[bytes] = set()

    async def strict(peer: bytes, packet: Packet) -> Any:
        if isinstance(packet.message, Hello):
            greeted.add(peer)
            return Welcome(run_id="r", run_name="run", heartbeat_s=1.0, settings={})
        if peer not in greeted:
            return Refused(code="hello_first", reason="say hello first")
        return Ok()

    async def main() -> None:
        async with Serving(strict) as serving:
            client = Client(serving.address, hello=HELLO)
            await client.connect(deadline_s=5)
            greeted.clear()  # as after a restart
            assert (await client.call(StatusRequest(), deadline_s=5)).message == Ok()
            assert greeted
            await client.close()

    run(main())


def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    async def refuse(peer: bytes, packet: Packet) -> Any:
        return Refused(code="wrong_run", reason="this is run b, you are of run a")

    async def main() -> None:
        async with Serving(refuse) as serving:
            client = Client(serving.address, hello=HELLO)
            with pytest.raises(RefusedError, match="this is run b, you are of run a") as refused:
                await client.connect(deadline_s=5)
            assert refused.value.code == "wrong_run"
            await client.close()

    run(main())


def test_a_server_that_does_not_answer_is_named_when_the_deadline_is_over() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
            address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
            client = Client(address, hello=HELLO)
            began = time.monotonic()
            with pytest.raises(Unreachable, match=re.escape(f"{address} to Hello within 0.5 s")):
                await client.connect(deadline_s=0.5)
            assert 0.4 < time.monotonic() - began < 5
            await client.close()
            assert time.monotonic() - began < 8

    run(main())


def test_a_port_that_is_taken_is_named() -> None:
    async def main() -> None:
        async with Serving() as serving:
            with pytest.raises(ValueError, match=re.escape(serving.address)) as refused:
                Server(serving.address, answer)
            assert "network.buffer" in str(refused.value)

    run(main())


def test_junk_is_counted_and_the_next_request_is_served() -> None:
    async def main() -> None:
        async with Serving() as serving:
            context = zmq.Context()
            junk = context.socket(zmq.DEALER)
            junk.linger = 0
            junk.connect(serving.address)
            for parts in ([b""], [b"\xff" * 100], [b"x"] * 50):
                junk.send_multipart(parts)
            client = Client(serving.address, hello=HELLO)
            await client.connect(deadline_s=5)
            while serving.server.num_refused < 3:
                await asyncio.sleep(0.01)
            await client.call(StatusRequest(), deadline_s=5)
            await client.close()
            junk.close()
            context.term()

    run(main())


def test_a_reply_too_large_to_send_is_a_refusal_and_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def too_much(peer: bytes, packet: Packet) -> Any:
        size = MAX_HEADER_BYTES if isinstance(packet.message, StatusRequest) else 0
        return Status(values={"text": "x" * size})

    async def main() -> None:
        async with Serving(too_much) as serving:
            client = Client(serving.address, hello=HELLO)
            with pytest.raises(RefusedError, match="over the limit") as refused:
                await client.call(StatusRequest(), deadline_s=5)
            assert refused.value.code == "invalid"
            assert (await client.call(Fetch(inc=1, step=0), deadline_s=5)).message.type == "status"
            await client.close()

    run(main())
    assert "a status_request from" in caplog.text


def test_a_message_that_is_not_answered_returns_at_once_and_arrives() -> None:
    seen: list[Any] = []

    async def note(peer: bytes, packet: Packet) -> Any:
        seen.append(packet.message)
        return None if isinstance(packet.message, Started) else await answer(peer, packet)

    async def main() -> None:
        started = Started(kind="train", group=[0, 1], attempt=0, version=3)
        async with Serving(note) as serving:
            client = Client(serving.address, hello=HELLO)
            await client.connect(deadline_s=5)
            await client.send(started)
            await client.call(StatusRequest(), deadline_s=5)
            assert next(message.type for message in seen if message.type != "hello") == "started"
            await client.close()

    run(main())


def test_a_thread_client_calls_from_code_without_an_event_loop() -> None:
    async def main() -> None:
        async with Serving() as serving:
            await asyncio.to_thread(use, serving.address)

    def use(address: str) -> None:
        client = ThreadClient(address, hello=HELLO)
        client.connect(deadline_s=5)
        ahead = client.call_soon(Fetch(inc=1, step=0), deadline_s=5)
        assert client.call(StatusRequest(), deadline_s=5).message == Status(values={})
        assert not ahead.done()
        assert ahead.result(timeout=5).message.step == 0
        client.close()

    run(main())


def test_closing_ends_the_calls_that_wait_for_a_dead_server_and_the_thread() -> None:
    client = ThreadClient("tcp://127.0.0.1:9", hello=HELLO)
    waiting = client.call_soon(StatusRequest(), deadline_s=60)
    began = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began < 5
    with pytest.raises(Unreachable, match="was closed"):
        waiting.result(timeout=1)
    with pytest.raises(Unreachable, match="was closed"):
        client.call(StatusRequest(), deadline_s=5)
    assert not [thread for thread in threading.enumerate() if HELLO.member in thread.name]
