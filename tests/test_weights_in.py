"""New weights at a generator by broadcast: a worker with the scripted engine, a small buffer and a
sender, on real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from generator_scene import Running, Scene, lease, make_config, run
from safetensors.torch import load_file
from weights_sender import Sender, Version, receiving_threads

from asyncrl.config.schema import Config
from asyncrl.types import WeightId
from generators.engine import EngineError, SwapTimes
from generators.rewards import RewardWorkers
from generators.scripted_engine import ScriptedEngine
from generators.tokens import Tokens

V1, V2 = WeightId(1, 1), WeightId(1, 2)


@pytest.fixture(scope="module")
def config(random_tiny_task: Path) -> Config:
    return make_config(random_tiny_task, weights={"stall_timeout_s": 2.0})


@pytest.fixture(scope="module")
def model_tensors(random_tiny_task: Path) -> dict[str, torch.Tensor]:
    return load_file(random_tiny_task / "model" / "model.safetensors")


def make_engine(config: Config, kind: type[ScriptedEngine] = ScriptedEngine) -> ScriptedEngine:
    options = config.generator.scripted
    return kind(options, vocab_size=64, model=config.model, weights=config.weights)


class Broadcast:
    """Weights offered by a small buffer, and the sender of one broadcast of them."""

    def __init__(self, running: Running, version: Version, *, roster: int, size: int = 2) -> None:
        self.sender = Sender(version, roster=roster, size=size, stall_s=2.0)
        self.buffer = running.buffer
        self.buffer.offer = version.manifest.weights, version.json.encode()

    def begin(self, bucket_bytes: int = 1 << 18) -> None:
        """Everybody who is ready gets a seat, and the sender sends."""
        self.buffer.seats.append(self.sender.seat(bucket_bytes=bucket_bytes))
        self.sender.start(bucket_bytes=bucket_bytes)

    async def wait(self) -> None:
        await asyncio.to_thread(self.sender.wait)


def test_offered_weights_are_received_verified_and_served(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    async def scenario() -> None:
        async with Scene(config, tokens, rewards, [], make_engine(config)) as running:
            buffer = running.buffer
            await buffer.until(lambda: bool(buffer.requests))
            broadcast = Broadcast(running, Version.of(V1, model_tensors), roster=4)
            await buffer.until(lambda: bool(buffer.ready))
            assert running.worker.look().state.endswith(", ready for 1.1")
            assert buffer.ready[0].devices == ["cpu"]
            broadcast.begin()
            await broadcast.wait()
            await buffer.until(lambda: bool(buffer.served))
            assert running.worker.look().serving == [1, 1]
            (staged,) = buffer.staged
            assert (staged.roster, staged.error, staged.is_lost) == (4, "", False)
            seconds = buffer.served[0].seconds
            parts = ["rendezvous", "transfer", "verify", "wait", "pause", "load", "reset", "resume"]
            assert list(seconds) == parts
            assert seconds["transfer"] > 0
            await running.done()

    run(scenario())


@pytest.mark.parametrize("fault", ["missing", "renamed", "misshapen", "another type"])
def test_weights_that_do_not_fit_are_refused_by_name_once_and_newer_ones_are_taken(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
    fault: str,
) -> None:
    bad, name = dict(model_tensors), max(model_tensors)
    if fault == "missing":
        del bad[name]
    if fault == "renamed":
        bad[name + ".x"] = bad.pop(name)
    if fault == "misshapen":
        bad[name] = bad[name][:-1].clone()
    if fault == "another type":
        bad[name] = bad[name].to(torch.bfloat16)

    async def scenario() -> None:
        async with Scene(config, tokens, rewards, [lease(0)], make_engine(config)) as running:
            buffer = running.buffer
            Broadcast(running, Version.of(V1, bad), roster=1)
            await buffer.until(lambda: bool(buffer.ready))
            assert name in buffer.ready[0].error
            await running.groups(1)
            assert running.worker.look().serving == [0, 0], "the old version serves on"
            broadcast = Broadcast(running, Version.of(V2, model_tensors), roster=2)
            broadcast.begin()
            await buffer.until(lambda: bool(buffer.served))
            assert [ready.version for ready in buffer.ready if ready.error] == [1]
            assert running.worker.look().serving == [1, 2]
            await running.done()

    run(scenario())


def test_a_flipped_byte_is_reported_by_name_and_the_next_broadcast_is_taken(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    async def scenario() -> None:
        async with Scene(config, tokens, rewards, [lease(0)], make_engine(config)) as running:
            buffer = running.buffer
            damaged = Version.of(V1, model_tensors)
            damaged.flat[0] ^= 1
            Broadcast(running, damaged, roster=1).begin()
            await buffer.until(lambda: bool(buffer.staged))
            assert f"tensor {next(iter(model_tensors))}" in buffer.staged[0].error
            assert not buffer.staged[0].is_lost
            await running.groups(1)
            assert buffer.groups[0].inc == 0
            Broadcast(running, Version.of(V1, model_tensors), roster=2).begin()
            await buffer.until(lambda: bool(buffer.served))
            assert [(s.roster, bool(s.error)) for s in buffer.staged] == [(1, True), (2, False)]
            await running.done()

    run(scenario())


def test_a_broadcast_that_breaks_is_lost_and_the_next_one_is_asked_for_at_once(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    class Broken(Exception):
        pass

    def breaks(number: int) -> None:
        if number == 3:
            raise Broken

    async def scenario() -> None:
        async with Scene(config, tokens, rewards, [], make_engine(config)) as running:
            buffer = running.buffer
            first = Broadcast(running, Version.of(V1, model_tensors), roster=1)
            first.sender.before_slice = breaks
            first.begin()
            await buffer.until(lambda: bool(buffer.staged))
            assert buffer.staged[0].is_lost
            lost = asyncio.get_running_loop().time()
            await buffer.until(lambda: len(buffer.ready) > 1)
            assert asyncio.get_running_loop().time() - lost < 0.4
            Broadcast(running, Version.of(V1, model_tensors), roster=2).begin()
            await buffer.until(lambda: bool(buffer.served))
            await running.done()

    run(scenario())
    assert not receiving_threads()


def test_what_is_offered_no_longer_is_given_up_for_what_is_newer(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    async def scenario() -> list[int]:
        async with Scene(config, tokens, rewards, [], make_engine(config)) as running:
            buffer = running.buffer
            for version in (1, 2, 3):
                weights = WeightId(1, version)
                last = Broadcast(running, Version.of(weights, model_tensors), roster=version)
                await buffer.until(lambda: buffer.is_ready_for(weights))  # noqa: B023
            last.begin()
            await buffer.until(lambda: bool(buffer.served))
            await running.done()
            return [served.version for served in buffer.served]

    assert run(scenario()) == [3]


def test_a_joiners_first_lease_waits_for_the_offered_weights(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    version = Version.of(V2, model_tensors)

    async def scenario() -> Any:
        scene = Scene(config, tokens, rewards, [lease(0)], make_engine(config), offered=version)
        async with scene as running:
            buffer = running.buffer
            await buffer.until(lambda: bool(buffer.ready))
            assert not buffer.requests, "no lease is asked for yet"
            Broadcast(running, version, roster=1).begin()
            await running.groups(1)
            await running.done()
            return buffer

    buffer = run(scenario())
    assert buffer.requests[0].serving == [1, 2]
    assert {int(v) for r in buffer.groups[0].rollouts for v in r.versions} == {2}


def test_a_joiner_does_not_wait_for_a_learner_that_is_not_there(
    config: Config, tokens: Tokens, rewards: RewardWorkers
) -> None:
    """The newest version is known, but nobody offers it."""

    async def scenario() -> list[int]:
        away = Scene(
            config, tokens, rewards, [lease(0)], make_engine(config), published=V2, location=""
        )
        async with away as running:
            buffer = running.buffer
            await running.groups(1)
            await running.done()
            return buffer.requests[0].serving

    assert run(scenario()) == [0, 0]


class ReceivesUnderPause(ScriptedEngine):
    """Takes weights in during the swap, as vLLM does with weights.staging=none."""

    source: Any = None
    fails: BaseException | None = None

    async def stage(self, source: Any) -> Any:
        self.source = source

    async def swap(self, weights: WeightId) -> SwapTimes:
        await super().stage(self.source)
        if self.fails is not None:
            raise self.fails
        return await super().swap(weights)


def test_under_pause_no_evaluation_is_in_hand_and_none_begins(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    slow = make_config(
        Path(config.model.path).parent,
        weights={"staging": "none"},
        generator__scripted__tokens_per_s=8,
    )

    async def scenario() -> Any:
        engine = make_engine(slow, ReceivesUnderPause)
        first, second = (lease(i, kind="eval", num_rollouts=1) for i in range(2))
        async with Scene(slow, tokens, rewards, [first], engine) as running:
            buffer = running.buffer
            await buffer.until(lambda: len(buffer.started) == 1)
            broadcast = Broadcast(running, Version.of(V1, model_tensors), roster=1)
            await running.groups(1)
            assert not buffer.ready, "it is not ready while it evaluates"
            await buffer.until(lambda: bool(buffer.ready))
            buffer.leases = [second]
            await buffer.until(lambda: not buffer.leases)
            assert len(buffer.started) == 1, "the evaluation waits for the new weights"
            broadcast.begin()
            await running.groups(2)
            await running.done()
            return buffer

    buffer = run(scenario())
    assert [start.version for start in buffer.started] == [0, 1]
    assert buffer.served[0].seconds["wait"] > 0


def test_an_engine_that_is_half_written_ends_the_generator_and_the_buffer_hears_why(
    config: Config,
    tokens: Tokens,
    rewards: RewardWorkers,
    model_tensors: dict[str, torch.Tensor],
) -> None:
    none = make_config(Path(config.model.path).parent, weights={"staging": "none"})

    async def scenario() -> Any:
        engine = make_engine(none, ReceivesUnderPause)
        engine.fails = EngineError("half of 1.1")  # type: ignore[attr-defined]
        async with Scene(none, tokens, rewards, [], engine) as running:
            Broadcast(running, Version.of(V1, model_tensors), roster=1).begin()
            with pytest.raises(EngineError, match="half of"):
                await asyncio.wait_for(asyncio.shield(running.task), 10)
            return running.buffer

    buffer = run(scenario())
    assert [staged.error for staged in buffer.staged] == ["half of 1.1"]
    assert not buffer.served
