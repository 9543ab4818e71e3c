"""The buffer on the network: who may ask what, which requests wait, and when it leaves.

Each request is a task. A request that waits (for a lease, a batch, newer weights) sleeps until
something changes, transport.MAX_WAIT_S at most. Whatever a reply tells is in the journal first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from asyncrl import transport
from asyncrl.messages import (
    End,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Settings,
    Status,
    StatusRequest,
)
from asyncrl.wire import Packet
from buffer.changes import Changes, Handler, wait_for
from buffer.ending import Farewell
from buffer.generator_requests import GeneratorRequests
from buffer.learner_requests import LearnerRequests
from buffer.loop_clock import LoopClock
from buffer.member_requests import Joining, MemberRequests
from buffer.run import Run
from buffer.status import status_values
from buffer.weights_requests import WeightsRequests

FLUSH_S = 0.3
"""How long the buffer stays when everybody has been told: replies are on their way."""
log = logging.getLogger(__name__)

STOPPED = 130
"""Exit code of a drained run: 128 + SIGINT."""
NEVER_WAIT = (Hello, Heartbeat, StatusRequest)
"""What these are answered is on disk already, or need not be: signs of life go on while a disk
stands still."""
TICK_S = 0.5
"""Longest time between two looks at the clock."""


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
        clock: LoopClock | None = None,
    ) -> None:
        """`settings` are what members must agree with (asyncrl.handshake.buffer_settings); `clock`
        is the selector of the event loop, if that is to tell where its time goes.

        Raises ValueError when the address cannot be bound.
        """
        self._run = run
        self._changes = Changes(run, max_wait_s=max_wait_s)
        self._clock = clock
        self._joining = Joining(
            run, self._changes, run_id=run_id, run_name=run_name, settings=settings
        )
        self._farewell = Farewell(run.books, run.ending, run.watch, now=run.began_at)
        self._stopped = asyncio.Event()
        self._fatal: Exception | None = None
        self._saved_end: End | None = None
        self._saving: asyncio.Task[None] | None = None
        self._transport = transport.Server(address, self._handle)
        self.address = self._transport.address
        weights = WeightsRequests(run, self._changes)
        self._handlers: dict[str, Mapping[type[Message], Handler]] = {
            "generator": {
                **GeneratorRequests(run, self._changes).handlers,
                **weights.of_generators,
            },
            "learner": {**LearnerRequests(run, self._changes).handlers, **weights.of_learner},
            "monitor": {},
        }
        self._of_any_member: Mapping[type[Message], Handler] = MemberRequests(
            run, self._changes
        ).handlers

    async def serve(self) -> int:
        """Serves until everybody knows that the run has ended, or until `stop`.

        Returns the exit code: 0, 1 for a run that failed or was stopped at once, STOPPED for one
        that was drained. Raises what broke the buffer.
        """
        reader = asyncio.create_task(self._transport.serve())
        if self._clock is not None:
            self._clock.serve(self._run.watch.waiting.state)
            self._run.watch.know_own_time(self._clock, now=time.monotonic())
        try:
            await self._changes.save()
            await self._watch_the_clock(reader)
            if self._fatal is not None or not self._stopped.is_set():
                await asyncio.sleep(FLUSH_S)
            if self._fatal is None:
                self._run.watch.note_last(now=time.monotonic())
                await self._changes.save()
        finally:
            tasks = [reader, *([self._saving] if self._saving else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._transport.close()
        if self._fatal is not None:
            raise self._fatal
        return self._exit_code()

    def drain(self, by: str) -> None:
        """The run stops where it stands: nothing new is handed out, the learner ends its step, and
        `serve` returns when everybody has heard. `by` says in words what asked for it."""
        self._run.ending.stop(by)

    def stop(self) -> None:
        """`serve` returns at once."""
        self._stopped.set()

    def _exit_code(self) -> int:
        end = self._run.end
        if end is None or end.failed:
            return 1
        if self._farewell.is_unfinished and not self._stopped.is_set():
            log.error(
                "the learner has ended before its last checkpoint and export were written: start "
                "buffer and learner again with checkpoint.resume=auto"
            )
            return 1
        return STOPPED if end.stopped else 0

    async def _watch_the_clock(self, reader: asyncio.Task[None]) -> None:
        """Until the buffer may leave. `reader` ends only by what broke it."""
        run, tick_s = self._run, min(TICK_S, self._run.members.heartbeat_s / 2)
        last = time.monotonic()
        while not self._stopped.is_set() and not reader.done():
            now = time.monotonic()
            self._excuse(now - last - tick_s, now)
            last = now
            if self._farewell.may_leave(now=now):
                return
            self._note_change()
            run.tick(now=now)
            run.watch.look_at_own_time(now=now)
            run.advance(now=now)
            self._save_what_is_due(now)
            await wait_for(self._stopped, tick_s)
        if reader.done():
            reader.result()

    def _save_what_is_due(self, now: float) -> None:
        """Does not wait for it: the clock is looked at while a disk stands still. Raises what has
        kept the last one from the disk."""
        if self._saving is not None and self._saving.done():
            self._saving.result()
            self._saving = None
        if self._saving is None and (self._run.is_due(now=now) or self._run.end != self._saved_end):
            self._saved_end = self._run.end
            self._saving = asyncio.create_task(self._changes.save())

    def _excuse(self, late_s: float, now: float) -> None:
        """A look at the clock that comes much too late says that this process stood still; and
        what is not read is nobody's silence."""
        unread_s = self._transport.take_unread_s()
        if late_s > self._run.members.heartbeat_s:
            self._run.watch.excuse(late_s, now=now)
            self._farewell.excuse(late_s)
        elif unread_s > 0:
            self._run.watch.excuse_silence(unread_s, now=now)

    async def _handle(self, peer: bytes, packet: Packet) -> transport.Reply:
        self._note_change()
        try:
            reply = await self._answer(peer, packet, now=time.monotonic())
            if type(packet.message) not in NEVER_WAIT:
                await self._changes.saved()
            return reply
        except Exception as error:  # a broken invariant or journal ends the buffer, not one request
            self._fatal = self._fatal or error
            self.stop()
            return Refused(code="stopping", reason=f"the buffer has failed: {error}")
        finally:
            self._note_change()

    def _note_change(self) -> None:
        """What the run waits for may be another now."""
        if self._clock is not None:
            self._clock.changed()

    async def _answer(self, peer: bytes, packet: Packet, *, now: float) -> transport.Reply:
        message = packet.message
        if isinstance(message, Hello):
            return await self._joining.hello(peer, message, now=now)
        member = self._run.members.of(peer, now=now)
        if member is None:
            return Refused(code="hello_first", reason="say hello first")
        if isinstance(message, StatusRequest):
            return Status(values=self._status(now))
        kind = type(message)
        handler = self._of_any_member.get(kind) or self._handlers[member.role].get(kind)
        if handler is None:
            reason = f"{member.name}, a {member.role}, cannot ask for {message.type}"
            return Refused(code="invalid", reason=reason)
        return await handler(member, packet, message)

    def _status(self, now: float) -> dict[str, Any]:
        return status_values(self._run, now=now) | {
            "num_refused": self._transport.num_refused,
            "num_refused_members": self._joining.num_refused,
            "refused_members": self._joining.refused_values(),
        }
