"""Clocks: a process is always in exactly one phase, and says rightly for whom it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import make_config
from serving_buffer import play, serving

from asyncrl.clock import PhaseClock
from asyncrl.messages import Hello, Message, Ok
from asyncrl.thread_client import ThreadClient
from asyncrl.transport import Server
from asyncrl.wire import Packet
from buffer.loop_clock import LoopClock


def test_a_phase_gives_way_to_another_only_where_it_is_the_present_one() -> None:
    clock = PhaseClock("start")
    clock.instead("wait_batch", "wait_buffer")
    assert clock.phase == "start"
    clock.enter("wait_batch")
    clock.instead("wait_batch", "wait_buffer")
    assert clock.phase == "wait_buffer"
    assert sum(clock.total().values()) < 1.0


def run_with(clock: LoopClock, work: Coroutine[Any, Any, None]) -> dict[str, float]:
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        runner.run(work)
    return clock.phases.total()


def test_an_event_loop_serves_or_waits_and_both_add_up_to_its_life() -> None:
    clock, began = LoopClock(), time.monotonic()

    async def work() -> None:
        clock.serve(lambda: "waiting for requests")
        for _ in range(4):
            await asyncio.sleep(0.05)
            ends = time.monotonic() + 0.05
            while time.monotonic() < ends:
                pass

    seconds = run_with(clock, work())
    assert seconds["serving"] >= 0.2
    assert seconds["waiting for requests"] >= 0.2
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - began, abs=0.05)


def test_for_whom_the_loop_waits_is_asked_again_after_a_change_only() -> None:
    clock, answers = LoopClock(), iter(["waiting for generators", "waiting for the learner"])

    async def work() -> None:
        clock.serve(lambda: next(answers))
        for _ in range(3):
            await asyncio.sleep(0.02)
        clock.changed()
        await asyncio.sleep(0.02)

    seconds = run_with(clock, work())
    assert seconds["waiting for generators"] >= 0.06
    assert seconds["waiting for the learner"] >= 0.02


def test_an_idle_buffer_says_for_whom_the_run_waits(tmp_path: Path) -> None:
    """Two groups a step, and no staleness: the sides take turns."""
    config = make_config(prompts_per_step=2, max_staleness=0, max_steps=2)

    async def scenario() -> None:
        async with serving(tmp_path, config) as here:
            state = here.run.watch.waiting.state
            learner, generator = here.learner(), here.generator()
            await learner.register()
            leases = await generator.lease(2)
            assert state() == "waiting for requests"  # the learner has asked for nothing yet
            ahead = asyncio.create_task(learner.fetch(0))
            while here.run.watch.waiting.learner_s(now=time.monotonic()) is None:
                await asyncio.sleep(0.01)
            assert state() == "waiting for generators"
            for lease in leases:
                await generator.submit(lease)
            await ahead
            assert state() == "waiting for the learner"  # nothing may be leased before its commit
            await learner.commit()
            assert state() == "waiting for requests"
            here.run.watch.waiting.asked(1, now=time.monotonic())
            assert state() == "waiting for generators"

    play(scenario())


def test_a_client_hears_when_the_buffer_goes_and_when_it_is_back() -> None:
    heard: list[bool] = []

    async def answer(peer: bytes, packet: Packet) -> Message:
        return Ok()

    async def until(count: int) -> None:
        ends = time.monotonic() + 10
        while len(heard) < count:
            assert time.monotonic() < ends, heard
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        server = Server("tcp://127.0.0.1:0", answer)
        await server.close()
        client = ThreadClient(server.address, hello=Hello.here("monitor", name="it", run_id=None))
        client.heed_line(heard.append)
        for times in (1, 3):
            server = Server(server.address, answer)
            await until(times)
            await server.close()
            await until(times + 1)
        await asyncio.to_thread(client.close)

    asyncio.run(scenario())
    assert heard == [True, False, True, False]
