"""A generator's part in the broadcasts of the collective transport: its seat, and how it went."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asyncrl.client import Client
from asyncrl.messages import Message, Ready, Seat, Staged
from generators.engine import Engine, EngineError, Source, StagingError

log = logging.getLogger(__name__)


class RefusedWeights(StagingError):
    """Weights that do not fit this generator's model, now or later."""


class Broadcasts:
    """Asks the buffer for seats, and tells it what became of them."""

    def __init__(self, engine: Engine, client: Client, *, buffer_timeout_s: float) -> None:
        self._engine = engine
        self._client = client
        self._buffer_timeout_s = buffer_timeout_s

    async def seated(self, offer: Source) -> Source | None:
        """The offered weights with a seat in a broadcast of them, as soon as there is one; None
        when they are offered no longer. Raises RefusedWeights, which the learner hears of."""
        try:
            devices = await self._engine.check(offer.manifest)
        except StagingError as error:
            await self._ask(offer, error=str(error))
            raise RefusedWeights(str(error)) from None
        while True:
            seat = await self._ask(offer, devices=devices)
            if seat.reason:
                raise RefusedWeights(seat.reason)
            if seat.is_over:
                return None
            if seat.roster:
                return offer.model_copy(update={"seat": seat})

    @asynccontextmanager
    async def reported(self, source: Source) -> AsyncIterator[None]:
        """Within it the version of `source` is taken in. Whatever comes of it is told to the
        buffer, and raised; nothing is told of a source without a seat."""
        try:
            yield
        except StagingError as error:
            await self._tell(source, str(error), is_lost=error.is_lost)
            raise
        except (TimeoutError, EngineError) as error:
            await self._tell(source, str(error) or "took too long")
            raise
        await self._tell(source, "")

    async def _ask(self, offer: Source, *, devices: Sequence[str] = (), error: str = "") -> Seat:
        inc, version = offer.weights
        ready = Ready(inc=inc, version=version, devices=list(devices), error=error)
        answer = await self._call(ready)
        assert isinstance(answer, Seat)
        return answer

    async def _tell(self, source: Source, error: str, *, is_lost: bool = False) -> None:
        if source.seat is None:
            return
        inc, version = source.weights
        roster = source.seat.roster
        await self._call(
            Staged(inc=inc, version=version, roster=roster, error=error, is_lost=is_lost)
        )

    async def _call(self, message: Message) -> Message:
        packet = await self._client.call(message, deadline_s=self._buffer_timeout_s)
        return packet.message
