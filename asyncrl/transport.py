"""Request and reply over ZeroMQ: DEALER clients, one ROUTER server, all on asyncio.

Requests may be resent (the buffer treats every one as idempotent), so a client survives a server
that dies and comes back on its port: what waits is sent again as soon as it is back. Sockets never
linger.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from asyncrl.handshake import mismatches, refusal
from asyncrl.log_limits import Seldom, cut
from asyncrl.messages import PROTOCOL, Hello, Message, Refused, Welcome
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

RESEND_S = 10.0
"""A request without reply is sent again after this time. Longer than any wait of the server."""
MAX_WAIT_S = 5.0
"""The longest that the server keeps a waiting request (LeaseRequest, Fetch, WatchWeights)."""
PING_S = 5.0
"""A connection on which three pings in a row find no answer is made anew: a link that was cut may
never say so."""
STANDSTILL_S = 1.0
"""A wait that takes this much too long says that this process stood still."""
READ_AT_ONCE = 64
"""Messages that the server reads before it goes on with those it has."""
MAX_UNREAD = 64
"""Messages of one peer that wait in the server's socket; more wait in the network and there."""
MAX_HELD_BYTES = 1 << 30
"""The server reads no further while requests that it has not answered hold more than this."""


class Unreachable(ConnectionError):
    """No reply within the deadline. The message names address, request and time."""


class RefusedError(RuntimeError):
    """The server refused a request; `code` is that of messages.Refused."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.reason)
        self.code = refused.code

    @property
    def is_misfit(self) -> bool:
        """This side is of another run, protocol or configuration: the user's to mend."""
        return self.code in ("wrong_run", "protocol", "mismatch")


class _Deadline:
    """How long a request may still go unanswered, the time aside in which this process stood still
    (SIGSTOP): that does not count against the buffer."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def waited(self, seconds: float, *, at_most_s: float) -> None:
        """A wait that was to end after `at_most_s` has taken so long."""
        if seconds > at_most_s + STANDSTILL_S:
            self._ends += seconds


class Client:
    """One connection to the buffer, for use on one event loop.

    Nothing is queued for a buffer that is not there. As soon as it is there (again), all requests
    that wait are sent. It must then be the same run, with the same settings, as at first.
    """

    def __init__(self, address: str, *, hello: Hello) -> None:
        self.address = address
        self.hello = hello
        """After the first welcome it names the run."""
        self.welcome: Welcome | None = None
        """The last one."""
        self.on_line: Callable[[bool], None] = lambda is_up: None
        """Called on the event loop when the buffer is there (again), and when it no longer is."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Packet]] = {}
        self._ignored = Seldom(log)
        # One context for all clients: a client that nobody closes would hang in its own one's end.
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * PING_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3000 * PING_S))
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events)
        self._monitor.linger = 0
        self._socket.connect(address)
        self._connected: asyncio.Future[None] = asyncio.Future()
        """Done, and replaced by a new one, at each connection to the buffer."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def connect(self, *, deadline_s: float) -> Welcome:
        """Says hello and returns the welcome.

        Raises Unreachable, or RefusedError: also when this side does not agree with the settings
        of the buffer (code "mismatch").
        """
        return await self._greet(_Deadline(deadline_s))

    async def call(
        self, message: Message, *, frames: tuple[Frame, ...] = (), deadline_s: float
    ) -> Packet:
        """Sends one request and waits for its reply.

        Resends while no reply comes, and says hello again to a buffer that has restarted. Raises
        Unreachable after `deadline_s`, RefusedError when the buffer refuses.
        """
        deadline = _Deadline(deadline_s)
        while True:
            packet = await self._exchange(message, frames, deadline)
            if not isinstance(packet.message, Refused):
                return packet
            if packet.message.code != "hello_first":
                raise RefusedError(packet.message)
            await self._greet(deadline)

    async def send(self, message: Message) -> None:
        """Sends one message that is not answered; it is lost when the buffer is not there."""
        await self._send(encode(message))

    async def close(self) -> None:
        """Calls that wait end with Unreachable."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(Unreachable(f"the connection to {self.address} was closed"))
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    async def _greet(self, deadline: _Deadline) -> Welcome:
        packet = await self._exchange(self.hello, (), deadline)
        if isinstance(packet.message, Refused):
            raise RefusedError(packet.message)
        welcome: Welcome = packet.message
        if lines := mismatches(self.hello.role, self.hello.settings, welcome.settings):
            raise RefusedError(Refused(code="mismatch", reason=refusal(self.hello.member, lines)))
        self.hello = self.hello.model_copy(update={"run_id": welcome.run_id})
        self.welcome = welcome
        return welcome

    async def _exchange(
        self, message: Message, frames: tuple[Frame, ...], deadline: _Deadline
    ) -> Packet:
        id = next(self._ids)
        reply: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._waiting[id] = reply
        try:
            while (left_s := deadline.left_s()) > 0:
                began, patience_s = time.monotonic(), min(RESEND_S, left_s)
                again: list[asyncio.Future[Any]] = [reply, self._connected]
                await self._send(encode(message, id=id, frames=frames))
                await asyncio.wait(again, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                deadline.waited(time.monotonic() - began, at_most_s=patience_s)
                if reply.done():
                    return reply.result()
        finally:
            del self._waiting[id]
        raise Unreachable(
            f"no answer from the buffer at {self.address} to {type(message).__name__} within "
            f"{deadline.seconds:g} s: is it running, and is network.buffer its address?"
        )

    async def _send(self, parts: list[Frame]) -> None:
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
            await self._socket.send_multipart(parts)

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            is_up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.on_line(is_up)
            if is_up:
                self._connected.set_result(None)
                self._connected = asyncio.Future()

    async def _read(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                packet = decode(parts)
            except WireError as error:
                self._ignored.warning(f"a reply from {self.address} was ignored: {error}")
                continue
            reply = self._waiting.get(packet.id)
            if reply is not None and not reply.done():
                reply.set_result(packet)


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
