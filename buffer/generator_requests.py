"""What generators ask."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from asyncrl.messages import (
    Failed,
    LeaseRequest,
    Leases,
    Message,
    Started,
    Submit,
)
from asyncrl.types import GroupId
from asyncrl.wire import Packet
from buffer.changes import Changes, Handler
from buffer.members import Member
from buffer.run import Run

log = logging.getLogger(__name__)


class GeneratorRequests:
    """One method for each request of a generator, in `handlers`."""

    def __init__(self, run: Run, changes: Changes) -> None:
        self._run = run
        self._changes = changes
        self.handlers: Mapping[type[Message], Handler] = {
            LeaseRequest: self._lease,
            Started: self._started,
            Submit: self._submit,
            Failed: self._failed,
        }

    async def _lease(self, member: Member, packet: Packet, request: LeaseRequest) -> Leases:
        """A later request of the same generator ends the wait of the one before, and the same
        request sent again gets the same leases."""
        if member.lease_request != packet.id:
            member.lease_request, member.leases = packet.id, None

        def look(now: float) -> Leases | None:
            if member.lease_request != packet.id or not member.alive:  # it would reach nobody
                return Leases(leases=[])
            if member.leases is not None:
                return member.leases
            if self._run.end is not None:
                member.heard_end = True
                return Leases(leases=[], done=True)
            void = self._run.generation.take_void(member)
            leases = self._run.generation.lease(member, request, now=now)
            if leases or void:
                member.leases = Leases(leases=leases, void=void)
            return member.leases

        found = await self._changes.until("lease", look)
        if found is not None and found.leases:
            self._changes.note()
        return found or Leases(leases=[])

    async def _started(self, member: Member, packet: Packet, message: Started) -> None:
        self._run.started(member, message, now=time.monotonic())
        self._changes.note()

    async def _submit(self, member: Member, packet: Packet, message: Submit) -> Message:
        was_holder = message.kind == "train" and self._holds(member, message)
        verdict = self._run.submit(member, message, packet.frames, now=time.monotonic())
        # Its own lease turned into a finished group frees no place: nobody else need look for one.
        if was_holder and verdict.verdict == "accepted":
            await self._changes.save("batch")
        else:
            await self._changes.save()
        return verdict

    def _holds(self, member: Member, message: Submit) -> bool:
        id = GroupId(*message.group)
        return self._run.books.ledger.held(id, message.attempt, by=member.name) is not None

    async def _failed(self, member: Member, packet: Packet, message: Failed) -> Message:
        verdict = self._run.submissions.failed(member, message, now=time.monotonic())
        level = logging.WARNING if verdict.verdict == "accepted" else logging.INFO  # it was void
        log.log(level, "%s: group %s failed: %s", member.name, message.group, message.reason)
        await self._changes.save()
        return verdict
