"""Takes new weights as they come: stage in the background, swap at a step boundary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict

from asyncrl.client import Client
from asyncrl.config.schema import WeightsSection
from asyncrl.messages import Served, WatchWeights
from asyncrl.types import WeightId
from asyncrl.wire import view
from generators.broadcasts import Broadcasts, RefusedWeights
from generators.engine import Engine, EngineError, Source, StageTimes, StagingError, SwapTimes
from generators.eval_pins import EvalPins

log = logging.getLogger(__name__)

RETRY_S = (0.5, 30.0)
"""Pause after a failed transfer: at first, and at most. Newer weights end it."""
IDLE_S = 0.05
"""Pause after an answer without new weights, so that a hasty buffer makes no busy loop."""


class WeightsIn:
    """Follows the published weights: the newest wins, and those applied strictly increase."""

    def __init__(
        self,
        engine: Engine,
        client: Client,
        *,
        pins: EvalPins,
        weights: WeightsSection,
        buffer_timeout_s: float,
        on_pause: Callable[[bool], None],
        on_swap: Callable[[SwapTimes], None],
    ) -> None:
        """`on_pause` is called with True before the engine stands still and with False when it
        goes on, `on_swap` after each swap."""
        self._engine = engine
        self._client = client
        self._broadcasts = Broadcasts(engine, client, buffer_timeout_s=buffer_timeout_s)
        self._pins = pins
        self._timeout_s = weights.timeout_s
        self._give_up_s = weights.timeout_s + 2 * weights.stall_timeout_s
        """An engine keeps to weights.timeout_s and then leaves the group; here it is given up."""
        self._is_under_pause = weights.staging == "none"
        self._buffer_timeout_s = buffer_timeout_s
        self._on_pause = on_pause
        self._on_swap = on_swap
        self._failed: WeightId | None = None
        """What could not be taken at the last try."""
        self._failure: Exception | None = None
        """Why."""
        self._num_lost = 0
        """Transfers in a row that were lost by another's fault."""
        self._retry_s = RETRY_S[0]
        self.doing = "loading the model"
        """What goes on beside generating, in words; empty: nothing."""

    async def catch_up(self, newest: WeightId) -> None:
        """The engine has loaded its model. Returns when `newest`, or something newer, serves; or
        when it cannot be had, as nobody offers it or this generator cannot take it: the buffer
        knows what there is to do for older weights, and `run` tries again."""
        self.doing = ""
        while self._engine.serving < newest:
            if self._failed is not None:
                if not self._is_lost:
                    return
                await self._pause(self._failed)
            if not await self._look():
                return

    async def run(self) -> None:
        """Runs until cancelled. Raises EngineError, or Unreachable without a buffer."""
        while True:
            if self._failed is not None:
                await self._pause(self._failed)
            await self._look()

    async def _look(self) -> bool:
        """Waits a while for newer weights, and takes them if there are any. False: none are."""
        found = await self._newer(self._engine.serving)
        if found is None:
            return False
        try:
            await self._take(found)
        except (StagingError, TimeoutError) as error:
            self._note_failure(found.weights, error)
        else:
            self._failed, self._num_lost, self._retry_s = None, 0, RETRY_S[0]
            self.doing = ""
        return True

    @property
    def _is_lost(self) -> bool:
        return isinstance(self._failure, StagingError) and self._failure.is_lost

    def _note_failure(self, weights: WeightId, error: Exception) -> None:
        reason = str(error) or f"took longer than weights.timeout_s = {self._timeout_s:g}"
        serving = self._engine.serving
        log.warning("weights %s were not taken, %s serve on: %s", weights, serving, reason)
        self.doing = f"weights {weights} were not taken: {reason}"
        self._failed, self._failure = weights, error
        self._num_lost = self._num_lost + 1 if self._is_lost else 0

    async def _pause(self, failed: WeightId) -> None:
        """Until it is time to try `failed` again, or there is something newer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s()):
                while await self._newer(failed) is None:
                    pass

    def _patience_s(self) -> float | None:
        """What was lost by another's fault is tried again at once, and soon if it is lost again;
        what fails here later and later; what does not fit never (None)."""
        if isinstance(self._failure, RefusedWeights):
            return None
        if self._is_lost:
            return RETRY_S[0] if self._num_lost > 1 else 0.0
        patience_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_S[1])
        return patience_s

    async def _newer(self, have: WeightId) -> Source | None:
        """The newest weights, if there are any to take that are newer than `have`."""
        watch = WatchWeights(have=list(have))
        packet = await self._client.call(watch, deadline_s=self._buffer_timeout_s)
        found = WeightId(packet.message.inc, packet.message.version)
        if packet.message.transport == "none" or found <= have:
            await asyncio.sleep(IDLE_S)
            return None
        if packet.message.transport == "disk":
            return Source(weights=found, location=packet.message.location)
        return Source(weights=found, manifest=bytes(view(packet.frames[0])).decode())

    async def _take(self, found: Source) -> None:
        """Nothing happens when the weights are offered no longer."""
        if self._is_under_pause:
            await self._take_under_pause(found)
            return
        source = await self._seated(found)
        if source is None:
            return
        async with self._broadcasts.reported(source):
            staged = await self._stage(source)
        self.doing = f"{source.weights} waits for an evaluation to end"
        waited_s = await self._pins.released()
        await self._serve(source, await self._swap(source), staged, waited_s)

    async def _take_under_pause(self, found: Source) -> None:
        """The engine stands still while the weights come, so no evaluation may be in hand when
        they begin to, and none may begin."""
        self.doing = f"{found.weights} waits for an evaluation to end"
        waited_s = await self._pins.released()
        async with self._pins.barred():
            source = await self._seated(found)
            if source is None:
                return
            async with self._broadcasts.reported(source):
                await self._stage(source)
                times = await self._swap(source)
        await self._serve(source, times, times.stage, waited_s)

    async def _seated(self, found: Source) -> Source | None:
        if not found.manifest:
            return found
        self.doing = f"ready for {found.weights}"
        source = await self._broadcasts.seated(found)
        if source is None:
            self.doing = ""
            await asyncio.sleep(IDLE_S)
        return source

    async def _stage(self, source: Source) -> StageTimes:
        self.doing = f"staging {source.weights}"
        async with asyncio.timeout(self._give_up_s if source.seat else self._timeout_s):
            return await self._engine.stage(source)

    async def _swap(self, source: Source) -> SwapTimes:
        """An engine that does not answer holds half of a version, or hangs: it is given up."""
        longest_s = self._timeout_s + self._give_up_s * self._is_under_pause
        self.doing = ""  # beside it nothing is done
        self._on_pause(True)
        try:
            async with asyncio.timeout(longest_s):
                return await self._engine.swap(source.weights)
        except TimeoutError:
            raise EngineError(
                f"swapping to weights {source.weights} took longer than weights.timeout_s = "
                f"{self._timeout_s:g}: the engine does not answer"
            ) from None
        finally:
            self._on_pause(False)

    async def _serve(
        self, source: Source, swapped: SwapTimes, staged: StageTimes, waited_s: float
    ) -> None:
        """The new weights serve: says so to everybody."""
        seconds = seconds_by_phase(swapped, staged, waited_s)
        words = ", ".join(f"{phase} {took:.3f} s" for phase, took in seconds.items())
        log.info("serving weights %s: %s", source.weights, words)
        self._on_swap(swapped)
        inc, version = source.weights
        served = Served(inc=inc, version=version, seconds=seconds)
        await self._client.call(served, deadline_s=self._buffer_timeout_s)


def seconds_by_phase(swapped: SwapTimes, staged: StageTimes, waited_s: float) -> dict[str, float]:
    """As in messages.Served."""
    by_name = {**asdict(staged), "wait_s": waited_s, **asdict(swapped)}
    del by_name["stage"]
    return {name.removesuffix("_s"): seconds for name, seconds in by_name.items()}
