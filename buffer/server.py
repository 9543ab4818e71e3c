"""The buffer on the network: who may ask what, which requests wait, and when it leaves.

Each request is a task. A request that waits (for a lease, a batch, newer weights) sleeps until
something changes, transport.MAX_WAIT_S at most. Whatever a reply tells is in the journal first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from asyncrl import transport
from asyncrl.messages import (
    PROTOCOL,
    Batch,
    Beat,
    Checkpointed,
    Commit,
    End,
    Failed,
    Fetch,
    Heartbeat,
    Hello,
    LeaseRequest,
    Leases,
    Message,
    Ok,
    Published,
    Record,
    Refused,
    Register,
    Registered,
    Started,
    Status,
    StatusRequest,
    Submit,
    Waiting,
    WatchWeights,
    Weights,
    Welcome,
)
from asyncrl.types import WeightId
from asyncrl.wire import Packet
from buffer.members import Member
from buffer.records import RecordMail
from buffer.run import AssignedBatch, Run

log = logging.getLogger(__name__)

Found = TypeVar("Found")
Handler = Callable[[Member, Packet, Any], Awaitable[transport.Reply]]

LEAVE_S = 10.0
"""How long the buffer stays after the end of the run for members that have not heard of it."""
TRAINING_LEAVE_S = 60.0
"""The same for a learner that is in the middle of a step when the run fails."""
FLUSH_S = 0.3
"""How long it stays after the last of them has: replies are on their way."""
TICK_S = 0.5
"""Longest time between two looks at deadlines."""
SAY_WAITING_S = 30.0
"""A wait for a batch that lasts longer than this is said in the log, and then as often."""


class BufferServer:
    """Serves one run until it ends."""

    def __init__(
        self, run: Run, address: str, *, run_id: str, max_wait_s: float = transport.MAX_WAIT_S
    ) -> None:
        """Raises ValueError when the address cannot be bound."""
        self._run = run
        self._run_id = run_id
        self._max_wait_s = max_wait_s
        self._changed = asyncio.Event()
        self._stopped = asyncio.Event()
        self._fatal: Exception | None = None
        self._mail = RecordMail(run.evaluations)
        self._lease_replies: dict[str, tuple[int, Leases | None]] = {}
        self._said_waiting = 0.0
        self._ended_at: float | None = None
        self._transport = transport.Server(address, self._handle)
        self.address = self._transport.address
        self._handlers: dict[type[Message], tuple[str, Handler]] = {
            LeaseRequest: ("generator", self._lease),
            Started: ("generator", self._started),
            Submit: ("generator", self._submit),
            Failed: ("generator", self._failed),
            Heartbeat: ("generator", self._heartbeat),
            WatchWeights: ("generator", self._watch_weights),
            Register: ("learner", self._register),
            Fetch: ("learner", self._fetch),
            Commit: ("learner", self._commit),
            Published: ("learner", self._published),
            Checkpointed: ("learner", self._checkpointed),
            StatusRequest: ("", self._status),
        }

    async def serve(self) -> int:
        """Serves until everybody knows that the run has ended, or until `stop`.

        Returns the exit code: 0, or 1 for a run that failed or was stopped before its end. Raises
        what broke the buffer.
        """
        reader = asyncio.create_task(self._transport.serve())
        try:
            await self._save()
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
            self._run.tick(now=now)
            if self._run.is_changed:
                await self._save()
            await _wait_for(self._stopped, tick_s)

    def _may_leave(self) -> bool:
        """The run has ended and every member that is there was told, or had the time to ask."""
        run, now = self._run, time.monotonic()
        if run.end is None:
            return False
        if self._ended_at is None:
            self._ended_at = now
        training = run.training.position < run.ledger.policy.next_step
        patience_s = TRAINING_LEAVE_S if training and run.training.owner else LEAVE_S
        audience = [*run.members.alive(), *run.members.named(run.training.owner)]
        told = all(member.heard_end for member in audience)
        return (told and not training) or now - self._ended_at > patience_s

    async def _save(self) -> None:
        """Follows up a change, wakes what waits for it, and waits until it is on disk."""
        self._run.advance(now=time.monotonic())
        saved = self._run.save()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        await asyncio.wrap_future(saved)

    async def _until(self, look: Callable[[float], Found | None]) -> Found | None:
        """What `look` finds, tried after each change; None after max_wait_s."""
        ends = time.monotonic() + self._max_wait_s
        while True:
            changed = self._changed
            found = look(time.monotonic())
            left = ends - time.monotonic()
            if found is not None or left <= 0:
                return found
            await _wait_for(changed, left)

    async def _handle(self, peer: bytes, packet: Packet) -> transport.Reply:
        message, now = packet.message, time.monotonic()
        if isinstance(message, Hello):
            return self._hello(peer, message, now)
        member = self._run.members.of(peer, now=now)
        if member is None:
            return Refused(code="hello_first", reason="say hello first")
        role, handler = self._handlers.get(type(message), ("nobody", None))
        if handler is None or role not in ("", member.role):
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
        if hello.member not in self._run.members.by_name and hello.role != "monitor":
            log.info("%s (pid %d on %s) has joined", hello.member, hello.pid, hello.host)
        self._run.members.hello(peer, hello, now=now)
        return Welcome(run_id=self._run_id, heartbeat_s=self._run.members.heartbeat_s)

    async def _lease(self, member: Member, packet: Packet, request: LeaseRequest) -> Leases:
        """A later request of the same generator ends the wait of the one before, and the same
        request sent again gets the same leases."""
        id, answered = self._lease_replies.get(member.name, (0, None))
        if id == packet.id and answered is not None:
            return answered
        self._lease_replies[member.name] = (packet.id, None)

        def look(now: float) -> Leases | None:
            id, answered = self._lease_replies[member.name]
            if id != packet.id:
                return Leases(leases=[])
            if answered is not None:
                return answered
            if self._run.end is not None:
                member.heard_end = True
                return Leases(leases=[], done=True)
            leases = self._run.lease(member, request, now=now)
            if not leases:
                return None
            self._lease_replies[member.name] = (packet.id, Leases(leases=leases))
            return self._lease_replies[member.name][1]

        found = await self._until(look)
        if found is None or not found.leases:
            return found or Leases(leases=[])
        await self._save()
        return found

    async def _started(self, member: Member, packet: Packet, message: Started) -> None:
        self._run.started(message, now=time.monotonic())
        await self._save()

    async def _submit(self, member: Member, packet: Packet, message: Submit) -> Message:
        verdict = self._run.submit(member, message, packet.frames, now=time.monotonic())
        await self._save()
        return verdict

    async def _failed(self, member: Member, packet: Packet, message: Failed) -> Message:
        log.warning("%s: group %s failed: %s", member.name, message.group, message.reason)
        verdict = self._run.failed(message, now=time.monotonic())
        await self._save()
        return verdict

    async def _heartbeat(self, member: Member, packet: Packet, beat: Heartbeat) -> Message:
        self._run.heartbeat(member, beat, now=time.monotonic())
        if self._run.is_changed:
            await self._save()
        done = self._run.end is not None
        member.heard_end = member.heard_end or done
        newest = self._run.training.newest
        return Beat(inc=newest.inc, version=newest.version, done=done)

    async def _watch_weights(self, member: Member, packet: Packet, watch: WatchWeights) -> Message:
        def look(now: float) -> Weights | None:
            newest = self._run.training.newest
            if WeightId(newest.inc, newest.version) <= WeightId(*watch.have):
                return None
            return Weights(inc=newest.inc, version=newest.version, location=newest.location)

        found = await self._until(look)
        newest = self._run.training.newest
        return found or Weights(inc=newest.inc, version=newest.version, location=newest.location)

    async def _register(self, member: Member, packet: Packet, message: Register) -> Message:
        training = self._run.training
        refused = training.register(message, member=member.name)
        if refused is not None:
            return refused
        self._mail.new_reader(since_step=message.checkpoint_version)
        registered = Registered(inc=training.inc, committed=training.committed)
        await self._save()
        log.info(
            "learner number %d: %s at version %d, %d is the highest committed",
            *(registered.inc, member.name, message.checkpoint_version, registered.committed),
        )
        return registered

    async def _fetch(self, member: Member, packet: Packet, fetch: Fetch) -> transport.Reply:
        """The batch, the end, or after a while what is waited for."""
        self._mail.asked(packet.id)

        def look(now: float) -> AssignedBatch | Refused | End | None:
            refused = self._run.training.fenced(fetch.inc) or self._run.why_not(fetch.step)
            if refused is not None:
                return refused
            found = self._run.batch(fetch.step, now=now)
            return found or self._run.end

        found = look(time.monotonic())
        if found is None:
            self._note_waiting(fetch.step)
            found = await self._until(look)
        await self._save()
        if isinstance(found, Refused):
            return found
        if isinstance(found, AssignedBatch):
            return await self._batch(found)
        if isinstance(found, End):
            member.heard_end = True
            return found.model_copy(update={"records": self._mail.take()})
        reason = self._note_waiting(fetch.step)
        return Waiting(step=fetch.step, reason=reason, records=self._mail.take())

    async def _batch(self, batch: AssignedBatch) -> transport.Reply:
        refs = [group.payload for group in batch.groups if group.payload is not None]
        frames = await asyncio.to_thread(lambda: tuple(map(self._run.journal.read, refs)))
        record = Record.model_validate_json(batch.step.record)
        message = Batch(
            step=batch.step.step,
            max_staleness=batch.step.max_staleness,
            replayed=batch.replayed,
            waited_for=batch.step.waited_for,
            records=[record, *self._mail.take()],
        )
        return message, frames

    def _note_waiting(self, step: int) -> str:
        now = time.monotonic()
        reason, waited_s = self._run.note_waiting(step, now=now)
        if waited_s > SAY_WAITING_S and now - self._said_waiting > SAY_WAITING_S:
            self._said_waiting = now
            log.warning("step %d is waited for since %.0f s: %s", step, waited_s, reason)
        return reason

    async def _commit(self, member: Member, packet: Packet, message: Commit) -> Message:
        refused = self._run.commit(message, now=time.monotonic())
        await self._save()
        return refused or Ok()

    async def _published(self, member: Member, packet: Packet, message: Published) -> Message:
        refused = self._run.training.published(message)
        await self._save()
        return refused or Ok()

    async def _checkpointed(self, member: Member, packet: Packet, message: Checkpointed) -> Message:
        refused = self._run.training.checkpointed(message)
        await self._save()
        self._run.retain()
        return refused or Ok()

    async def _status(self, member: Member, packet: Packet, message: StatusRequest) -> Message:
        return Status(values=self._run.status(now=time.monotonic()))


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
