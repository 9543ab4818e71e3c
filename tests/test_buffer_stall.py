"""A run that does not get on is given up within its bound, and says who and what is missing."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import Generator, Learner, make_config
from serving_buffer import play, run_to_end, serving

from asyncrl.config import Config
from asyncrl.journal import fates
from asyncrl.messages import Commit, End
from buffer.watch import MIN_WARN_S, Watchdog


def test_a_stall_is_told_once_at_a_tenth_of_the_time_and_then_ends_the_run() -> None:
    watchdog = Watchdog(3600.0, now=0.0)
    looks = [watchdog.look(now=float(now)) for now in range(0, 3602)]
    assert [i for i, found in enumerate(looks) if found == "warn"] == [361]
    assert [i for i, found in enumerate(looks) if found == "stalled"] == [3601]


def test_whatever_gets_on_starts_the_time_anew() -> None:
    watchdog = Watchdog(100.0, now=0.0)
    assert watchdog.look(now=MIN_WARN_S + 1) == "warn"
    watchdog.got_on(now=90.0)
    assert watchdog.look(now=110.0) == "fine"
    assert watchdog.look(now=90.0 + MIN_WARN_S + 1) == "warn"
    assert watchdog.look(now=190.0) == "fine"
    assert watchdog.look(now=191.0) == "stalled"


def test_a_short_limit_gives_no_warning_sooner_than_it_is_useful() -> None:
    watchdog = Watchdog(MIN_WARN_S / 2, now=0.0)
    looks = {watchdog.look(now=now / 10) for now in range(int(MIN_WARN_S * 5))}
    assert looks == {"fine"}


def test_time_in_which_the_buffer_itself_stood_still_does_not_count() -> None:
    watchdog = Watchdog(100.0, now=0.0)
    watchdog.excuse(3600.0)
    assert watchdog.look(now=3620.0) == "fine"
    assert watchdog.still_s(now=3620.0) == 20.0


def stalling(timeout_s: float, **settings: Any) -> Config:
    """A run that is given up after seconds, with leases that last longer than the test."""
    config = make_config(**settings)
    network = config.network.model_copy(update={"stall_timeout_s": timeout_s})
    return config.model_copy(update={"network": network})


async def ended(learner: Learner) -> str:
    end = await learner.end()
    assert end.failed and not end.stopped
    return end.reason


def test_a_run_without_learner_or_generator_says_that_none_has_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, stalling(1.0)) as here:
            began = time.monotonic()
            assert await here.task == 1
            assert 1.0 < time.monotonic() - began < 4
            assert here.run.end is not None
            reason = here.run.end.reason
            assert "nothing has got on for 1 s (network.stall_timeout_s)" in reason
            assert "step 0: need 4 groups, have 0, 0 in flight; no generator is connected" in reason
            assert "no learner has registered. Members: nobody. Start a learner" in reason

    play(scenario())


def test_a_run_without_generator_asks_for_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, stalling(1.0)) as here:
            learner = here.learner()
            await learner.register()
            reason = await ended(learner)
            assert "no generator is connected. Members: learner-0 (pid" in reason
            assert "Start a generator (asyncrl-launch generator CONFIG)" in reason
            assert await here.task == 1

    play(scenario())


def test_a_stuck_generator_is_named_with_its_groups_and_can_be_resumed_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, stalling(2.0)) as here:
            learner, generator = here.learner(), here.generator("generator-1")
            await learner.register()
            leases = await generator.lease(4)
            for lease in leases[2:]:
                await generator.submit(lease)
            for lease in leases[:2]:
                await generator.start(lease)
            generator.held = [[*lease.group, lease.attempt] for lease in leases[:2]]
            beats = asyncio.create_task(generator.beat_for_ever())
            reason = await ended(learner)
            found = re.search(
                r"step 0: need 4 groups, have 2, 2 in flight, oldest (\d+) s; first is group 0/0 "
                r"at generator-1 \(generating for \d+ s, last heard 0 s ago\)",
                reason,
            )
            assert found is not None, reason
            assert 2 <= int(found[1]) <= 4
            assert re.search(r"generator-1 \(pid \d+ on test\): generating", reason)
            assert "Look at generator-1: its log says what it does, SIGUSR1" in reason
            assert "checkpoint.resume=auto" in reason
            assert (await generator.beat()).done
            beats.cancel()
            assert await here.task == 1
        assert fates(tmp_path) == {"leased": 2, "ready": 2, "not_issued": 8}

    async def resumed() -> None:
        async with serving(tmp_path, make_config()) as here:
            learner, end = await run_to_end(here)
            assert not end.failed
            assert len(learner.trained_ids()) == 12

    play(scenario())
    play(resumed())
    assert fates(tmp_path) == {"trained": 12}
    assert "most recent call first" in capfd.readouterr().err


def test_a_learner_that_trains_for_ever_is_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = stalling(2.0, max_staleness=1, max_steps=1)
        async with serving(tmp_path, config) as here:
            learner, generator = here.learner("learner-7"), here.generator()
            await learner.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await learner.fetch(0)
            while here.run.end is None:
                await learner.beat("train step 0: backward")
                await generator.beat()
                await asyncio.sleep(0.1)
            reason = here.run.end.reason
            assert "step 0 is being trained by learner-7 (train step 0: backward" in reason
            assert "Look at the learner" in reason

    play(scenario())


def test_a_final_evaluation_that_nobody_makes_is_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = stalling(2.0, max_steps=1, eval__before_training=False)
        async with serving(tmp_path, config, val=3) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.commit()
            await generator.beat()
            [lease] = await generator.lease(1)
            assert lease.kind == "eval"
            beats = asyncio.create_task(generator.beat_for_ever())
            reason = await ended(learner)
            beats.cancel()
            expected = "evaluation of version 1: 0 of 3 rows, in flight at generator-0. Members"
            assert expected in reason
            assert "Look at generator-0" in reason

    play(scenario())


def test_a_version_that_was_never_published_is_the_learners_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, stalling(2.0), train=24) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.ask(Commit(inc=1, version=1, metrics={}))
            beats = asyncio.create_task(generator.beat_for_ever())
            learner.version = 1
            reason = await ended(learner)
            beats.cancel()
            assert "the next needs version 1, newest published 0, generator-0 serves 0" in reason
            assert "Look at the learner" in reason

    play(scenario())


async def slow_work(generator: Generator, *, number: int, pause_s: float) -> None:
    for _ in range(number):
        [lease] = await generator.lease(1)
        await asyncio.sleep(pause_s)
        await generator.submit(lease)


def test_groups_that_come_in_slowly_are_no_stall(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = stalling(1.0, max_steps=1)
        async with serving(tmp_path, config) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            beats = asyncio.create_task(generator.beat_for_ever())
            await slow_work(generator, number=4, pause_s=0.6)
            end = await learner.train()
            assert isinstance(end, End) and not end.failed
            beats.cancel()

    play(scenario())


def test_a_stall_is_told_in_the_log_once_before_it_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, stalling(400.0)) as here:
            began = time.monotonic()
            for later in (39, 41, 42, 60):
                here.run.tick(now=began + later)
            assert here.run.end is None

    with caplog.at_level(logging.WARNING):
        play(scenario())
    [warning] = [r.getMessage() for r in caplog.records if "nothing has got on" in r.getMessage()]
    assert "after 400 s the run is given up. Waiting for step 0: need 4 groups" in warning
