"""The learner's line to the buffer: registers, fetches ahead, commits, announces.

Every rank has one and calls it alike. The lead's alone is connected; what the buffer answers it
passes on to the others as bytes, so that all ranks decide alike.
"""

from __future__ import annotations

import logging
import queue
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from asyncrl.messages import (
    Checkpointed,
    Commit,
    End,
    Fetch,
    Hello,
    Message,
    Published,
    Register,
    Registered,
    Waiting,
)
from asyncrl.transport import ThreadClient
from asyncrl.types import WeightId
from asyncrl.wire import Packet, decode, encode
from learner.ranks import Ranks

log = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""How long a request may go unanswered (a buffer restarts, say) before the learner gives up."""
FAREWELL_S = 3.0
"""The same once the buffer has said that the run has ended, when it is free to leave."""


class BufferLine:
    """Requests to the buffer. On the lead, methods raise Unreachable or RefusedError."""

    def __init__(self, address: str, *, run_id: str | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._client = _connect(address, run_id) if ranks.is_lead else None
        self._replies: queue.SimpleQueue[Packet | BaseException] = queue.SimpleQueue()
        self._inc = 0
        self._end: Future[None] = Future()
        """Done as soon as the buffer has said End, even if the loop has yet to read it."""

    def register(self, *, checkpoint_version: int, config_digest: str) -> Registered:
        """Takes over the run from a checkpoint (0: from its beginning)."""
        message = Register(checkpoint_version=checkpoint_version, config_digest=config_digest)
        packet = self._client.call(message, deadline_s=PATIENCE_S) if self._client else None
        registered: Registered = self._share(packet).message
        self._inc = registered.inc
        return registered

    def fetch(self, step: int) -> None:
        """Asks for the batch of `step` in the background, until there is one or the run ends."""
        if self._client is not None:
            self._ask(self._client, Fetch(inc=self._inc, step=step))

    def next_reply(self) -> Packet:
        """The next answer to `fetch`: any number of Waiting, then one Batch or End.

        Of answers that came meanwhile the newest is returned, with the records of all.
        """
        return self._share(self._newest() if self._client is not None else None)

    def commit(self, version: int, metrics: dict[str, float]) -> None:
        """Says that the weights are now `version`."""
        self._tell(Commit(inc=self._inc, version=version, metrics=metrics))

    def announce(self, weights: WeightId, location: Path, digest: str) -> None:
        """Says that weights lie at `location`; the buffer passes it on to the generators."""
        self._tell(
            Published(
                inc=weights.inc, version=weights.version, location=str(location), digest=digest
            )
        )

    def checkpointed(self, versions: list[int]) -> None:
        """Says which checkpoints there are."""
        self._tell(Checkpointed(inc=self._inc, versions=versions))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _tell(self, message: Message) -> None:
        """Sends and waits for the answer; once the run has ended, only for as long as a farewell
        is worth: the buffer may have left."""
        if self._client is None:
            return
        reply = self._client.call_soon(message, deadline_s=PATIENCE_S)
        either: list[Future[Any]] = [reply, self._end]
        wait(either, return_when=FIRST_COMPLETED)
        if not reply.done():
            wait([reply], timeout=FAREWELL_S)
        if reply.done() or not self._end.done():
            reply.result()
        else:
            reply.cancel()
            log.info("the buffer has left before it heard of %s", type(message).__name__)

    def _ask(self, client: ThreadClient, fetch: Fetch) -> None:
        """Sends a Fetch whose answer lands in the queue; after a Waiting, sends it again."""

        def on_reply(reply: Future[Packet]) -> None:
            error = reply.exception()
            if error is not None:
                self._replies.put(error)
                return
            packet = reply.result()
            if isinstance(packet.message, End):
                self._end.set_result(None)
            self._replies.put(packet)
            if isinstance(packet.message, Waiting):
                self._ask(client, fetch)

        client.call_soon(fetch, deadline_s=PATIENCE_S).add_done_callback(on_reply)

    def _newest(self) -> Packet:
        records = []
        while True:
            reply = self._replies.get()
            if isinstance(reply, BaseException):
                raise reply
            records += reply.message.records
            if self._replies.empty() or not isinstance(reply.message, Waiting):
                message = reply.message.model_copy(update={"records": records})
                return Packet(reply.id, message, reply.frames)

    def _share(self, packet: Packet | None) -> Packet:
        parts = encode(packet.message, frames=packet.frames) if packet is not None else None
        return decode(self._ranks.broadcast(parts))


def _connect(address: str, run_id: str | None) -> ThreadClient:
    hello = Hello.here("learner", name="learner", run_id=run_id)
    client = ThreadClient(address, hello=hello)
    client.connect(deadline_s=PATIENCE_S)
    return client
