"""A group whose rollouts are not all to be had goes on with the others, or says why it cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from generator_scene import VERIFIERS, Scene, lease, make_config, run
from small_buffer import SmallBuffer

from asyncrl.config.schema import Config
from asyncrl.messages import Lease
from asyncrl.types import Completion, Int32Array, RolloutGroup, Sampling, WeightId
from asyncrl.versions import sample_seed
from generators.engine import RequestError
from generators.groups import ROLLOUT_SHARE, GroupMaker
from generators.rewards import RewardWorkers
from generators.scripted_engine import ScriptedEngine, scripted_completion
from generators.tokens import Tokens
from generators.work import Room, Work


@pytest.fixture(scope="module")
def config(random_tiny_task: Path) -> Config:
    return make_config(random_tiny_task)


ONE = "rollouts failed: 1 failed 3 times (out of luck)"


def seed_of(position: int, sample: int, *, kind: str = "train") -> int:
    return sample_seed(3, kind, 0, position, sample, 0)


class FaultyEngine(ScriptedEngine):
    """Misbehaves for chosen samples of group 0/0, told by their seeds: `fail` always, `nan`
    logprobs, `hang` for ever."""

    def __init__(self, config: Config, faults: dict[str, set[int]], *, kind: str = "train") -> None:
        super().__init__(config.generator.scripted, vocab_size=64)
        self.faults = {
            seed_of(0, sample, kind=kind): fault
            for fault, samples in faults.items()
            for sample in samples
        }
        self.num_cancelled = 0
        self.num_hanging = 0

    async def generate(
        self, prompt_ids: Int32Array, sampling: Sampling, *, seed: int, request_id: str
    ) -> Completion:
        fault = self.faults.get(seed)
        if fault == "fail":
            raise RequestError("out of luck")
        if fault == "hang":
            await self._hang()
        completion = await super().generate(prompt_ids, sampling, seed=seed, request_id=request_id)
        if fault == "nan":
            completion.logprobs[-1] = np.nan
        return completion

    async def _hang(self) -> None:
        self.num_hanging += 1
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def check_survivors(group: RolloutGroup, samples: list[int], config: Config, end: Tokens) -> None:
    """The group holds exactly these samples, in order, each with the tokens of its own seed."""
    expected = [
        scripted_completion(
            seed=seed_of(0, sample),
            version=0,
            options=config.generator.scripted,
            sampling=Sampling(1.0, 6, end.end_ids),
            vocab_size=64,
        )
        for sample in samples
    ]
    found = [rollout.token_ids.tolist() for rollout in group.rollouts]
    assert found == [completion.token_ids.tolist() for completion in expected]


async def outcome(scene: Scene) -> tuple[SmallBuffer, int]:
    """The buffer when it has a group or a failure, and the places that are taken then."""
    async with scene as running:
        buffer = running.buffer
        await buffer.until(lambda: bool(buffer.groups or buffer.failed))
        return buffer, running.worker.look().num_running


@pytest.mark.parametrize("fault", ["fail", "nan"])
def test_a_group_goes_on_without_a_lost_rollout(
    config: Config, tokens: Tokens, rewards: RewardWorkers, fault: str
) -> None:
    engine = FaultyEngine(config, {fault: {1}})
    scene = Scene(config, tokens, rewards, [lease(0, num_rollouts=4)], engine)
    buffer, num_running = run(outcome(scene))
    check_survivors(buffer.groups[0], [0, 2, 3], config, tokens)
    assert all(rollout.reward == 0.0 for rollout in buffer.groups[0].rollouts)
    assert num_running == 0


def test_a_stuck_rollout_is_cancelled_in_time_for_the_others(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    engine = FaultyEngine(config, {"hang": {0, 2}})
    timeout_s = 4.0

    async def scenario() -> tuple[SmallBuffer, float, list[int]]:
        leases = [lease(0, num_rollouts=4, timeout_s=timeout_s)]
        running_counts = []
        async with Scene(config, tokens, rewards, leases, engine) as running:
            await running.buffer.until(lambda: bool(running.buffer.started))
            began = time.monotonic()
            while not running.buffer.groups:
                running_counts.append(running.worker.look().num_running)
                await asyncio.sleep(0.01)
            return running.buffer, time.monotonic() - began, running_counts

    buffer, took, running_counts = run(scenario())
    check_survivors(buffer.groups[0], [1, 3], config, tokens)
    assert ROLLOUT_SHARE * timeout_s - 0.1 < took < timeout_s, "the lease still holds"
    assert engine.num_cancelled == 2
    assert 2 in running_counts, "the places of the finished ones are free meanwhile"


@pytest.mark.parametrize(
    ("changes", "faults", "reason", "content"),
    [
        (
            {"num_rollouts": 4},
            {"fail": {0, 3}, "nan": {2}},
            "3 of 4 rollouts failed: 2 failed 3 times (out of luck); 1 non-finite logprob",
            True,
        ),
        (
            {"num_rollouts": 4},
            {"fail": {0, 1, 3}},
            "3 of 4 rollouts failed: 3 failed 3 times (out of luck)",
            False,
        ),
        ({"num_rollouts": 2}, {"fail": {1}}, f"1 of 2 {ONE}", False),
        ({"num_rollouts": 1}, {"fail": {0}}, f"1 of 1 {ONE}", False),
        ({"kind": "eval", "num_rollouts": 4}, {"fail": {0}}, f"1 of 4 {ONE}", False),
    ],
    ids=["three of four", "three for one reason", "a pair", "a single one", "an evaluation"],
)
def test_too_few_survivors_fail_their_group_with_the_reasons_counted(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    changes: dict[str, object],
    faults: dict[str, set[int]],
    reason: str,
    content: bool,
) -> None:
    engine = FaultyEngine(config, faults, kind=str(changes.get("kind", "train")))
    buffer, _ = run(outcome(Scene(config, tokens, rewards, [lease(0, **changes)], engine)))
    (failed,) = buffer.failed
    assert not buffer.groups
    assert failed.reason == reason
    assert failed.content == content


def test_a_group_that_can_no_longer_be_saved_does_not_wait_for_its_other_rollouts(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    engine = FaultyEngine(config, {"fail": {0}, "hang": {1}})
    started = time.monotonic()
    buffer, num_running = run(outcome(Scene(config, tokens, rewards, [lease(0)], engine)))
    assert buffer.failed[0].reason.startswith("1 of 2 rollouts failed")
    assert time.monotonic() - started < 5, "the time of the lease is 20 s"
    assert (engine.num_hanging, engine.num_cancelled, num_running) == (1, 1, 0)


def test_a_reward_that_never_returns_cannot_eat_the_end_of_a_lease(
    config: Config, tokens: Tokens
) -> None:
    """One worker, busy with it for longer than the lease has time; the next group gets it back."""
    changed = make_config(
        Path(config.model.path).parent,
        reward__path=f"{VERIFIERS}:hang_if_asked",
        reward__timeout_s=300.0,
    )
    workers = RewardWorkers(changed.reward)
    workers.start()
    row = {"prompt": "___abc>", "source": "tiny", "answer": "hang", "extra": {}}

    async def scenario() -> tuple[SmallBuffer, float]:
        leases = [lease(0, row=row, timeout_s=3.0), lease(1)]
        async with Scene(changed, tokens, workers, leases) as running:
            await running.buffer.until(lambda: len(running.buffer.started) == 2)
            began = time.monotonic()
            await running.buffer.until(lambda: bool(running.buffer.failed))
            took = time.monotonic() - began
            await running.groups(1)
            return running.buffer, took

    try:
        buffer, took = run(scenario())
    finally:
        workers.close()
    assert took < 3.0
    assert "not finished in 2.85 s of the lease's time" in buffer.failed[0].reason
    assert buffer.groups[0].id == (0, 1)
    assert [rollout.reward for rollout in buffer.groups[0].rollouts] == [1.0, 1.0]


def make_one(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    engine: ScriptedEngine,
    wanted: Lease,
    on_start: Callable[[int], None],
) -> RolloutGroup:
    async def tell(version: int) -> None:
        on_start(version)

    async def scenario() -> RolloutGroup:
        maker = GroupMaker(config, engine=engine, tokens=tokens, rewards=rewards)
        work = Work(wanted, Room(8, on_change=lambda: None), engine)
        return await work.unless_void(maker.make(work, on_start=tell))

    return run(scenario())


def adopt(engine: ScriptedEngine, version: int) -> None:
    engine._serving = WeightId(1, version)


def test_a_swap_right_at_the_start_makes_tokens_only_newer_than_the_start_says(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    engine = ScriptedEngine(config.generator.scripted, vocab_size=64)
    adopt(engine, 2)
    told: list[int] = []

    def on_start(version: int) -> None:
        assert engine.num_sampled("1") == 0, "nothing is asked of the engine yet"
        told.append(version)
        adopt(engine, 3)

    group = make_one(config, tokens, rewards, engine, lease(0, min_version=2), on_start)
    assert (told, group.oldest_version) == ([2], 3)


def test_a_lease_for_newer_weights_than_are_served_is_never_begun(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    engine = ScriptedEngine(config.generator.scripted, vocab_size=64)
    told: list[int] = []
    with pytest.raises(RuntimeError, match=r"leased for version 3 or newer, but 0\.0 serves"):
        make_one(config, tokens, rewards, engine, lease(0, min_version=3), told.append)
    assert not told
