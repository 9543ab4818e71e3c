"""The generator's loop against a small buffer on real sockets, with the scripted engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from generator_scene import VERIFIERS, Scene, lease, make_config, run
from small_buffer import WAIT_S, SmallBuffer

import generators.eval_pins
from asyncrl.client import Unreachable
from asyncrl.config.schema import Config
from asyncrl.messages import Verdict
from asyncrl.transport import Server
from asyncrl.types import Completion, Int32Array, Sampling, WeightId
from asyncrl.versions import sample_seed
from generators.engine import (
    EngineError,
    RequestError,
    Source,
    StageTimes,
    StagingError,
    SwapTimes,
)
from generators.rewards import RewardWorkers, UserError
from generators.scripted_engine import ScriptedEngine, scripted_completion
from generators.tokens import Tokens


@pytest.fixture(scope="module")
def config(random_tiny_task: Path) -> Config:
    return make_config(random_tiny_task)


def test_groups_equal_a_plain_loop(config: Config, tokens: Tokens, rewards: RewardWorkers) -> None:
    async def scenario() -> SmallBuffer:
        async with Scene(config, tokens, rewards, [lease(i) for i in range(12)]) as running:
            await running.groups(12)
            await running.done()
            return running.buffer

    buffer = run(scenario())
    assert sorted(group.id for group in buffer.groups) == [(0, i) for i in range(12)]
    assert sorted(tuple(s.group) for s in buffer.started) == [(0, i) for i in range(12)]
    for group in buffer.groups:
        assert group.prompt_ids.tolist() == tokens._tokenizer("___abc>")["input_ids"]
        for i, rollout in enumerate(group.rollouts):
            expected = scripted_completion(
                seed=sample_seed(3, "train", 0, group.id.position, i, 0),
                version=0,
                options=config.generator.scripted,
                sampling=Sampling(1.0, 6, tokens.end_ids),
                vocab_size=64,
            )
            assert rollout.token_ids.tolist() == expected.token_ids.tolist()
            assert rollout.logprobs.tolist() == expected.logprobs.tolist()
            assert rollout.finish_reason == expected.finish_reason
            assert rollout.loss_mask.all()
            assert rollout.reward == 0.0


def test_a_waiting_lease_goes_out_at_once_after_a_swap(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> tuple[SmallBuffer, float]:
        leases = [lease(0), lease(1, min_version=1)]
        async with Scene(config, tokens, rewards, leases) as running:
            await running.groups(1)
            await asyncio.sleep(0.05)
            running.buffer.publish(WeightId(1, 1))
            started = time.monotonic()
            await running.groups(2)
            took = time.monotonic() - started
            await running.done()
            return running.buffer, took

    buffer, took = run(scenario())
    assert [s.version for s in buffer.started] == [0, 1]
    assert [group.inc for group in buffer.groups] == [0, 1]
    assert {v for r in buffer.groups[1].rollouts for v in r.versions} == {1}
    assert took < 0.45, "the request that waited at the buffer (0.5 s) held the lease up"


def test_a_late_generator_takes_the_newest_weights_before_its_first_lease(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> tuple[SmallBuffer, list[str]]:
        late = Scene(config, tokens, rewards, [lease(0)], published=WeightId(2, 5))
        async with late as running:
            states = []
            while not running.buffer.requests:
                states.append(running.worker.look().state)
                await asyncio.sleep(0)
            await running.groups(1)
            await running.done()
            return running.buffer, states

    buffer, states = run(scenario())
    assert buffer.requests[0].serving == [2, 5]
    assert {v for r in buffer.groups[0].rollouts for v in r.versions} == {5}
    assert states[0] == "starting, loading the model"


def test_a_late_generator_that_cannot_have_the_newest_weights_works_with_what_it_has(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    """As while a learner that was stopped is away: the weights that it published are gone."""

    async def scenario() -> tuple[SmallBuffer, str]:
        engine = BrokenEngine(config, bad=1000)
        leases = [lease(0), lease(1, min_version=5)]
        late = Scene(config, tokens, rewards, leases, engine, published=WeightId(2, 5))
        async with late as running:
            await running.groups(1)
            state = running.worker.look().state
            engine.bad = 0
            running.buffer.publish(WeightId(3, 5))
            await running.groups(2)
            await running.done()
            return running.buffer, state

    buffer, state = run(scenario())
    assert "weights 2.5 were not taken: tensor x is missing" in state
    assert [started.version for started in buffer.started] == [0, 5]
    assert [group.inc for group in buffer.groups] == [0, 3]


def test_a_warm_generator_takes_the_same_version_of_a_later_learner(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> BrokenEngine:
        engine = BrokenEngine(config)
        async with Scene(config, tokens, rewards, [], engine) as running:
            for weights in (WeightId(1, 7), WeightId(2, 7)):
                running.buffer.publish(weights)
                await running.buffer.until(lambda: engine.serving == weights)  # noqa: B023
            await running.done()
            return engine

    assert run(scenario()).taken == [WeightId(1, 7), WeightId(2, 7)]


def test_where_nothing_was_published_the_first_lease_does_not_wait(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> float:
        started = time.monotonic()
        async with Scene(config, tokens, rewards, []) as running:
            await running.buffer.until(lambda: bool(running.buffer.requests))
            return time.monotonic() - started

    assert run(scenario()) < WAIT_S, "it waited for weights that nobody announced"


def test_a_verdict_of_superseded_is_no_error(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> None:
        async with Scene(config, tokens, rewards, [lease(i) for i in range(6)]) as running:
            running.buffer.verdict = Verdict(verdict="superseded")
            await running.groups(6)
            await running.buffer.until(lambda: not running.worker.look().held)
            await running.done()

    run(scenario())


class PausingEngine(ScriptedEngine):
    """Stands still for 0.2 s in each swap."""

    async def swap(self, weights: WeightId) -> SwapTimes:
        await asyncio.sleep(0.2)
        return await super().swap(weights)


def test_phases_exclude_each_other_and_add_up(config: Config, tokens: Tokens) -> None:
    slow = make_config(
        Path(config.model.path).parent,
        reward__path=f"{VERIFIERS}:slow",
        generator__scripted__tokens_per_s=20,
    )
    workers = RewardWorkers(slow.reward)
    workers.start()

    async def scenario() -> tuple[dict[str, float], float, set[str]]:
        began = time.monotonic()
        engine = PausingEngine(slow.generator.scripted, vocab_size=64)
        async with Scene(slow, tokens, workers, [lease(0)], engine) as running:
            states = set()
            await running.buffer.until(lambda: bool(running.buffer.started))
            while not running.buffer.groups:
                states.add(running.worker.look().state)
                await asyncio.sleep(0.01)
            await running.buffer.until(lambda: not running.worker.look().held)
            states.add(running.worker.look().state)
            running.buffer.publish(WeightId(1, 1))
            while running.worker.look().serving != [1, 1]:
                states.add(running.worker.look().state)
                await asyncio.sleep(0.01)
            beat = running.worker.look()
            await running.done()
            return beat.seconds, time.monotonic() - began, states

    try:
        seconds, took, states = run(scenario())
    finally:
        workers.close()
    assert sum(seconds.values()) == pytest.approx(took, abs=0.3)
    assert {"generating", "scoring", "swapping", "waiting for leases"} <= states
    assert seconds["scoring"] > 0.2
    assert seconds["swapping"] == pytest.approx(0.2, abs=0.1)
    assert seconds["generating"] > 0.04


def test_without_a_buffer_a_generator_waits_for_the_buffer_and_not_for_leases(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> None:
        scene = Scene(config, tokens, rewards, [])
        async with scene as running:

            def does(state: str) -> bool:
                return running.worker.look().state.startswith(state)

            await running.buffer.until(lambda: does("waiting for leases"))
            await scene.server.__aexit__(None, None, None)
            await running.buffer.until(lambda: does("waiting for the buffer"))
            back = Server(running.address, running.buffer.handle)
            task = asyncio.create_task(back.serve())
            await running.buffer.until(lambda: does("waiting for leases"))
            await running.done()
            task.cancel()
            await back.close()

    run(scenario())


def test_room_in_the_engine_bounds_what_is_leased(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> tuple[SmallBuffer, int]:
        most = 0
        async with Scene(config, tokens, rewards, [lease(i) for i in range(20)]) as running:
            while len(running.buffer.groups) < 20:
                most = max(most, running.worker.look().num_running)
                await asyncio.sleep(0.002)
            await running.done()
            return running.buffer, most

    buffer, most = run(scenario())
    assert most == 8
    assert all(request.slots <= 4 for request in buffer.requests)


def test_an_eval_lease_pins_the_served_version(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    slow = make_config(Path(config.model.path).parent, generator__scripted__tokens_per_s=8)

    async def scenario() -> tuple[SmallBuffer, WeightId]:
        leases = [lease(i, kind="eval", num_rollouts=1, temperature=0.0) for i in range(4)]
        async with Scene(slow, tokens, rewards, leases) as running:
            await running.buffer.until(lambda: len(running.buffer.started) == 4)
            running.buffer.publish(WeightId(1, 1))
            await running.groups(4)
            serving = WeightId(*running.worker.look().serving)
            await running.buffer.until(lambda: running.worker.look().serving == [1, 1])
            await running.done()
            return running.buffer, serving

    buffer, serving_at_end_of_eval = run(scenario())
    assert serving_at_end_of_eval == WeightId(0, 0)
    assert {int(v) for g in buffer.groups for r in g.rollouts for v in r.versions} == {0}


class BrokenEngine(ScriptedEngine):
    """Requests whose number is in `failing` fail, and staging fails the first `bad` times."""

    def __init__(
        self,
        config: Config,
        *,
        failing: set[int] | None = None,
        bad: int = 0,
        nan: bool = False,
    ) -> None:
        super().__init__(config.generator.scripted, vocab_size=64)
        self.failing, self.bad, self.nan = failing or set(), bad, nan
        self.taken: list[WeightId] = []

    async def generate(
        self, prompt_ids: Int32Array, sampling: Sampling, *, seed: int, request_id: str
    ) -> Completion:
        if int(request_id) in self.failing:
            raise RequestError("out of luck")
        completion = await super().generate(prompt_ids, sampling, seed=seed, request_id=request_id)
        if self.nan:
            completion.logprobs[-1] = np.nan
        return completion

    async def stage(self, source: Source) -> StageTimes:
        self.bad -= 1
        if self.bad >= 0:
            raise StagingError("tensor x is missing")
        self.taken.append(source.weights)
        return await super().stage(source)


def test_of_versions_published_during_an_eval_the_newest_serves_right_after_it(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    slow = make_config(Path(config.model.path).parent, generator__scripted__tokens_per_s=8)

    async def scenario() -> tuple[BrokenEngine, float]:
        engine = BrokenEngine(slow)
        leases = [lease(i, kind="eval", num_rollouts=1, temperature=0.0) for i in range(4)]
        async with Scene(slow, tokens, rewards, leases, engine) as running:
            await running.buffer.until(lambda: len(running.buffer.started) == 4)
            running.buffer.publish(WeightId(1, 1))
            await running.buffer.until(lambda: engine.taken == [(1, 1)])
            for version in (2, 3):
                running.buffer.publish(WeightId(1, version))
                await asyncio.sleep(0.05)
            assert engine.serving == WeightId(0, 0), "the evaluation pins it"
            await running.groups(4)
            ended = time.monotonic()
            await running.buffer.until(lambda: engine.serving == WeightId(1, 3))
            return engine, time.monotonic() - ended

    engine, took = run(scenario())
    assert engine.taken == [(1, 1), (1, 3)]
    assert took < generators.eval_pins.PIN_GRACE_S + 0.4


class HangingEngine(ScriptedEngine):
    """Never answers a swap."""

    async def swap(self, weights: WeightId) -> SwapTimes:
        return await asyncio.get_running_loop().create_future()


def test_a_swap_that_hangs_ends_the_generator(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    hasty = make_config(Path(config.model.path).parent, weights__timeout_s=0.2)

    async def scenario() -> None:
        engine = HangingEngine(hasty.generator.scripted, vocab_size=64)
        async with Scene(hasty, tokens, rewards, [], engine) as running:
            running.buffer.publish(WeightId(1, 1))
            await asyncio.wait_for(running.task, 10)

    with pytest.raises(EngineError, match=r"1\.1 took longer than weights\.timeout_s = 0\.2"):
        run(scenario())


def test_a_failed_request_is_tried_again_with_its_seed(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> SmallBuffer:
        engine = BrokenEngine(config, failing={1})
        async with Scene(config, tokens, rewards, [lease(0)], engine) as running:
            await running.groups(1)
            await running.done()
            return running.buffer

    (group,) = run(scenario()).groups
    expected = scripted_completion(
        seed=sample_seed(3, "train", 0, 0, 0, 0),
        version=0,
        options=config.generator.scripted,
        sampling=Sampling(1.0, 6, tokens.end_ids),
        vocab_size=64,
    )
    assert group.rollouts[0].token_ids.tolist() == expected.token_ids.tolist()


def test_a_request_that_always_fails_fails_its_group_without_blame_on_the_prompt(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> SmallBuffer:
        engine = BrokenEngine(config, failing={1, 3, 4, 5})
        async with Scene(config, tokens, rewards, [lease(0)], engine) as running:
            await running.buffer.until(lambda: bool(running.buffer.failed))
            assert not running.task.done()
            return running.buffer

    (failed,) = run(scenario()).failed
    assert "out of luck" in failed.reason
    assert not failed.content


def test_when_all_requests_fail_the_generator_stops_and_says_why(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> None:
        engine = BrokenEngine(config, failing=set(range(100_000)))
        async with Scene(
            config, tokens, rewards, [lease(i) for i in range(100)], engine
        ) as running:
            await asyncio.wait_for(running.task, 20)

    with pytest.raises(EngineError, match="in a row: out of luck"):
        run(scenario())


def test_a_non_finite_logprob_rejects_its_group(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> SmallBuffer:
        engine = BrokenEngine(config, nan=True)
        async with Scene(config, tokens, rewards, [lease(0)], engine) as running:
            await running.buffer.until(lambda: bool(running.buffer.failed))
            return running.buffer

    (failed,) = run(scenario()).failed
    assert "non-finite logprob" in failed.reason
    assert failed.content


def test_many_non_finite_logprobs_end_the_generator(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    async def scenario() -> None:
        engine = BrokenEngine(config, nan=True)
        async with Scene(config, tokens, rewards, [lease(i) for i in range(60)], engine) as running:
            await asyncio.wait_for(running.task, 20)

    with pytest.raises(EngineError, match="non-finite logprobs"):
        run(scenario())


def test_failed_staging_keeps_the_old_version_and_newer_weights_are_taken(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("generators.weights_in.RETRY_S", (60.0, 60.0))  # newer ones end the pause

    async def scenario() -> BrokenEngine:
        engine = BrokenEngine(config, bad=1)
        async with Scene(config, tokens, rewards, [lease(0)], engine) as running:
            running.buffer.publish(WeightId(1, 1))
            await running.buffer.until(lambda: engine.bad == 0)
            running.buffer.publish(WeightId(1, 3))
            await running.buffer.until(lambda: engine.serving == WeightId(1, 3))
            await running.groups(1)
            await running.done()
            return engine

    assert run(scenario()).taken == [WeightId(1, 3)]
    assert "weights 1.1 were not taken, 0.0 serve on: tensor x is missing" in caplog.text


def test_a_group_over_its_deadline_is_cancelled_and_reported(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    slow = make_config(Path(config.model.path).parent, generator__scripted__tokens_per_s=0.1)

    async def scenario() -> SmallBuffer:
        async with Scene(slow, tokens, rewards, [lease(0, timeout_s=0.3)]) as running:
            await running.buffer.until(lambda: bool(running.buffer.failed))
            assert running.worker.look().num_running == 0
            return running.buffer

    (failed,) = run(scenario()).failed
    assert "not finished in 0.285 s of the lease's time" in failed.reason
    assert not failed.content, "the prompt is not to blame for a slow machine"


@pytest.mark.parametrize(("on_overlong", "ends"), [("drop", False), ("error", True)])
def test_a_prompt_over_the_limit_is_dropped_or_ends_the_run(
    config: Config, tokens: Tokens, rewards: RewardWorkers, on_overlong: str, ends: bool
) -> None:
    changed = make_config(Path(config.model.path).parent, data__overlong_prompts=on_overlong)
    row = {"prompt": "_" * 9, "source": "tiny", "answer": "", "extra": {}}

    async def scenario() -> SmallBuffer:
        async with Scene(changed, tokens, rewards, [lease(0, row=row)]) as running:
            if ends:
                await asyncio.wait_for(running.task, 10)
            await running.buffer.until(lambda: bool(running.buffer.failed))
            assert running.worker.look().num_running == 0
            return running.buffer

    if ends:
        with pytest.raises(UserError, match=r"9 tokens.*max_prompt_length is 8.*overlong_prompts"):
            run(scenario())
    else:
        (failed,) = run(scenario()).failed
        assert failed.content
        assert failed.hopeless, "no further attempt can help"


def test_a_reward_error_ends_the_run_when_on_error_is_stop(config: Config, tokens: Tokens) -> None:
    changed = make_config(
        Path(config.model.path).parent,
        reward__path=f"{VERIFIERS}:missing_answer",
        reward__on_error="stop",
    )
    workers = RewardWorkers(changed.reward)
    workers.start()

    async def scenario() -> None:
        async with Scene(changed, tokens, workers, [lease(0)]) as running:
            await asyncio.wait_for(running.task, 10)

    try:
        with pytest.raises(UserError, match="there is never an answer"):
            run(scenario())
    finally:
        workers.close()


def test_a_buffer_that_is_gone_ends_the_generator_within_the_bound(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    hasty = make_config(Path(config.model.path).parent, network__buffer_timeout_s=1.0)

    async def scenario() -> None:
        async with Scene(hasty, tokens, rewards, []) as running:
            await running.buffer.until(lambda: bool(running.buffer.requests))
            running.buffer.silent = True
            await asyncio.wait_for(running.task, 10)

    with pytest.raises(Unreachable, match="no answer from the buffer at tcp://"):
        run(scenario())
