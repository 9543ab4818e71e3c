"""A real buffer and a real generator, where some responses are slow: what is let go is given up,
and what is stuck is left out."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from generator_scene import HELLO, make_config
from serving_buffer import play, serving_run

from asyncrl.client import Client
from asyncrl.clock import PhaseClock
from asyncrl.config.schema import Config
from asyncrl.journal import Journal
from buffer.groups import State
from buffer.run import Run
from generators.member import Member
from generators.rewards import RewardWorkers
from generators.scripted_engine import ScriptedEngine
from generators.tokens import Tokens
from generators.worker import Worker


async def generate(config: Config, address: str) -> None:
    """A generator from its hello to the end of the run."""
    tokens, rewards = Tokens(config), RewardWorkers(config.reward)
    await asyncio.to_thread(rewards.start)  # before the clock of any lease runs
    client, clock = Client(address, hello=HELLO), PhaseClock("starting")
    ended = asyncio.get_running_loop().create_future()
    engine = ScriptedEngine(config.generator.scripted, vocab_size=64)
    worker = Worker(
        *(config, client, engine, tokens, rewards),
        ended=ended,
        clock=clock,
        on_swap=lambda: None,
    )
    try:
        async with Member(client, ended=ended, clock=clock) as member:
            member.look, member.give_up = worker.look, worker.give_up
            await member.join(deadline_s=5)
            await worker.run()
    finally:
        await client.close()
        rewards.close()
        tokens.close()


async def train(run: Run, config: Config) -> list[dict[str, Any]]:
    """The whole run, with one generator; what the buffer recorded of each step."""
    async with serving_run(run, max_wait_s=0.3) as here:
        learner = here.learner()
        await learner.register()
        generator = asyncio.create_task(generate(config, here.server.address))
        await learner.train()
        await generator
        return [record.values for record in learner.records if record.name == "buffer"]


class Finished:
    """A run of `num_prompts` prompts to its end: its records and its prompts by state."""

    def __init__(self, config: Config, directory: Path, *, num_prompts: int) -> None:
        row = {"prompt": "___abc>", "source": "tiny", "answer": "cba", "extra": {}}
        journal = Journal(directory)
        rows = [row] * num_prompts
        run = Run(config, train=rows, val=[], journal=journal, now=time.monotonic())
        began = time.monotonic()
        self.values: list[dict[str, Any]] = []

        async def scenario() -> None:
            self.values += await train(run, config)

        try:
            play(scenario())
        finally:
            journal.close()
        self.took_s = time.monotonic() - began
        self.counts = run.books.ledger.groups.counts

    def total(self, name: str) -> int:
        return sum(values[name] for values in self.values)


def slow_config(tiny: Path, **changes: Any) -> Config:
    """A slow response takes ten seconds for each token."""
    return make_config(
        tiny,
        max_staleness=1,
        prompts_per_step=4,
        buffer__zero_variance="train",
        network__heartbeat_s=0.3,
        generator__scripted__slow_share=0.1,
        generator__scripted__slow_factor=2000,
        **changes,
    )


def test_groups_that_are_let_go_are_given_up_and_their_lengths_are_told(
    random_tiny_task: Path, tmp_path: Path
) -> None:
    config = slow_config(random_tiny_task, buffer__order="ready", buffer__on_late="drop")
    finished = Finished(config, tmp_path, num_prompts=40)
    assert finished.counts[State.STALE] >= 2
    assert finished.counts[State.TRAINED] + finished.counts[State.STALE] == 40
    assert finished.total("num_late") == finished.counts[State.STALE]
    assert any("late_length_mean" in values for values in finished.values)
    assert finished.total("num_rollouts_lost") == 0
    assert finished.took_s < 30


def test_groups_with_a_stuck_rollout_are_trained_without_it(
    random_tiny_task: Path, tmp_path: Path
) -> None:
    config = slow_config(random_tiny_task, group_size=4, buffer__lease_timeout_s=2.0)
    finished = Finished(config, tmp_path, num_prompts=12)
    assert finished.counts[State.TRAINED] == 12
    assert finished.total("num_rollouts_lost") >= 2
    assert finished.total("num_failed") == 0
    assert finished.took_s < 30
