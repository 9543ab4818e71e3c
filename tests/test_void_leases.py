"""A generator gives up what nobody wants any more, at once, and goes on with the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from generator_scene import HELLO, VERIFIERS, Running, Scene, lease, make_config, run
from small_buffer import SmallBuffer

from asyncrl.client import Client
from asyncrl.clock import PhaseClock
from asyncrl.config.schema import Config
from asyncrl.types import Sampling
from asyncrl.versions import sample_seed
from generators.member import Member
from generators.rewards import RewardWorkers
from generators.scripted_engine import scripted_completion
from generators.tokens import Tokens


@pytest.fixture(scope="module")
def config(random_tiny_task: Path) -> Config:
    """Responses of up to 6 tokens that take a minute for each."""
    return make_config(random_tiny_task, generator__scripted__tokens_per_s=1 / 60)


def test_a_void_lease_is_given_up_at_once_and_its_places_go_to_another(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> SmallBuffer:
        leases = [lease(0), lease(1)]
        async with Scene(config, tokens, rewards, leases) as running:
            buffer, worker = running.buffer, running.worker
            await buffer.until(lambda: len(buffer.started) == 2)
            buffer.void = [[0, 1, 0]]
            await buffer.until(lambda: bool(buffer.failed))
            assert worker.look().num_running == 2
            await buffer.until(lambda: worker.look().held == [[0, 0, 0]])
            buffer.leases = [lease(2)]
            await buffer.until(lambda: len(buffer.started) == 3)
            assert worker.look().num_running == 4
            return buffer

    buffer = run(scenario())
    (failed,) = buffer.failed
    assert (failed.group, failed.attempt, failed.reason) == ([0, 1], 0, "its lease is void")
    assert not failed.content
    assert failed.lengths == [0, 0], "a token takes a minute"


def test_lengths_are_the_tokens_sampled_so_far_of_each_rollout(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    """The group is given up when its shortest response is finished and the others are not."""
    changed = make_config(
        Path(config.model.path).parent,
        data__max_response_length=400,
        generator__scripted__tokens_per_s=60,
        generator__scripted__length=400,
    )
    whole = [response_length(changed, tokens, sample) for sample in range(4)]
    first = whole.index(min(whole))

    async def scenario() -> SmallBuffer:
        async with Scene(changed, tokens, rewards, [lease(4, num_rollouts=4)]) as running:
            buffer, worker = running.buffer, running.worker
            await buffer.until(lambda: bool(buffer.started))
            await buffer.until(lambda: worker.look().num_running == 3)
            worker.give_up([[0, 4, 0]])
            await buffer.until(lambda: bool(buffer.failed))
            return buffer

    lengths = run(scenario()).failed[0].lengths
    assert lengths[first] == whole[first]
    others = [length for sample, length in enumerate(lengths) if sample != first]
    assert max(others) - min(others) <= 1, "they began together"
    assert whole[first] <= min(others) < sorted(whole)[1]


def response_length(config: Config, tokens: Tokens, sample: int) -> int:
    completion = scripted_completion(
        seed=sample_seed(3, "train", 0, 4, sample, 0),
        version=0,
        options=config.generator.scripted,
        sampling=Sampling(1.0, 400, tokens.end_ids),
        vocab_size=64,
    )
    return len(completion.token_ids)


def test_heartbeats_void_what_a_full_generator_would_never_hear_of(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    """All places are taken, so that no LeaseRequest is under way."""

    async def scenario() -> SmallBuffer:
        async with Scene(config, tokens, rewards, [lease(i) for i in range(4)]) as running:
            buffer, worker = running.buffer, running.worker
            await buffer.until(lambda: len(buffer.started) == 4)
            num_requests = len(buffer.requests)
            ended = asyncio.get_running_loop().create_future()
            client = Client(running.address, hello=HELLO)
            async with Member(client, ended=ended, clock=PhaseClock("starting")) as member:
                member.look, member.give_up = worker.look, worker.give_up
                await member.join(deadline_s=5)
                await buffer.until(lambda: len(buffer.beats) > 2)
                assert len(buffer.requests) == num_requests, "nothing else brings the word"
                buffer.void_held = [[0, 3, 0], [0, 1, 0], [0, 1, 7], [8, 8, 8]]
                await buffer.until(lambda: len(buffer.failed) == 2)
                await buffer.until(lambda: len(worker.look().held) == 2)
            await client.close()
            return buffer

    assert sorted(failed.group for failed in run(scenario()).failed) == [[0, 1], [0, 3]]


def test_a_later_attempt_of_the_same_group_goes_on(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> Running:
        leases = [lease(0, attempt=0), lease(0, attempt=1)]
        async with Scene(config, tokens, rewards, leases) as running:
            await running.buffer.until(lambda: len(running.buffer.started) == 2)
            running.buffer.void = [[0, 0, 0]]
            await running.buffer.until(lambda: bool(running.buffer.failed))
            assert running.worker.look().held == [[0, 0, 1]]
            assert running.worker.look().num_running == 2
            return running

    assert [failed.attempt for failed in run(scenario()).buffer.failed] == [0]


def test_scoring_ends_with_the_lease(config: Config, tokens: Tokens) -> None:
    """The only reward worker hangs for a group that is given up; another is scored by it then."""
    changed = make_config(
        Path(config.model.path).parent,
        reward__path=f"{VERIFIERS}:hang_if_asked",
        reward__timeout_s=300.0,
    )
    workers = RewardWorkers(changed.reward)
    workers.start()
    row = {"prompt": "___abc>", "source": "tiny", "answer": "hang", "extra": {}}

    async def scenario() -> SmallBuffer:
        async with Scene(changed, tokens, workers, [lease(0, row=row), lease(1)]) as running:
            buffer, worker = running.buffer, running.worker
            await buffer.until(lambda: len(buffer.started) == 2)
            await buffer.until(lambda: worker.look().state == "scoring")
            buffer.void = [[0, 0, 0]]
            await running.groups(1)
            return buffer

    try:
        buffer = run(scenario())
    finally:
        workers.close()
    assert [group.id for group in buffer.groups] == [(0, 1)]
    assert all(1 <= length <= 6 for length in buffer.failed[0].lengths), "sampled to their ends"


def test_a_group_on_its_way_to_the_buffer_is_not_given_up(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    quick = make_config(Path(config.model.path).parent)

    async def scenario() -> SmallBuffer:
        async with Scene(quick, tokens, rewards, [lease(0)]) as running:
            buffer, worker = running.buffer, running.worker
            buffer.on_submit = lambda submit: worker.give_up([[*submit.group, submit.attempt]])
            await running.groups(1)
            await buffer.until(lambda: not worker.look().held)
            await running.done()
            return buffer

    buffer = run(scenario())
    assert not buffer.failed


def test_a_run_that_is_done_needs_no_word_of_what_is_given_up(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> SmallBuffer:
        async with Scene(config, tokens, rewards, [lease(0), lease(1)]) as running:
            buffer = running.buffer
            await buffer.until(lambda: len(buffer.started) == 2)
            buffer.void, buffer.done = [[0, 0, 0], [0, 1, 0]], True
            await asyncio.wait_for(running.task, 5)
            return buffer

    assert not run(scenario()).groups
