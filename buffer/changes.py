"""After a change: follow it up, wake what waits for it, and wait until it is on disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from asyncrl.journal.tables import WeightsRow
from asyncrl.transport import Reply
from asyncrl.wire import Packet
from buffer.members import Member
from buffer.run import Run

Found = TypeVar("Found")
Handler = Callable[[Member, Packet, Any], Awaitable[Reply]]
"""Answers one kind of request: (who asks, the packet, its message) -> reply."""
Wanted = Literal["lease", "batch", "weights"]
"""What a request waits for."""
ALL: tuple[Wanted, ...] = ("lease", "batch", "weights")


class _Write:
    """One transaction, asked for or on its way."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    async def wait(self) -> None:
        """Until it is on disk. Raises what has kept it from getting there."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Known:
    """What is on disk of that which heartbeats are told: they do not wait for it."""

    newest: WeightsRow
    """The newest publication."""
    has_ended: bool


class Changes:
    """Requests that wait sleep in `until`; requests that change something end with `save`.

    What changes in one turn of the event loop is followed up together. One transaction is on its
    way at a time; what changes meanwhile goes with the next one.
    """

    def __init__(self, run: Run, *, max_wait_s: float) -> None:
        self._run = run
        self._max_wait_s = max_wait_s
        self._changed: dict[Wanted, asyncio.Event] = {wanted: asyncio.Event() for wanted in ALL}
        self._concerned: set[Wanted] = set()
        """Those that wait for one of these are to look again."""
        self._is_followed_up = True
        self._next: _Write | None = None
        """Will have the changes that no transaction has yet."""
        self._last: _Write | None = None
        """The last one that was begun."""
        self._is_writing = False
        self.known = self._now_known()
        """As of the last transaction."""

    def note(self, *concerned: Wanted) -> None:
        """Something has changed that concerns those who wait for `concerned`. It will be followed
        up and written; nobody waits for it here."""
        self._concerned.update(concerned)
        if self._next is None:
            self._next = _Write()
        if self._is_followed_up:
            self._is_followed_up = False
            asyncio.get_running_loop().call_soon(self._follow_up)

    async def save(self, *concerned: Wanted) -> None:
        """As `note`, of everything unless told otherwise, and waits until it is on disk."""
        self.note(*(concerned or ALL))
        await self.saved()

    async def saved(self) -> None:
        """Waits until every change so far is on disk."""
        last = self._next or self._last
        if last is not None:
            await last.wait()

    async def until(
        self,
        wanted: Wanted,
        look: Callable[[float], Found | None],
        *,
        every_s: float = float("inf"),
    ) -> Found | None:
        """What `look` finds, tried after each change that concerns `wanted`, and `every_s`; None
        after max_wait_s."""
        ends = time.monotonic() + self._max_wait_s
        while True:
            changed = self._changed[wanted]
            found = look(time.monotonic())
            left = ends - time.monotonic()
            if found is not None or left <= 0:
                return found
            await wait_for(changed, min(left, every_s))

    def _follow_up(self) -> None:
        self._is_followed_up = True
        try:
            self._run.advance(now=time.monotonic())
        except Exception as error:
            self._fail(error)
            return
        concerned, self._concerned = self._concerned, set()
        for wanted in concerned:
            changed, self._changed[wanted] = self._changed[wanted], asyncio.Event()
            changed.set()
        if not self._is_writing:
            self._write()

    def _write(self) -> None:
        """Begins the next transaction."""
        try:
            saved = self._run.save(now=time.monotonic())
        except Exception as error:
            self._fail(error)
            return
        write, known = self._take(), self._now_known()
        self._is_writing = True
        loop = asyncio.get_running_loop()
        saved.add_done_callback(
            lambda saved: loop.call_soon_threadsafe(self._written, write, saved, known)
        )

    def _written(self, write: _Write, saved: Future[None], known: Known) -> None:
        self._is_writing = False
        error = saved.exception()
        if error is None:
            self.known = known
        write.end(error)
        if self._next is not None and self._is_followed_up:
            self._write()

    def _now_known(self) -> Known:
        return Known(self._run.books.training.newest, self._run.end is not None)

    def _fail(self, error: Exception) -> None:
        """What waits for the next transaction hears why there is none."""
        self._take().end(error)

    def _take(self) -> _Write:
        assert self._next is not None
        self._last, self._next = self._next, None
        return self._last


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until `event` is set, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
