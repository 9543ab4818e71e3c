"""The learner's line to the buffer: registers, fetches ahead, commits, announces.

Every rank has one and calls it alike. The lead's alone is connected; what the buffer answers it
passes on to the others as bytes, so that all ranks decide alike.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from asyncrl.client import RefusedError, Unreachable
from asyncrl.heartbeat import HeartbeatThread
from asyncrl.messages import (
    Batch,
    Checkpointed,
    Commit,
    End,
    Fetch,
    Heartbeat,
    Message,
    Published,
    Record,
    Register,
    Registered,
    Waiting,
)
from asyncrl.thread_client import ThreadClient
from asyncrl.types import WeightId
from asyncrl.wire import Frame, Packet, decode, encode, view
from learner.joining import Connection, leave
from learner.ranks import Ranks

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long a request may go unanswered once the buffer has said that the run has ended, when it is
free to leave."""


class RunIsOver(Exception):
    """The run ended, or was stopped, before this learner took over; the message says so."""


class BufferLine:
    """Requests to the buffer. On the lead, methods raise Unreachable (after `patience_s`, within
    which a buffer may restart) or RefusedError."""

    is_recorded = False

    def __init__(self, connection: Connection | None, *, ranks: Ranks, patience_s: float) -> None:
        """`connection` is what `join` returned on the lead, and None on the other ranks."""
        self._ranks = ranks
        self._client = connection.client if connection else None
        self._signs = connection.signs if connection else None
        self._patience_s = patience_s
        self._replies: queue.SimpleQueue[Packet | BaseException] = queue.SimpleQueue()
        self._inc = 0
        self._is_stopping = False
        self._is_asked = threading.Event()
        """A Waiting has asked for a checkpoint since the buffer heard of the last one."""
        self._is_closed = False
        self.address = connection.client.address if connection else ""
        """Of the buffer, on the lead."""
        self._end: Future[None] = Future()
        """Done as soon as the buffer has said End, even if the loop has yet to read it."""

    def give_signs_of_life(self, look: Callable[[], Heartbeat]) -> None:
        """From now on the signs of life are what `look` returns."""
        if self._signs is not None:
            self._signs.look = look

    def register(self, *, checkpoint_version: int, config_digest: str) -> Registered:
        """Takes over the run from a checkpoint (0: from its beginning). ValueError when the buffer
        cannot go on from there; RunIsOver, on all ranks, when it has said so and left."""
        message = Register(checkpoint_version=checkpoint_version, config_digest=config_digest)
        packet = None
        if self._client is not None and self._signs is not None:
            packet = self._register(self._client, self._signs, message)
        answer = share(packet, self._ranks).message
        if isinstance(answer, End):
            raise RunIsOver(answer.reason)
        registered: Registered = answer
        self._inc = registered.inc
        return registered

    def _register(self, client: ThreadClient, signs: HeartbeatThread, message: Register) -> Packet:
        """The buffer's answer; an End when it has left after the end of the run."""
        patience_s = FAREWELL_S if signs.is_done else self._patience_s
        try:
            return client.call(message, deadline_s=patience_s)
        except RefusedError as error:
            if error.code != "invalid":
                raise
            raise ValueError(str(error)) from None
        except Unreachable:
            if not signs.is_done:
                raise
            reason = "the run was over before this learner had loaded its model"
            return Packet(0, End(reason=reason, records=[]), ())

    def fetch(self, step: int) -> None:
        """Asks for the batch of `step` in the background, until there is one or the run ends."""
        if self._client is not None:
            self._ask(self._client, Fetch(inc=self._inc, step=step))

    def next_reply(self, *, give_up: str = "") -> Packet:
        """The next answer to `fetch`: any number of Waiting, then one Batch or End.

        Of answers that came meanwhile the newest is returned, with the records of all. With a
        reason to `give_up` on the lead it is an End that says so, on all ranks.
        """
        if self._client is None:
            return share(None, self._ranks)
        if give_up:
            return share(failed_end(give_up), self._ranks)
        return share(self._newest(self._client), self._ranks)

    def commit(self, version: int, metrics: dict[str, float]) -> bool:
        """Says that the weights are now `version`; whether the buffer asks for a checkpoint of it,
        the same on all ranks. When the buffer answers that the run is being stopped, a batch that
        was fetched ahead is given up for the End."""
        packet = self.tell(Commit(inc=self._inc, version=version, metrics=metrics))
        self._is_stopping = packet is not None and packet.message.stop
        is_asked = packet is not None and packet.message.checkpoint
        return bool(self._ranks.broadcast([b"checkpoint"] if is_asked else []))

    def announce(self, weights: WeightId, location: Path, digest: str) -> None:
        """Says that weights lie at `location`; the buffer passes it on to the generators."""
        self.tell(
            Published(
                inc=weights.inc,
                version=weights.version,
                transport="disk",
                location=str(location),
                digest=digest,
            )
        )

    def checkpointed(self, versions: list[int]) -> None:
        """Says which checkpoints there are. What was asked before the answer is met by them."""
        self.tell(Checkpointed(inc=self._inc, versions=versions))
        self._is_asked.clear()

    def close(self, reason: str) -> None:
        """Says that this learner's work is done, and hangs up. Safe to call twice."""
        if self._client is None or self._is_closed:
            return
        self._is_closed = True
        if self._signs is not None:
            self._signs.close()
        leave(self._client, reason, is_done=True)
        self._client.close()

    def ask(self, message: Message) -> Future[Packet]:
        """Sends a request on the lead; the answer comes later."""
        assert self._client is not None
        return self._client.call_soon(message, deadline_s=self._patience_s)

    def tell(self, message: Message, frames: tuple[Frame, ...] = ()) -> Packet | None:
        """Sends and waits for the answer; once the run has ended, only for as long as a farewell
        is worth: the buffer may have left (None)."""
        if self._client is None:
            return None
        reply = self._client.call_soon(message, frames=frames, deadline_s=self._patience_s)
        either: list[Future[Any]] = [reply, self._end]
        wait(either, return_when=FIRST_COMPLETED)
        if not reply.done():
            wait([reply], timeout=FAREWELL_S)
        if reply.done() or not self._end.done():
            return reply.result()
        reply.cancel()
        log.info("the buffer has left before it heard of %s", type(message).__name__)
        return None

    def _ask(self, client: ThreadClient, fetch: Fetch) -> None:
        """Sends a Fetch whose answer lands in the queue; after a Waiting, sends it again."""

        def on_reply(reply: Future[Packet]) -> None:
            error = reply.exception()
            if error is not None:
                self._replies.put(error)
                return
            packet = reply.result()
            if isinstance(packet.message, End) and not self._end.done():
                self._end.set_result(None)
            if isinstance(packet.message, Waiting) and packet.message.checkpoint:
                self._is_asked.set()
            self._replies.put(packet)
            if isinstance(packet.message, Waiting) and not self._is_closed:
                self._ask(client, fetch)

        client.call_soon(fetch, deadline_s=self._patience_s).add_done_callback(on_reply)

    def _newest(self, client: ThreadClient) -> Packet:
        records: list[Record] = []
        while True:
            reply = self._replies.get()
            if isinstance(reply, BaseException):
                raise reply
            records += reply.message.records
            if self._is_stopping and isinstance(reply.message, Batch):
                self._is_stopping = False
                self._ask(client, Fetch(inc=self._inc, step=reply.message.step))
                continue
            if self._replies.empty() or not isinstance(reply.message, Waiting):
                update: dict[str, Any] = {"records": records}
                if isinstance(reply.message, Waiting):
                    update["checkpoint"] = self._is_asked.is_set()
                message = reply.message.model_copy(update=update)
                return Packet(reply.id, message, reply.frames)


def share(packet: Packet | None, ranks: Ranks) -> Packet:
    """The lead's packet, on every rank; the others pass None."""
    parts = encode(packet.message, frames=packet.frames) if packet is not None else []
    return decode(ranks.broadcast([view(part) for part in parts]))


def failed_end(reason: str) -> Packet:
    """What a line says when the run cannot go on."""
    return Packet(0, End(reason=reason, failed=True, records=[]))
