"""The asking side of a connection to the buffer: a ZeroMQ DEALER on asyncio.

Requests may be resent (the buffer treats every one as idempotent), so a client survives a server
that dies and comes back on its port: what waits is sent again as soon as it is back. Sockets never
linger.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from asyncrl.handshake import mismatches, refusal
from asyncrl.log_limits import Seldom
from asyncrl.messages import Hello, Message, Refused, Welcome
from asyncrl.wire import MAX_FRAME_BYTES, Frame, Packet, WireError, decode, encode

log = logging.getLogger(__name__)

RESEND_S = 10.0
"""A request without reply is sent again after this time. Longer than any wait of the server."""
PING_S = 5.0
"""A connection on which three pings in a row find no answer is made anew: a link that was cut may
never say so."""
STANDSTILL_S = 1.0
"""A wait that takes this much too long says that this process stood still."""


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
