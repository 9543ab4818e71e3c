"""Lives of all three programs, cut short at random: every prompt once, batches never change."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from scripted_peers import Generator, Learner, make_config
from serving_buffer import Serving, play, serving

from asyncrl.config import Config
from asyncrl.journal import fates
from asyncrl.types import GroupId
from asyncrl.wire import decode_group

NUM_ROWS = 44
MAX_LIVES = 40


class Lives:
    """One run through many lives; `batches` are the frames of each step, as first sent."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config = config
        self.random = random.Random(seed)
        self.batches: dict[int, tuple[bytes, ...]] = {}
        self.num_learners = 0
        self.num_generators = 0
        self.checkpoint = 0
        self.is_over = False

    async def one_life(self, here: Serving) -> None:
        """From the start of a buffer to its end, which may be the end of the run."""
        workers = [self.generator(here) for _ in range(2)]
        for accident in self.random.choices(["learner", "leave", "silence"], k=3):
            if await self.train(here, num_steps=self.random.randint(0, 2)):
                return
            if accident != "learner":
                workers.append(await self.replace_generator(here, workers, accident))
        if self.random.random() < 0.5:
            here.server.drain("the test")
            await self.train(here, num_steps=9)

    def generator(self, here: Serving) -> tuple[Generator, asyncio.Task[None]]:
        self.num_generators += 1
        generator = here.generator(f"generator-{self.num_generators}")
        return generator, asyncio.create_task(generator.work())

    async def replace_generator(
        self, here: Serving, workers: list[tuple[Generator, asyncio.Task[None]]], how: str
    ) -> tuple[Generator, asyncio.Task[None]]:
        generator, worker = workers.pop(0)
        worker.cancel()
        await generator.lease(2)  # and is gone with them
        if how == "leave":
            await generator.leave()
        return self.generator(here)

    async def train(self, here: Serving, *, num_steps: int) -> bool:
        """A learner from a checkpoint, for some steps. True: the run has ended, or is stopped."""
        self.num_learners += 1
        learner = here.learner(f"learner-{self.num_learners}")
        await learner.register(self.checkpoint)
        end = await learner.train(stop_at=learner.committed + num_steps)
        self.compare(learner)
        self.checkpoint = self.random.randint(self.checkpoint, learner.version)
        self.is_over = end is not None and not end.stopped
        return end is not None

    def compare(self, learner: Learner) -> None:
        for step, (batch, frames) in learner.batches.items():
            assert self.batches.setdefault(step, frames) == frames
            ages = [step - group.oldest_version for group in learner.groups(step)]
            assert max(ages) <= batch.max_staleness


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_whatever_dies_every_prompt_is_trained_once_and_batches_never_change(
    tmp_path: Path, max_staleness: int, seed: int
) -> None:
    config = make_config(max_staleness=max_staleness, network__heartbeat_s=0.1)
    lives = Lives(config, seed)

    async def one_life() -> None:
        async with serving(tmp_path, config, train=NUM_ROWS) as here:
            await lives.one_life(here)

    for _ in range(MAX_LIVES):
        play(one_life())
        if lives.is_over:
            break
    assert lives.is_over
    assert lives.num_learners > 4
    assert fates(tmp_path) == {"trained": NUM_ROWS}
    frames = [frame for step in sorted(lives.batches) for frame in lives.batches[step]]
    ids = [decode_group(frame).id for frame in frames]
    assert ids == [GroupId(0, position) for position in range(NUM_ROWS)]
