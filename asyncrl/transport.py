"""The answering side of all connections: a ZeroMQ ROUTER on asyncio. Sockets never linger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import zmq

from asyncrl.log_limits import Seldom, cut
from asyncrl.messages import PROTOCOL, Message, Refused
from asyncrl.wire import (
    MAX_FRAME_BYTES,
    Frame,
    OtherProtocol,
    Packet,
    WireError,
    decode,
    encode,
)

log = logging.getLogger(__name__)

MAX_WAIT_S = 5.0
"""The longest that the server keeps a waiting request (LeaseRequest, Fetch, WatchWeights)."""
READ_AT_ONCE = 64
"""Messages that the server reads before it goes on with those it has."""
MAX_UNREAD = 64
"""Messages of one peer that wait in the server's socket; more wait in the network and there."""
MAX_HELD_BYTES = 1 << 30
"""The server reads no further while requests that it has not answered hold more than this."""


Reply = Message | tuple[Message, tuple[Frame, ...]] | None
Handler = Callable[[bytes, Packet], Awaitable[Reply]]


class Server:
    """The ROUTER side: every request becomes a task, so one that waits holds up no other.

    Frames are neither copied when they come nor when they are sent on.
    """

    def __init__(self, address: str, handler: Handler) -> None:
        """`handler(peer, packet)` returns the reply, or None for a message without one.

        Raises ValueError, naming the address, when it cannot be bound.
        """
        self._handler = handler
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: set[tuple[bytes, int]] = set()
        """Peer and number of each request that is being answered."""
        self._held_bytes = 0
        """Of the frames that came with them."""
        self._full_since: float | None = None
        self._unread_s = 0.0
        self._is_reading_soon = False
        self._refused, self._unanswered = Seldom(log), Seldom(log)
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

    def take_unread_s(self) -> float:
        """Seconds, since the last call, in which nothing was read for MAX_HELD_BYTES: nobody could
        be heard."""
        self._note_full(self._full_since is not None)
        unread_s, self._unread_s = self._unread_s, 0.0
        return unread_s

    async def serve(self) -> None:
        """Reads for ever; cancel it to stop."""
        loop, fd = asyncio.get_running_loop(), int(self._socket.get(zmq.FD))
        self._broken: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, self._read)
        self._read_soon()
        try:
            await self._broken
        finally:
            loop.remove_reader(fd)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def _read(self) -> None:
        """Reads what has come, then lets others have their turn. ZeroMQ's file says only once that
        something has: it must be read to its end, and looked at again after each sending."""
        self._is_reading_soon = False
        if self._broken.done():
            return
        try:
            for _ in range(READ_AT_ONCE):
                if self._held_bytes > MAX_HELD_BYTES:
                    self._note_full(True)
                    return
                self._received(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return
        except Exception as error:
            self._broken.set_exception(error)
        self._read_soon()

    def _read_soon(self) -> None:
        if not self._is_reading_soon:
            self._is_reading_soon = True
            asyncio.get_running_loop().call_soon(self._read)

    def _received(self, parts: list[zmq.Frame]) -> None:
        peer, header, *frames = parts
        try:
            packet = decode([header.bytes, *frames])
        except WireError as error:
            self.num_refused += 1
            self._refused.warning(f"a message from {_name(peer.bytes)} was refused: {error}")
            if isinstance(error, OtherProtocol):
                self._send(peer.bytes, _refusal(error))
            return
        asked = peer.bytes, packet.id
        if asked in self._asked:  # sent again: it will have its reply
            return
        if packet.id:
            self._asked.add(asked)
        num_bytes = sum(len(frame) for frame in frames)
        self._held_bytes += num_bytes
        task = asyncio.create_task(self._answer(peer.bytes, packet))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._answered(task, asked, num_bytes))

    def _answered(self, task: asyncio.Task[None], asked: tuple[bytes, int], num_bytes: int) -> None:
        self._tasks.discard(task)
        self._asked.discard(asked)
        self._held_bytes -= num_bytes
        if self._full_since is not None and self._held_bytes <= MAX_HELD_BYTES:
            self._note_full(False)
            self._read_soon()

    def _note_full(self, is_full: bool) -> None:
        now = time.monotonic()
        if self._full_since is not None:
            self._unread_s += now - self._full_since
        self._full_since = now if is_full else None

    async def _answer(self, peer: bytes, packet: Packet) -> None:
        try:
            reply = await self._handler(peer, packet)
        except WireError as error:
            self.num_refused += 1
            self._refused.warning(f"a message from {_name(peer)} was refused: {error}")
            reply = Refused(code="invalid", reason=str(error))
        if reply is None or packet.id == 0:
            return
        message, frames = reply if isinstance(reply, tuple) else (reply, ())
        try:
            parts = encode(message, id=packet.id, frames=frames)
        except ValueError as error:
            what = f"a {packet.message.type} from {_name(peer)}"
            self._unanswered.warning(f"{what} cannot be answered: {error}")
            parts = encode(Refused(code="invalid", reason=str(error)), id=packet.id)
        self._send(peer, parts)

    def _send(self, peer: bytes, parts: list[Frame]) -> None:
        """Never waits: what a peer does not take is dropped, and asked for again."""
        self._socket.send_multipart([peer, *parts], zmq.NOBLOCK, copy=False)
        self._read_soon()


def _name(peer: bytes) -> str:
    """ZeroMQ's identity of a connection, for people: a peer may choose 255 bytes."""
    return cut(peer.hex(), 40)


def _refusal(error: OtherProtocol) -> list[Frame]:
    """For a peer that reads another protocol only."""
    reason = f"this program speaks protocol {error.protocol}, the buffer {PROTOCOL}"
    refused = Refused(code="protocol", reason=f"{reason}: use the same version of asyncrl")
    return encode(refused, id=error.id, protocol=error.protocol)
