"""What all members ask alike: to join, signs of life, and farewells."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.handshake import mismatches, refusal
from asyncrl.log_limits import Seldom
from asyncrl.messages import (
    PROTOCOL,
    Beat,
    Heartbeat,
    Hello,
    Leave,
    Message,
    Ok,
    Refused,
    Settings,
    Welcome,
)
from asyncrl.wire import Packet
from buffer.changes import ALL, Changes, Handler
from buffer.members import Member
from buffer.run import Run

log = logging.getLogger(__name__)

MAX_SHOWN = 20
"""Refused members that status shows, the last ones."""


class Joining:
    """Who may join: the same run, the same protocol, the same settings, one engine at a time."""

    def __init__(
        self, run: Run, changes: Changes, *, run_id: str, run_name: str, settings: Settings
    ) -> None:
        """`settings` are what members must agree with (asyncrl.handshake.buffer_settings)."""
        self._run = run
        self._changes = changes
        self._run_id = run_id
        self._run_name = run_name
        self._settings = settings
        self._refused: dict[str, Refused] = {}
        self._seldom = Seldom(log)
        self.num_refused = 0
        """Members that were refused, each counted once."""

    def settings(self, member: str) -> Settings:
        """With the engine of the generators that are there besides this member."""
        engine = self._run.members.engine(besides=member)
        return self._settings | ({"engine": engine} if engine else {})

    async def hello(self, peer: bytes, hello: Hello, *, now: float) -> Message:
        refused = self._why_not(hello)
        if refused is not None:
            self._note_refused(hello, refused)
            return refused
        members = self._run.members
        if hello.member not in members.by_name and hello.role != "monitor":
            log.info("%s (pid %d on %s) has joined", hello.member, hello.pid, hello.host)
        members.hello(peer, hello, now=now)
        return Welcome(
            run_id=self._run_id,
            run_name=self._run_name,
            heartbeat_s=members.heartbeat_s,
            settings=self.settings(hello.member),
        )

    def refused_values(self) -> list[dict[str, Any]]:
        """The last refused members, for status."""
        return [
            {"name": name, "code": refused.code, "reason": refused.reason}
            for name, refused in self._refused.items()
        ]

    def _why_not(self, hello: Hello) -> Refused | None:
        if hello.protocol != PROTOCOL:
            reason = f"{hello.member} speaks protocol {hello.protocol}, the buffer {PROTOCOL}"
            return Refused(code="protocol", reason=f"{reason}: use the same version of asyncrl")
        if hello.run_id not in (None, self._run_id):
            reason = f"{hello.member} is of run {hello.run_id}, this buffer serves {self._run_id}"
            return Refused(code="wrong_run", reason=f"{reason}: is network.buffer right?")
        if lines := mismatches(hello.role, hello.settings, self.settings(hello.member)):
            return Refused(code="mismatch", reason=refusal(hello.member, lines))
        known = self._run.members.by_name.get(hello.member)
        if known is not None and known.role != hello.role:
            reason = f"{hello.member} is a {known.role} of this run, not a {hello.role}"
            return Refused(code="invalid", reason=reason)
        return None

    def _note_refused(self, hello: Hello, refused: Refused) -> None:
        """It may try again and again: it is counted and told once, and one of very many is told as
        a number."""
        if hello.member not in self._refused:
            self.num_refused += 1
            who = f"{hello.role} {hello.member} (pid {hello.pid} on {hello.host})"
            say = log.warning if self.num_refused <= MAX_SHOWN else self._seldom.warning
            say(f"{who} is refused: {refused.reason}")
        self._refused.pop(hello.member, None)
        self._refused[hello.member] = refused
        while len(self._refused) > MAX_SHOWN:
            del self._refused[next(iter(self._refused))]


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
            self._changes.note(*ALL)
        known = self._changes.known
        if member.role == "generator":
            member.heard_end = member.heard_end or known.has_ended
        return Beat(
            inc=known.newest.inc,
            version=known.newest.version,
            void=self._run.generation.void(member, beat),
            done=known.has_ended,
        )

    async def _leave(self, member: Member, packet: Packet, leave: Leave) -> Message:
        self._run.watch.leave(member, leave, now=time.monotonic())
        training = self._run.books.training
        training.is_done = training.is_done or (leave.is_done and member.name == training.owner)
        await self._changes.save()
        return Ok()
