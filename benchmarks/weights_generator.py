"""A generator as it is, real vLLM and WeightsIn, in a process that says what it measured.

It leases nothing: it keeps as many requests going as it is told, so that the load is the same
throughout. Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import bisect
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from weights_config import PROMPT_TOKENS, RESPONSE_TOKENS

from asyncrl.client import Client
from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.load import load_resolved
from asyncrl.handshake import member_settings
from asyncrl.messages import Heartbeat, Hello
from asyncrl.types import Sampling, WeightId
from generators.engine import Source, StageTimes, SwapTimes
from generators.eval_pins import EvalPins
from generators.member import Member
from generators.vllm_engine import VllmEngine
from generators.weights_in import WeightsIn

LOOK_S = 0.005
"""Between two looks at how many tokens there are."""
SETTLE_S = 0.3
"""Between staging and a swap that is to be undisturbed."""


@dataclass(frozen=True, slots=True)
class Update:
    """One version that came to serve."""

    weights: WeightId
    staging: tuple[float, float]
    """Beginning and end of taking it in."""
    staged: StageTimes
    swapping: tuple[float, float]
    swapped: SwapTimes


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens were sampled up to certain times."""

    times: list[float]
    counts: list[int]

    def between(self, began: float, ended: float) -> float:
        """Tokens sampled in that time."""
        return self._at(ended) - self._at(began)

    def _at(self, when: float) -> float:
        if not self.times[0] <= when <= self.times[-1]:
            raise ValueError(f"tokens were counted from {self.times[0]} to {self.times[-1]}")
        after = max(1, bisect.bisect_left(self.times, when))
        return float(
            np.interp(when, self.times[after - 1 : after + 1], self.counts[after - 1 : after + 1])
        )


class GeneratorProcess:
    """What the benchmark says to the generator, and hears of it."""

    def __init__(self, config: Path, address: str) -> None:
        """Returns when the engine is there."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, config, address))
        self._process.start()
        theirs.close()
        self._hear()

    def load(self, num_requests: int) -> None:
        """Keeps so many requests going; returns when they are."""
        self._pipe.send(("load", num_requests))
        self._hear()

    def take(self, source: Source) -> Update:
        """Takes in what lies on this machine, without learner and buffer."""
        self._pipe.send(("take", source))
        return self.next_update()

    def next_update(self) -> Update:
        found = self._hear()
        assert isinstance(found, Update)
        return found

    def tokens(self) -> TokenCount:
        """Since the last call."""
        self._pipe.send(("tokens", None))
        found = self._hear()
        assert isinstance(found, TokenCount)
        return found

    def close(self) -> None:
        self._pipe.close()
        self._process.join(timeout=15)
        if self._process.is_alive():
            self._process.kill()

    def _hear(self) -> Any:
        if not self._pipe.poll(120):
            raise SystemExit("the generator has said nothing for 120 s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("the generator has ended") from None


class _Engine(VllmEngine):
    """Notes when weights come."""

    def __init__(self, config: Config, pipe: Connection) -> None:
        super().__init__(config)
        self._pipe = pipe
        self._last_staging = (0.0, 0.0)
        self._last_staged = StageTimes()

    async def stage(self, source: Source) -> StageTimes:
        began = time.monotonic()
        times = await super().stage(source)
        self._last_staging, self._last_staged = (began, time.monotonic()), times
        return times

    async def swap(self, weights: WeightId) -> SwapTimes:
        began = time.monotonic()
        times = await super().swap(weights)
        swapping = (began, time.monotonic())
        self._pipe.send(Update(weights, self._last_staging, self._last_staged, swapping, times))
        return times


class _Load:
    """Requests that follow one another."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._tasks: list[asyncio.Task[None]] = []
        self._in_flight: set[str] = set()
        self._num_requests = self._num_done = 0
        self.times: list[float] = []
        self.counts: list[int] = []

    async def set(self, num_requests: int) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = [asyncio.create_task(self._follow(i)) for i in range(num_requests)]
        before = self._num_tokens()
        while num_requests and self._num_tokens() < before + 4 * num_requests:
            await asyncio.sleep(LOOK_S)

    async def count(self) -> None:
        while True:
            self.times.append(time.monotonic())
            self.counts.append(self._num_tokens())
            await asyncio.sleep(LOOK_S)

    def take(self) -> TokenCount:
        found = TokenCount(self.times, self.counts)
        self.times, self.counts = [], []
        return found

    def _num_tokens(self) -> int:
        return self._num_done + sum(map(self._engine.num_sampled, self._in_flight))

    async def _follow(self, seed: int) -> None:
        """Of lengths that differ at first, so that they do not end together."""
        prompt = np.arange(4, 4 + PROMPT_TOKENS, dtype=np.int32)
        max_tokens = 1 + seed * 7 % RESPONSE_TOKENS
        while True:
            self._num_requests += 1
            name = f"bench-{self._num_requests}"
            self._in_flight.add(name)
            try:
                done = await self._engine.generate(
                    prompt,
                    Sampling(temperature=1.0, max_tokens=max_tokens),
                    seed=self._num_requests,
                    request_id=name,
                )
                self._num_done += len(done.token_ids)
            finally:
                self._in_flight.discard(name)
            max_tokens = RESPONSE_TOKENS


def _main(pipe: Connection, config: Path, address: str) -> None:
    try:
        asyncio.run(_generate(pipe, load_resolved(config), address))
    finally:
        os._exit(0)  # a thread may still read from the pipe


async def _generate(pipe: Connection, config: Config, address: str) -> None:
    settings = member_settings(config, "generator")
    hello = Hello.here("generator", name="generator-0", run_id=None, settings=settings)
    client = Client(address, hello=hello)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine = _Engine(config, pipe)
    async with Member(client, ended=ended, clock=PhaseClock("starting")) as member:
        await member.join(deadline_s=30)
        await engine.start()
        member.look = lambda: Heartbeat(state="generating", serving=[*engine.serving])
        weights_in = WeightsIn(
            engine,
            client,
            pins=EvalPins(),
            weights=config.weights,
            buffer_timeout_s=config.network.buffer_timeout_s,
            on_pause=lambda is_paused: None,
            on_swap=lambda times: None,
        )
        await weights_in.catch_up(WeightId(0, 0))
        load = _Load(engine)
        tasks = [asyncio.create_task(work) for work in (weights_in.run(), load.count())]
        pipe.send("ready")
        try:
            await _obey(pipe, engine, load)
        finally:
            for task in tasks:
                task.cancel()
            await load.set(0)
            await engine.close()
            await client.close()


async def _obey(pipe: Connection, engine: _Engine, load: _Load) -> None:
    while True:
        try:
            order, what = await asyncio.to_thread(pipe.recv)
        except EOFError:
            return
        if order == "load":
            await load.set(what)
            pipe.send("set")
        elif order == "tokens":
            pipe.send(load.take())
        else:
            await engine.stage(what)
            await asyncio.sleep(SETTLE_S)
            await engine.swap(what.weights)
