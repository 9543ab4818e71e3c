"""Request and reply over ZeroMQ: DEALER clients, one ROUTER server, all on asyncio.

Requests may be resent (the buffer treats every one as idempotent), so a client survives a server
that dies and comes back on its port: it resends until its deadline. Sockets never linger.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import zmq
import zmq.asyncio

from asyncrl.messages import Hello, Message, Refused, Welcome
from asyncrl.wire import MAX_FRAME_BYTES, Packet, WireError, decode, encode

log = logging.getLogger(__name__)

RESEND_S = 10.0
"""A request without reply is sent again after this time. Longer than any wait of the server."""
MAX_WAIT_S = 5.0
"""The longest that the server keeps a waiting request (LeaseRequest, Fetch, WatchWeights)."""


class Unreachable(ConnectionError):
    """No reply within the deadline. The message names address, request and time."""


class RefusedError(RuntimeError):
    """The server refused a request; `code` is that of messages.Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.code = refused.code


class Client:
    """One connection to the buffer, for use on one event loop."""

    def __init__(self, address: str, *, hello: Hello) -> None:
        self.address = address
        self._hello = hello
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.connect(address)
        self._reader: asyncio.Task[None] | None = None

    async def connect(self, *, deadline_s: float) -> Welcome:
        """Says hello and returns the welcome. Raises Unreachable or RefusedError."""
        packet = await self.call(self._hello, deadline_s=deadline_s)
        return packet.message

    async def call(
        self, message: Message, *, frames: tuple[bytes, ...] = (), deadline_s: float
    ) -> Packet:
        """Sends one request and waits for its reply.

        Resends while no reply comes, and says hello again to a buffer that has restarted. Raises
        Unreachable after `deadline_s`, RefusedError when the buffer refuses.
        """
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        ends = time.monotonic() + deadline_s
        while True:
            packet = await self._exchange(message, frames, ends, deadline_s)
            if not isinstance(packet.message, Refused):
                return packet
            if packet.message.code != "hello_first" or isinstance(message, Hello):
                raise RefusedError(packet.message)
            await self.connect(deadline_s=max(0.1, ends - time.monotonic()))

    async def send(self, message: Message) -> None:
        """Sends one message that is not answered."""
        await self._socket.send_multipart(encode(message))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _exchange(
        self, message: Message, frames: tuple[bytes, ...], ends: float, deadline_s: float
    ) -> Packet:
        id = next(self._ids)
        reply: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._waiting[id] = reply
        try:
            while True:
                left = ends - time.monotonic()
                if left <= 0:
                    raise Unreachable(
                        f"no answer from the buffer at {self.address} to "
                        f"{type(message).__name__} within {deadline_s:g} s: is it running, and "
                        "is network.buffer its address?"
                    )
                await self._socket.send_multipart(encode(message, id=id, frames=frames))
                done, _ = await asyncio.wait([reply], timeout=min(RESEND_S, left))
                if done:
                    return reply.result()
        finally:
            del self._waiting[id]

    async def _read(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                packet = decode(parts)
            except WireError as error:
                log.warning("a reply from %s was ignored: %s", self.address, error)
                continue
            reply = self._waiting.get(packet.id)
            if reply is not None and not reply.done():
                reply.set_result(packet)


class ThreadClient:
    """A Client on an event loop in a thread of its own, for callers that are not asyncio."""

    def __init__(self, address: str, *, hello: Hello) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"wire-{hello.member}", daemon=True
        )
        self._thread.start()
        self._client: Client = self._run(self._make(address, hello)).result()

    def connect(self, *, deadline_s: float) -> Welcome:
        return self._run(self._client.connect(deadline_s=deadline_s)).result()

    def call(
        self, message: Message, *, frames: tuple[bytes, ...] = (), deadline_s: float
    ) -> Packet:
        return self.call_soon(message, frames=frames, deadline_s=deadline_s).result()

    def call_soon(
        self, message: Message, *, frames: tuple[bytes, ...] = (), deadline_s: float
    ) -> Future[Packet]:
        """As `call`, but returns a future at once (prefetch)."""
        return self._run(self._client.call(message, frames=frames, deadline_s=deadline_s))

    def close(self) -> None:
        self._run(self._client.close()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _run(self, coroutine: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @staticmethod
    async def _make(address: str, hello: Hello) -> Client:
        return Client(address, hello=hello)


Reply = Message | tuple[Message, tuple[bytes, ...]] | None
Handler = Callable[[bytes, Packet], Awaitable[Reply]]


class Server:
    """The ROUTER side: every request becomes a task, so one that waits holds up no other."""

    def __init__(self, address: str, handler: Handler) -> None:
        """`handler(peer, packet)` returns the reply, or None for a message without one.

        Raises ValueError, naming the address, when it cannot be bound.
        """
        self._handler = handler
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_refused = 0
        """Messages that were not of this protocol, since the server began."""
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ValueError(
                f"cannot listen on {address}: {error}. Is another run using this port? "
                "Set network.buffer to a free one."
            ) from None
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def serve(self) -> None:
        """Reads for ever; cancel it to stop."""
        while True:
            peer, *parts = await self._socket.recv_multipart()
            try:
                packet = decode(parts)
            except WireError as error:
                self.num_refused += 1
                log.warning("a message from %s was refused: %s", peer.hex(), error)
                continue
            task = asyncio.create_task(self._answer(peer, packet))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _answer(self, peer: bytes, packet: Packet) -> None:
        try:
            reply = await self._handler(peer, packet)
        except WireError as error:
            self.num_refused += 1
            reply = Refused(code="invalid", reason=str(error))
        if reply is None or packet.id == 0:
            return
        message, frames = reply if isinstance(reply, tuple) else (reply, ())
        try:
            parts = encode(message, id=packet.id, frames=frames)
        except ValueError as error:
            log.error("a %s from %s cannot be answered: %s", packet.message.type, peer.hex(), error)
            parts = encode(Refused(code="invalid", reason=str(error)), id=packet.id)
        await self._socket.send_multipart([peer, *parts])
