"""A drained run stops where it stands, tells everybody, and goes on later as if nothing were."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from scripted_peers import make_config
from serving_buffer import play, run_to_end, serving

from asyncrl.journal import fates
from asyncrl.messages import Batch, End
from asyncrl.types import GroupId
from buffer.ending import LEAVE_S, Farewell
from buffer.server import STOPPED
from buffer.status import status_values


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("drained_at", [0, 1, 3])
def test_a_drained_run_goes_on_and_trains_every_prompt_once(
    tmp_path: Path, max_staleness: int, drained_at: int
) -> None:
    config = make_config(max_steps=5, max_staleness=max_staleness)
    trained: list[GroupId] = []

    async def first_half() -> None:
        async with serving(tmp_path, config, train=24) as here:
            learner = here.learner()
            await learner.register()
            workers = [
                asyncio.create_task(here.generator(f"generator-{i}").work()) for i in range(2)
            ]
            await learner.train(stop_at=drained_at)
            here.server.drain("SIGINT")
            assert await learner.commit()
            end = await learner.end()
            assert end.stopped and not end.failed
            assert end.reason == (
                f"stopped by SIGINT at version {drained_at + 1}; go on with the same command and "
                "checkpoint.resume=auto"
            )
            await asyncio.gather(*workers)
            assert await here.task == STOPPED
            trained.extend(id for id in learner.trained_ids() if id.position < 4 * learner.version)
        found = fates(tmp_path)
        assert found["trained"] == 4 * (drained_at + 1)
        assert "cancelled" not in found
        assert sum(found.values()) == 24

    async def second_half() -> None:
        async with serving(tmp_path, config, train=24) as here:
            learner = here.learner("learner-1")
            await learner.register(drained_at + 1)
            worker = asyncio.create_task(here.generator("generator-9").work())
            end = await learner.train()
            await worker
            assert end is not None and not end.stopped
            assert await here.task == 0
            trained.extend(learner.trained_ids())

    play(first_half())
    play(second_half())
    assert trained == [GroupId(0, i) for i in range(20)]
    assert fates(tmp_path) == {"trained": 20, "not_issued": 4}


def test_a_learner_in_the_middle_of_a_step_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=1), train=24) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            worker = asyncio.create_task(generator.work())
            assert isinstance(await learner.fetch(0), Batch)
            ahead = asyncio.create_task(learner.fetch(5))
            here.server.drain("SIGINT")
            assert isinstance(await ahead, End)  # and still trains step 0
            await worker
            for _ in range(10):
                await learner.beat("train step 0: backward")
                await asyncio.sleep(0.1)
            assert not here.task.done()
            assert await learner.commit()
            assert (await learner.end()).stopped
            assert await here.task == STOPPED

    play(scenario())


def test_no_batch_leaves_a_run_that_is_being_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=2), train=24) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(12):
                await generator.submit(lease)
            assert isinstance(await learner.fetch(0), Batch)
            assert isinstance(await learner.fetch(1), Batch)
            here.server.drain("SIGINT")
            for step in (0, 1, 2, 7):
                reply = await learner.fetch(step)
                assert isinstance(reply, End) and reply.stopped
            assert status_values(here.run, now=0.0)["counts"] == {"assigned": 8, "ready": 4}

    play(scenario())


def test_a_batch_that_was_fetched_ahead_and_will_not_be_trained_keeps_nobody(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=1), train=24) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            for step in (0, 1):
                assert isinstance(await learner.fetch(step), Batch)
            here.server.drain("SIGINT")
            assert await learner.commit()
            assert (await learner.end()).stopped
            assert (await generator.beat()).done
            began = time.monotonic()
            assert await here.task == STOPPED
            assert time.monotonic() - began < 3
        assert fates(tmp_path) == {"trained": 4, "assigned": 4, "not_issued": 16}

    play(scenario())


def test_idle_members_hear_of_a_stop_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), max_wait_s=5) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            held = await generator.lease(4)
            waiting = asyncio.create_task(learner.fetch(0))
            asking = asyncio.create_task(generator.work())
            await asyncio.sleep(0.2)
            began = time.monotonic()
            here.server.drain("SIGINT")
            end = await waiting
            assert isinstance(end, End) and end.stopped
            await asking
            assert await here.task == STOPPED
            assert time.monotonic() - began < 3
        assert fates(tmp_path) == {"leased": len(held), "not_issued": 8}

    play(scenario())


def test_a_stop_without_members_takes_no_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            began = time.monotonic()
            here.server.drain("SIGINT")
            assert await here.task == STOPPED
            assert time.monotonic() - began < 2

    play(scenario())


def test_a_run_that_has_ended_cannot_be_stopped_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1)) as here:
            _, end = await run_to_end(here)
            here.server.drain("SIGINT")
            assert not end.stopped
            assert await here.task == 0
        assert fates(tmp_path) == {"trained": 4, "not_issued": 8}

    play(scenario())


def test_a_generator_that_is_still_starting_hears_of_the_end_with_its_first_heartbeat(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1)) as here:
            late = here.generator("late")
            await late.status()  # has said hello, and loads its model
            await run_to_end(here, generators=1)
            assert not here.task.done()
            assert (await late.beat("loading the model")).done
            assert await here.task == 0

    play(scenario())


def test_a_buffer_that_stood_still_gives_others_the_time_to_hear_of_the_end(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            await here.generator().beat()
            farewell = Farewell(here.run.books, here.run.ending, here.run.watch, now=0.0)
            here.run.ending.stop("the test")
            assert not farewell.may_leave(now=0.0)
            farewell.excuse(3600.0)
            assert not farewell.may_leave(now=3600.0 + LEAVE_S)
            assert farewell.may_leave(now=3601.0 + LEAVE_S)

    play(scenario())
