"""What the buffer has said, it still knows after its end; what it did not know, it makes up for."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from scripted_peers import Learner, make_config
from serving_buffer import play, serving

from asyncrl.journal import open_read_only
from asyncrl.messages import End, Fetch, Heartbeat, WatchWeights
from asyncrl.report.reading import why_failed
from buffer.status import status_values


@contextmanager
def disk_that_hangs(run_dir: Path) -> Iterator[None]:
    """Nobody else can write to the journal; for up to 5 s SQLite waits for that."""
    blocker = sqlite3.connect(run_dir / "journal.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    yield
    blocker.execute("ROLLBACK")
    blocker.close()


def test_no_generator_hears_of_weights_before_they_are_in_the_journal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), max_wait_s=5) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            beat = Heartbeat(state="generating", serving=[0, 0])
            await generator.ask(beat)
            watching = asyncio.create_task(generator.ask(WatchWeights(have=[0, 0])))
            await generator.status()  # behind the watch
            with disk_that_hangs(tmp_path):
                publishing = asyncio.create_task(learner.publish(0))
                while here.run.books.training.newest.location == "":
                    await asyncio.sleep(0.01)
                assert (await generator.ask(beat)).inc == 0
                done, _ = await asyncio.wait({publishing, watching}, timeout=0.5)
                assert done == set()
            await publishing
            assert (await watching).location == "/w/0"
            assert (await generator.ask(beat)).inc == 1

    play(scenario())


def test_an_evaluation_that_was_running_or_due_is_made_after_a_restart(tmp_path: Path) -> None:
    config = make_config(max_staleness=1, eval__every=1, eval__before_training=False)

    async def first_life() -> None:
        async with serving(tmp_path, config, train=40, val=2) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for step in range(3):
                leases = [x for x in await generator.lease(9) if x.kind == "train"]
                for lease in leases:
                    await generator.submit(lease)
                await learner.fetch(step)
                await learner.commit()
                await generator.beat()
            assert here.run.books.evaluations.versions_due == [1, 3]

    async def second_life() -> None:
        async with serving(tmp_path, config, train=40, val=2) as here:
            assert here.run.books.evaluations.versions_due == [1, 3]
            generator = here.generator()
            await generator.beat()
            for _ in range(4):
                [lease] = await generator.lease(1)
                await generator.submit(lease)
            evals = status_values(here.run, now=0.0)["evals"]
            assert [record["step"] for record in evals] == [1, 3]

    play(first_life())
    play(second_life())


def test_a_commit_that_never_arrived_counts_as_if_it_had(tmp_path: Path) -> None:
    """The learner was killed with a checkpoint of a version that the buffer had not heard of."""
    config = make_config(max_staleness=1, eval__every=2, eval__before_training=False)

    async def scenario() -> None:
        async with serving(tmp_path, config, train=40, val=1) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.commit()
            await learner.fetch(1)
            await here.learner("learner-1").register(2)
            values = status_values(here.run, now=0.0)
            assert (values["version"], values["trained"]) == (2, 8)
            assert sum(values["staleness"].values()) == 8 * 2 * 3
            assert here.run.books.evaluations.versions_due == [2]

    play(scenario())


def test_a_damaged_group_fails_the_run_at_its_step_and_is_named(tmp_path: Path) -> None:
    config = make_config(max_staleness=1)

    async def first_life() -> None:
        async with serving(tmp_path, config, train=40) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            await learner.fetch(0)

    async def second_life() -> None:
        async with serving(tmp_path, config, train=40) as here:
            learner = here.learner()
            await learner.register()
            assert (await learner.fetch(0)).type == "batch"
            await learner.commit()
            end = await learner.fetch(1)
            assert isinstance(end, End)
            assert end.failed
            assert "of step 1 cannot be read: " in end.reason
            assert "segments/000001 is damaged: the " in end.reason
            assert f"from byte {damaged} on" in end.reason
            assert "a checkpoint of this run as checkpoint.resume" in end.reason
            assert why_failed(tmp_path) == end.reason

    play(first_life())
    with closing(open_read_only(tmp_path)) as journal:
        query = "SELECT offset FROM groups ORDER BY number LIMIT 1 OFFSET 5"
        (damaged,) = journal.execute(query).fetchone()
    segment = tmp_path / "segments" / "000001"
    data = bytearray(segment.read_bytes())
    data[damaged + 40] ^= 1
    segment.write_bytes(data)
    play(second_life())


async def ask_for(learner: Learner, step: int) -> list[int]:
    """The versions of the evaluations that ride on the reply."""
    reply = await learner.ask(Fetch(inc=learner.inc, step=step))
    return [record.step for record in reply.records if record.name == "eval"]


def test_every_evaluation_is_told_to_a_learner_once(tmp_path: Path) -> None:
    """Also one that ends while none is there, and however often the buffer is restarted."""
    config = make_config(max_staleness=1, eval__every=1, eval__before_training=False)

    async def first_life() -> None:
        async with serving(tmp_path, config, train=40, val=1) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            for step in range(2):
                await learner.fetch(step)
                await learner.commit()
            await generator.beat()
            [first] = [x for x in await generator.lease(9) if x.kind == "eval"]
            await generator.submit(first)  # of version 1; nobody asks any more
            learner = here.learner("learner-1")
            await learner.register(2)
            assert await ask_for(learner, 2) == [1]
            assert await ask_for(learner, 2) == []

    async def second_life() -> None:
        async with serving(tmp_path, config, train=40, val=1) as here:
            learner, generator = here.learner("learner-2"), here.generator()
            await learner.register(2)
            assert await ask_for(learner, 2) == []
            await generator.beat()
            [second] = [x for x in await generator.lease(9) if x.kind == "eval"]
            await generator.submit(second)
            assert await ask_for(learner, 2) == [2]

    play(first_life())
    play(second_life())


def test_rewards_whose_sum_is_no_number_break_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1)) as here:
            learner = here.learner()
            await learner.register()
            generator = here.generator(reward_of=lambda id, sample: 1.7e308 * sample)
            worker = asyncio.create_task(generator.work())
            end = await learner.train()
            await worker
            assert end is not None and not end.failed
            assert learner.records[0].values["reward_mean"] == pytest.approx(1.7e308 / 2)

    play(scenario())
