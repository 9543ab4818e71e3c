"""What generators and learners ask alike: signs of life, and farewells."""

from __future__ import annotations

import time
from collections.abc import Mapping

from asyncrl.messages import Beat, Heartbeat, Leave, Message, Ok
from asyncrl.wire import Packet
from buffer.changes import Changes, Handler
from buffer.members import Member
from buffer.run import Run


class MemberRequests:
    """One method for each request, in `handlers`."""

    def __init__(self, run: Run, changes: Changes) -> None:
        self._run = run
        self._changes = changes
        self.handlers: Mapping[type[Message], Handler] = {
            Heartbeat: self._heartbeat,
            Leave: self._leave,
        }

    async def _heartbeat(self, member: Member, packet: Packet, beat: Heartbeat) -> Message:
        now, before = time.monotonic(), member.serving
        self._run.watch.heartbeat(member, beat, now=now)
        has_swapped = member.role == "generator" and member.serving != before
        if self._run.is_due(now=now) or has_swapped:
            await self._changes.save()
        done = self._run.end is not None
        if member.role == "generator":
            member.heard_end = member.heard_end or done
        newest = self._run.training.newest
        return Beat(inc=newest.inc, version=newest.version, done=done)

    async def _leave(self, member: Member, packet: Packet, leave: Leave) -> Message:
        self._run.watch.leave(member, leave.reason, now=time.monotonic())
        await self._changes.save()
        return Ok()
