"""The buffer on the network: who may ask what, which requests wait, and when it leaves.

Each request is a task. A request that waits (for a lease, a batch, newer weights) sleeps until
something changes, transport.MAX_WAIT_S at most. Whatever a reply tells is in the journal first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from asyncrl import transport
from asyncrl.handshake import mismatches, refusal
from asyncrl.messages import (
    PROTOCOL,
    Hello,
    Message,
    Refused,
    Settings,
    Status,
    StatusRequest,
    Welcome,
)
from asyncrl.wire import Packet
from buffer.changes import Changes, Handler, wait_for
from buffer.generator_requests import GeneratorRequests
from buffer.learner_requests import LearnerRequests
from buffer.member_requests import MemberRequests
from buffer.run import Run

log = logging.getLogger(__name__)

LEAVE_S = 10.0
"""How long the buffer stays after the end of the run for members that have not heard of it."""
TRAINING_LEAVE_S = 60.0
"""The same for a learner that is in the middle of a step when the run fails."""
FLUSH_S = 0.3
"""How long it stays after the last of them has: replies are on their way."""
TICK_S = 0.5
"""Longest time between two looks at deadlines."""


class BufferServer:
    """Serves one run until it ends."""

    def __init__(
        self,
        run: Run,
        address: str,
        *,
        run_id: str,
        run_name: str,
        settings: Settings,
        max_wait_s: float = transport.MAX_WAIT_S,
    ) -> None:
        """`settings` are what members must agree with (asyncrl.handshake.buffer_settings).

        Raises ValueError when the address cannot be bound.
        """
        self._run = run
        self._run_id = run_id
        self._run_name = run_name
        self._settings = settings
        self._changes = Changes(run, max_wait_s=max_wait_s)
        self._stopped = asyncio.Event()
        self._fatal: Exception | None = None
        self._ended_at: float | None = None
        self._transport = transport.Server(address, self._handle)
        self.address = self._transport.address
        self._handlers: dict[str, Mapping[type[Message], Handler]] = {
            "generator": GeneratorRequests(run, self._changes).handlers,
            "learner": LearnerRequests(run, self._changes).handlers,
            "monitor": {},
        }
        self._of_any_member: Mapping[type[Message], Handler] = MemberRequests(
            run, self._changes
        ).handlers

    async def serve(self) -> int:
        """Serves until everybody knows that the run has ended, or until `stop`.

        Returns the exit code: 0, or 1 for a run that failed or was stopped before its end. Raises
        what broke the buffer.
        """
        reader = asyncio.create_task(self._transport.serve())
        try:
            await self._changes.save()
            await self._watch_deadlines()
            if not self._stopped.is_set():
                await asyncio.sleep(FLUSH_S)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._transport.close()
        if self._fatal is not None:
            raise self._fatal
        return 1 if self._run.end is None or self._run.end.failed else 0

    def stop(self) -> None:
        """`serve` returns at once."""
        self._stopped.set()

    async def _watch_deadlines(self) -> None:
        members = self._run.members
        tick_s = min(TICK_S, members.heartbeat_s / 2)
        last = time.monotonic()
        while not self._stopped.is_set() and not self._may_leave():
            now = time.monotonic()
            if now - last > tick_s + members.heartbeat_s:
                members.excuse(now=now)
            last = now
            end = self._run.end
            self._run.tick(now=now)
            self._run.advance(now=now)
            if self._run.is_changed or self._run.end is not end:
                await self._changes.save()
            await wait_for(self._stopped, tick_s)

    def _may_leave(self) -> bool:
        """The run has ended and every member that is there was told, or had the time to ask."""
        run, now = self._run, time.monotonic()
        if run.end is None:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        is_training = run.training.position < run.ledger.policy.next_step
        patience_s = TRAINING_LEAVE_S if is_training and run.training.owner else LEAVE_S
        learner = run.members.named(run.training.owner)
        told = all(member.heard_end for member in [*run.members.alive(), *learner])
        just_resumed = run.is_resumed and now - run.began_at < run.members.silence_s
        others_may_come = just_resumed or (run.training.owner and not learner)
        may_leave = told and not is_training and not others_may_come
        return may_leave or now - self._ended_at > patience_s

    async def _handle(self, peer: bytes, packet: Packet) -> transport.Reply:
        message, now = packet.message, time.monotonic()
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        member = self._run.members.of(peer, now=now)
        if member is None:
            return Refused(code="hello_first", reason="say hello first")
        if isinstance(message, StatusRequest):
            refused = {"num_refused": self._transport.num_refused}
            return Status(values=self._run.status(now=now) | refused)
        handler = self._of_any_member.get(type(message)) or self._handlers[member.role].get(
            type(message)
        )
        if handler is None:
            return Refused(
                code="invalid",
                reason=f"{member.name}, a {member.role}, cannot ask for {message.type}",
            )
        try:
            return await handler(member, packet, message)
        except Exception as error:  # a broken invariant or journal ends the buffer, not one request
            self._fatal = self._fatal or error
            self.stop()
            return Refused(code="stopping", reason=f"the buffer has failed: {error}")

    def _hello(self, peer: bytes, hello: Hello, now: float) -> Message:
        if hello.protocol != PROTOCOL:
            reason = f"{hello.member} speaks protocol {hello.protocol}, the buffer {PROTOCOL}"
            return Refused(code="protocol", reason=f"{reason}: use the same version of asyncrl")
        if hello.run_id not in (None, self._run_id):
            reason = f"{hello.member} is of run {hello.run_id}, this buffer serves {self._run_id}"
            return Refused(code="wrong_run", reason=f"{reason}: is network.buffer right?")
        if lines := mismatches(hello.settings, self._settings):
            return Refused(code="mismatch", reason=refusal(hello.member, lines))
        known = self._run.members.by_name.get(hello.member)
        if known is not None and known.role != hello.role:
            reason = f"{hello.member} is a {known.role} of this run, not a {hello.role}"
            return Refused(code="invalid", reason=reason)
        if hello.member not in self._run.members.by_name and hello.role != "monitor":
            log.info("%s (pid %d on %s) has joined", hello.member, hello.pid, hello.host)
        self._run.members.hello(peer, hello, now=now)
        return Welcome(
            run_id=self._run_id,
            run_name=self._run_name,
            heartbeat_s=self._run.members.heartbeat_s,
            settings=self._settings,
        )
