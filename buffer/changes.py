"""After a change: follow it up, wake what waits for it, and wait until it is on disk."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from asyncrl.transport import Reply
from asyncrl.wire import Packet
from buffer.members import Member
from buffer.run import Run

Found = TypeVar("Found")
Handler = Callable[[Member, Packet, Any], Awaitable[Reply]]
"""Answers one kind of request: (who asks, the packet, its message) -> reply."""


class Changes:
    """Requests that wait sleep in `until`; requests that change something end with `save`."""

    def __init__(self, run: Run, *, max_wait_s: float) -> None:
        self._run = run
        self._max_wait_s = max_wait_s
        self._changed = asyncio.Event()
        self._saved: Future[None] | None = None

    async def save(self) -> None:
        """Follows up a change, wakes what waits for it, and waits until it is on disk."""
        now = time.monotonic()
        self._run.advance(now=now)
        self._saved = self._run.save(now=now)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        await self.saved()

    async def saved(self) -> None:
        """Waits until every change so far is on disk."""
        if self._saved is not None:
            await asyncio.wrap_future(self._saved)

    async def until(self, look: Callable[[float], Found | None]) -> Found | None:
        """What `look` finds, tried after each change; None after max_wait_s."""
        ends = time.monotonic() + self._max_wait_s
        while True:
            changed = self._changed
            found = look(time.monotonic())
            left = ends - time.monotonic()
            if found is not None or left <= 0:
                return found
            await wait_for(changed, left)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until `event` is set, `timeout_s` at most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
