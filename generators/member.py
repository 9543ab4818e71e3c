"""A generator as a member of the run: it joins, gives signs of life, and says goodbye."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from asyncrl.client import Client, RefusedError, Unreachable
from asyncrl.clock import PhaseClock
from asyncrl.heartbeat import HeartbeatThread
from asyncrl.messages import Heartbeat, Leave

log = logging.getLogger(__name__)

LEAVE_S = 2.0
"""The longest that a farewell may take."""


class Member:
    """Use as an async context manager: whoever leaves it before the run is done says so to the
    buffer, so that its leases pass on at once."""

    def __init__(self, client: Client, *, ended: asyncio.Future[None], clock: PhaseClock) -> None:
        """`ended` is done as soon as the buffer has said that the run is."""
        self.look: Callable[[], Heartbeat] = self._look_at_start
        """What this generator does now; called from the heartbeat's thread."""
        self.give_up: Callable[[list[list[int]]], None] = lambda void: None
        """Called on the event loop with leases that are this generator's no longer."""
        self._client = client
        self._ended = ended
        self._clock = clock
        self._heartbeat: HeartbeatThread | None = None

    async def join(self, *, deadline_s: float) -> None:
        """Says hello; from the welcome on, signs of life are sent. Raises Unreachable, and
        RefusedError for a generator that does not fit the run."""
        welcome = await self._client.connect(deadline_s=deadline_s)
        loop = asyncio.get_running_loop()

        def on_done() -> None:
            loop.call_soon_threadsafe(self._finish)

        def on_void(void: list[list[int]]) -> None:
            loop.call_soon_threadsafe(self.give_up, void)

        self._heartbeat = HeartbeatThread(
            self._client.address,
            hello=self._client.hello,
            interval_s=welcome.heartbeat_s,
            look=lambda: self.look(),
            on_done=on_done,
        )
        self._heartbeat.on_void = on_void
        self._heartbeat.start()

    def beat_now(self) -> None:
        """Something worth telling has changed."""
        if self._heartbeat is not None:
            self._heartbeat.beat_now()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        if self._heartbeat is None:
            return
        self._heartbeat.close()
        if error is not None:
            await self._leave(error)

    async def _leave(self, error: BaseException) -> None:
        is_signal = isinstance(error, asyncio.CancelledError)
        reason = "ended by a signal" if is_signal else f"{type(error).__name__}: {error}"
        try:
            await self._client.call(Leave(reason=reason), deadline_s=LEAVE_S)
        except (Unreachable, RefusedError) as why:
            log.info("the buffer was not told: %s", why)

    def _finish(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _look_at_start(self) -> Heartbeat:
        return Heartbeat(
            state=self._clock.phase,
            state_s=self._clock.phase_s(),
            seconds=self._clock.total(),
            serving=[0, 0],
        )
