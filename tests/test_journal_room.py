"""The cap of the journal: disk stays under it, leases wait for room, checkpoints make it, and a run
that nothing can help says so."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import Generator, Learner, make_config, make_group, mixed, rows
from serving_buffer import Serving, play, serving_run

from asyncrl.config import Config
from asyncrl.journal.cap import largest_group_bytes
from asyncrl.messages import Checkpointed, Commit, Committed, Lease, Verdict, Waiting
from asyncrl.types import GroupId
from asyncrl.wire import encode_group
from buffer.room import open_journal
from buffer.run import Run

LENGTH = 2000


def small_config(**settings: Any) -> Config:
    """Groups of 4 responses of 2,000 tokens, 110 kB each."""
    base: dict[str, Any] = {
        "max_staleness": 1,
        "group_size": 4,
        "data__max_response_length": LENGTH,
        "data__max_prompt_length": 8,
        "buffer__max_journal_gb": 0.004,
        "checkpoint__every": 0,
    }
    return make_config(**(base | settings))


class FullGenerator(Generator):
    """Its responses have their full length."""

    async def submit(self, lease: Lease, *, version: int | None = None) -> Verdict:
        group = make_group(
            lease,
            version=self.serving.version if version is None else version,
            inc=self.serving.inc,
            reward_of=self.reward_of,
            length=LENGTH,
        )
        return await self.submit_frame(lease, encode_group(group))


class SavingLearner(Learner):
    """Saves a checkpoint whenever it is asked for one, and keeps the newest `keep_last`."""

    def __init__(self, address: str, name: str, *, keep_last: int = 2) -> None:
        super().__init__(address, name)
        self.keep_last = keep_last
        self.saved: list[int] = []

    async def commit(self) -> bool:
        self.version += 1
        message = Commit(inc=self.inc, version=self.version, metrics={})
        reply: Committed = await self.ask(message)
        await self.publish(self.version)
        if reply.checkpoint:
            await self.save()
        return reply.stop

    async def save(self) -> None:
        self.saved.append(self.version)
        versions = self.saved[-self.keep_last :]
        await self.ask(Checkpointed(inc=self.inc, versions=versions))


@contextlib.asynccontextmanager
async def capped(run_dir: Path, config: Config, *, train: int) -> AsyncIterator[Serving]:
    journal = open_journal(run_dir, config)
    try:
        run = Run(config, train=rows(train), val=[], journal=journal, now=time.monotonic())
        async with serving_run(run, max_wait_s=0.3) as here:
            yield here
    finally:
        journal.close()


def disk_bytes(run_dir: Path) -> int:
    total = 0
    for file in (run_dir / "segments").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


async def train(here: Serving, learner: Learner, *, stop_at: int, reward_of: Any = mixed) -> None:
    generator = FullGenerator(here.server.address, "generator-0", reward_of=reward_of)
    here.peers += [learner, generator]
    await learner.register()
    worker = asyncio.create_task(generator.work(slots=3))
    await learner.train(stop_at=stop_at)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)


def test_200_megabytes_through_a_cap_of_20_leave_the_disk_under_it(tmp_path: Path) -> None:
    config = small_config(buffer__max_journal_gb=0.02, group_size=16, prompts_per_step=4)
    num_steps = 120
    peaks = []

    class Watched(SavingLearner):
        async def commit(self) -> bool:
            peaks.append(disk_bytes(tmp_path))
            return await super().commit()

    async def scenario() -> None:
        async with capped(tmp_path, config, train=4 * num_steps + 8) as here:
            learner = Watched(here.server.address, "learner-0")
            await train(here, learner, stop_at=num_steps)
            moved = num_steps * 4 * largest_group_bytes(config)
            assert moved > 199e6
            assert 5e6 < max(peaks) <= 20e6
            assert len(learner.saved) < num_steps

    play(scenario())


@pytest.mark.parametrize(
    ("staleness", "keep_last", "order"), [(0, 1, "fifo"), (1, 2, "fifo"), (2, 1, "ready")]
)
def test_the_least_cap_that_is_allowed_is_enough_for_a_run_that_filters(
    tmp_path: Path, staleness: int, keep_last: int, order: str
) -> None:
    settings: dict[str, Any] = {
        "max_staleness": staleness,
        "checkpoint__keep_last": keep_last,
        "buffer__order": order,
    }
    with pytest.raises(ValueError, match="is too little") as refusal:
        open_and_close(tmp_path, small_config(buffer__max_journal_gb=0.0001, **settings))
    least = float(str(refusal.value).split("Use ")[1].split()[0])
    config = small_config(buffer__max_journal_gb=least, **settings)

    def two_of_three_alike(id: GroupId, sample: int) -> float:
        return float(sample % 2) if id.position % 3 == 0 else 1.0

    async def scenario() -> None:
        async with capped(tmp_path, config, train=600) as here:
            learner = SavingLearner(here.server.address, "learner-0", keep_last=keep_last)
            await train(here, learner, stop_at=12, reward_of=two_of_three_alike)
            assert disk_bytes(tmp_path) <= least * 1e9

    play(scenario())


def open_and_close(run_dir: Path, config: Config) -> None:
    journal = open_journal(run_dir, config)
    try:
        Run(config, train=rows(40), val=[], journal=journal, now=0.0)
    finally:
        journal.close()


def test_a_cap_below_what_the_run_needs_is_refused_with_the_numbers(tmp_path: Path) -> None:
    config = small_config(buffer__max_journal_gb=0.001)
    with pytest.raises(ValueError) as refusal:
        open_and_close(tmp_path, config)
    assert str(refusal.value) == (
        "buffer.max_journal_gb: 0.001 is too little: the run may have to keep 5 steps "
        "(checkpoint.keep_last + 2 * max_staleness + 1) of 4 groups (prompts_per_step) of "
        "0.000106 GB (group_size * data.max_response_length * 13 bytes and the prompt). "
        "Use 0.003 or more, or make one of these smaller"
    )


def test_without_room_nothing_is_leased_and_a_waiting_learner_is_asked_for_a_checkpoint(
    tmp_path: Path,
) -> None:
    """Only the second checkpoint lets the first steps go: the learner kept those before it."""

    async def scenario() -> None:
        async with capped(tmp_path, small_config(), train=200) as here:
            learner = Learner(here.server.address, "learner-0")
            generator = FullGenerator(here.server.address, "generator-0")
            here.peers += [learner, generator]
            await learner.register()
            waiting = None
            while waiting is None:
                for lease in await generator.lease(4):
                    await generator.submit(lease)
                learner.waits.clear()
                fetching = asyncio.create_task(learner.fetch(learner.version))
                while not (fetching.done() or learner.waits):
                    await asyncio.sleep(0.01)
                waiting = next((wait for wait in learner.waits if wait.checkpoint), None)
                if waiting is None:
                    await fetching
                    await learner.commit()
                    await generator.beat()
            assert isinstance(waiting, Waiting)
            assert 3e6 < disk_bytes(tmp_path) <= 4e6
            assert await generator.lease(4) == []
            leasing = asyncio.create_task(generator.lease(4))
            await learner.ask(Checkpointed(inc=learner.inc, versions=[learner.version]))
            assert len(await leasing) == 4
            assert disk_bytes(tmp_path) < 1e6
            fetching.cancel()

    play(scenario())


def test_a_run_that_no_checkpoint_can_help_fails_with_the_numbers_and_can_go_on(
    tmp_path: Path,
) -> None:
    config = small_config(buffer__keep_payloads="always")

    async def first() -> None:
        async with capped(tmp_path, config, train=200) as here:
            learner = SavingLearner(here.server.address, "learner-0")
            await train(here, learner, stop_at=1000)
            end = here.run.end
            assert end is not None and end.failed
            assert learner.saved == []
            for part in (
                "the journal is full: 0.00396 GB of finished groups are stored",
                "buffer.max_journal_gb=0.004",
                "may take 0.000106 GB",
                "buffer.keep_payloads=always lets none go",
                "checkpoint.resume=auto",
            ):
                assert part in end.reason
            assert disk_bytes(tmp_path) <= 4e6

    async def second() -> None:
        more = small_config(buffer__keep_payloads="always", buffer__max_journal_gb=0.008)
        async with capped(tmp_path, more, train=200) as here:
            learner = SavingLearner(here.server.address, "learner-1")
            await train(here, learner, stop_at=12)
            assert here.run.books.training.position == 12

    play(first())
    play(second())


def test_above_half_of_the_cap_filtered_groups_are_counted_but_not_stored(tmp_path: Path) -> None:
    def alike(id: GroupId, sample: int) -> float:
        return 1.0

    async def scenario() -> None:
        async with capped(tmp_path, small_config(), train=200) as here:
            generator = FullGenerator(here.server.address, "generator-0", reward_of=alike)
            here.peers.append(generator)
            for _ in range(20):
                for lease in await generator.lease(4):
                    assert (await generator.submit(lease)).verdict == "filtered"
            groups = here.run.books.ledger.groups.by_number.values()
            stored = [group for group in groups if group.payload is not None]
            assert 0 < len(stored) < len(groups) == 80
            assert disk_bytes(tmp_path) <= 2e6

    play(scenario())
