"""Takes new weights as they are published: stage in the background, swap at a step boundary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.client import Client
from asyncrl.messages import WatchWeights
from asyncrl.types import WeightId
from generators.engine import Engine, EngineError, StagingError, SwapTimes

log = logging.getLogger(__name__)

RETRY_S = (0.5, 30.0)
"""Pause after a failed staging: at first, and at most. Newer weights end it."""
IDLE_S = 0.05
"""Pause after an answer without new weights, so that a hasty buffer makes no busy loop."""
PIN_GRACE_S = 0.5
"""An evaluation counts as over when no lease of it has been in hand for this long."""
PIN_LOOK_S = 0.05


class EvalPins:
    """Keeps the served version while evaluation leases are in hand, until their deadlines."""

    def __init__(self) -> None:
        self._deadlines: dict[object, float] = {}
        self._quiet_since = float("-inf")

    @contextmanager
    def hold(self, timeout_s: float) -> Iterator[None]:
        """Pins the served version during the `with`, for at most `timeout_s` seconds."""
        key = object()
        self._deadlines[key] = time.monotonic() + timeout_s
        try:
            yield
        finally:
            del self._deadlines[key]
            self._quiet_since = time.monotonic()

    @property
    def held(self) -> bool:
        now = time.monotonic()
        running = any(deadline > now for deadline in self._deadlines.values())
        return running or now - self._quiet_since < PIN_GRACE_S

    async def released(self) -> None:
        """Returns when no evaluation pins the version any more."""
        while self.held:
            await asyncio.sleep(PIN_LOOK_S)


class WeightsIn:
    """Follows the published weights: the newest wins, and those applied strictly increase."""

    def __init__(
        self,
        engine: Engine,
        client: Client,
        *,
        pins: EvalPins,
        timeout_s: float,
        buffer_timeout_s: float,
        on_pause: Callable[[bool], None],
        on_swap: Callable[[SwapTimes], None],
    ) -> None:
        """`timeout_s` bounds one staging, and one swap. `on_pause` is called with True before the
        engine stands still and with False when it goes on, `on_swap` after each swap."""
        self._engine = engine
        self._client = client
        self._pins = pins
        self._timeout_s = timeout_s
        self._buffer_timeout_s = buffer_timeout_s
        self._on_pause = on_pause
        self._on_swap = on_swap
        self._failed: WeightId | None = None
        """What could not be taken at the last try."""
        self._retry_s = RETRY_S[0]
        self.doing = "loading the model"
        """What goes on beside generating, in words; empty: nothing."""

    async def catch_up(self, newest: WeightId) -> None:
        """The engine has loaded its model. Returns when `newest`, or something newer, serves; or
        when it could not be taken: the buffer knows what there is to do for older weights, and
        `run` tries again."""
        self.doing = ""
        while self._engine.serving < newest and self._failed is None:
            await self._look()

    async def run(self) -> None:
        """Runs until cancelled. Raises EngineError, or Unreachable without a buffer."""
        while True:
            if self._failed is not None:
                await self._pause(self._failed)
            await self._look()

    async def _look(self) -> None:
        """Waits a while for newer weights, and takes them if there are any."""
        found = await self._newer(self._engine.serving)
        if found is None:
            return
        weights, location = found
        try:
            await self._take(weights, location)
        except (StagingError, TimeoutError) as error:
            reason = str(error) or f"took longer than weights.timeout_s = {self._timeout_s:g}"
            serving = self._engine.serving
            log.warning("weights %s were not taken, %s serve on: %s", weights, serving, reason)
            self.doing = f"weights {weights} were not taken: {reason}"
            self._failed = weights
        else:
            self.doing, self._failed, self._retry_s = "", None, RETRY_S[0]

    async def _pause(self, failed: WeightId) -> None:
        """Until it is time to try `failed` again, or there is something newer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._retry_s):
                while await self._newer(failed) is None:
                    pass
        self._retry_s = min(2 * self._retry_s, RETRY_S[1])

    async def _newer(self, have: WeightId) -> tuple[WeightId, str] | None:
        """The newest weights and where they are, if they are newer than `have`."""
        watch = WatchWeights(have=list(have))
        packet = await self._client.call(watch, deadline_s=self._buffer_timeout_s)
        found = WeightId(packet.message.inc, packet.message.version)
        location: str = packet.message.location
        if packet.message.transport == "disk" and found > have:
            return found, location
        await asyncio.sleep(IDLE_S)
        return None

    async def _take(self, weights: WeightId, location: str) -> None:
        self.doing = f"staging {weights}"
        started = time.monotonic()
        async with asyncio.timeout(self._timeout_s):
            await self._engine.stage(weights, location)
        staged_s = time.monotonic() - started
        self.doing = f"{weights} waits for an evaluation to end"
        await self._pins.released()
        self._on_pause(True)
        try:
            times = await self._swap(weights)
        finally:
            self._on_pause(False)
        log.info(
            "serving weights %s: staged %.2f s, paused %.3f s, loaded %.3f s, resumed %.3f s",
            weights,
            staged_s,
            times.pause_s,
            times.load_s,
            times.resume_s,
        )
        self._on_swap(times)

    async def _swap(self, weights: WeightId) -> SwapTimes:
        """An engine that does not answer holds half of a version, or hangs: it is given up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._engine.swap(weights)
        except TimeoutError:
            raise EngineError(
                f"swapping to weights {weights} took longer than weights.timeout_s = "
                f"{self._timeout_s:g}: the engine does not answer"
            ) from None
