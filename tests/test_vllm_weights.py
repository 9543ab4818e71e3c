"""New weights by broadcast in real vLLM: what is served before, during and after, and what is not.

The engine starts from weights A. A plain torch model says what the logprobs of A and of B are, in
float32 on both sides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM
from vllm_running import (
    FAILS_IN_LOAD,
    PROMPT,
    RANK_1_FAILS,
    Running,
    publish,
    save_model,
    tensors_of,
)
from weights_sender import Sender, Version

from asyncrl.manifest import Layout
from asyncrl.types import Completion, Sampling, WeightId
from generators import vllm_start
from generators.engine import EngineError, Source, StagingError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

BUCKET_BYTES = 1 << 18
LONG = Sampling(temperature=1.0, max_tokens=250)


class Scene:
    """One engine, the files of A and B, and the next weights to send it."""

    def __init__(self, root: Path, *, num_receivers: int = 1) -> None:
        self.models = {n: save_model(root / n, tied=False, seed=i) for i, n in enumerate("AB")}
        self.plain = {n: Qwen3ForCausalLM.from_pretrained(m) for n, m in self.models.items()}
        self.num_receivers = num_receivers
        self.running = Running(self.models["A"], tensor_parallel_size=num_receivers)
        self.engine = self.running.engine

    def set(self, **weights: Any) -> None:
        """Other weights.* settings for this engine."""
        config = self.engine._config
        section = config.weights.model_copy(update={"stall_timeout_s": 2.0, **weights})
        self.engine._config = config.model_copy(update={"weights": section})

    def sender(
        self, model: str, *, number: int | None = None, bad: bool = False
    ) -> tuple[Sender, Source]:
        """Of weights newer than the served ones, version 1 with A and 2 with B unless it has
        another `number`; `bad`: a byte of its last tensor is flipped."""
        weights = WeightId(self.engine.serving.inc + 1, number or (1 if model == "A" else 2))
        version = Version.of(weights, tensors_of(self.models[model]))
        if bad:
            version.flat[Layout.of_manifest(version.manifest).places[-1].start] ^= 1
        sender = Sender(version, size=1 + self.num_receivers, stall_s=2.0)
        seat = sender.seat(bucket_bytes=BUCKET_BYTES)
        return sender, Source(weights=weights, seat=seat, manifest=version.json)

    def written(self, model: str, root: Path) -> Source:
        """The same in a directory."""
        weights = WeightId(self.engine.serving.inc + 1, 1 if model == "A" else 2)
        return Source(
            weights=weights, location=publish(root, weights, tensors_of(self.models[model]))
        )

    async def take(self, model: str) -> None:
        sender, source = self.sender(model)
        sender.start(bucket_bytes=BUCKET_BYTES)
        assert await self.engine.check(source.manifest) == ["cpu"] * self.num_receivers
        await stage_and_swap(self, source)
        assert self.engine.serving == source.weights

    def logprobs(self, model: str, completion: Completion) -> np.ndarray:
        """Of all its tokens, by one model alone."""
        ids = as_ids(PROMPT, completion.token_ids)
        return self._of_tokens(self.plain[model], ids, len(PROMPT) - 1, None)

    def logprobs_with_old_cache(self, completion: Completion, boundary: int) -> np.ndarray:
        """Of the tokens from `boundary` on: B goes on with the KV cache that A has filled."""
        ids = as_ids(PROMPT, completion.token_ids)
        seen = len(PROMPT) + boundary - 1
        with torch.no_grad():
            cache = self.plain["A"](ids[:, :seen], use_cache=True).past_key_values
        return self._of_tokens(self.plain["B"], ids, seen, cache)

    def _of_tokens(self, model: Any, ids: torch.Tensor, start: int, cache: Any) -> np.ndarray:
        """Of ids[start + 1:]; `cache` holds what is before `start`."""
        with torch.no_grad():
            if cache is None:
                logits = model(ids).logits[0, start:-1]
            else:
                logits = model(ids[:, start:-1], past_key_values=cache).logits[0]
        picked = torch.log_softmax(logits, -1).gather(-1, ids[0, start + 1 :, None])
        return np.asarray(picked[:, 0].numpy())


def as_ids(*parts: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.concatenate(parts)[None].astype(np.int64))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("broadcast"))
    yield scene
    scene.running.close()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() < 1e-3)


@pytest.mark.parametrize("staging", ["host", "device", "none"])
def test_weights_that_were_broadcast_are_served_bit_for_bit(scene: Scene, staging: str) -> None:
    scene.set(staging=staging)
    run, generate = scene.running.run, scene.running.generate
    run(scene.take("B"))
    after = run(generate(LONG, seed=1))
    assert close(after.logprobs, scene.logprobs("B", after))
    run(scene.take("A"))
    back = run(generate(LONG, seed=1))
    assert close(back.logprobs, scene.logprobs("A", back))


@pytest.mark.parametrize("staging", ["device", "none"])
def test_weights_in_a_directory_are_served_with_other_staging_too(
    scene: Scene, staging: str, tmp_path: Path
) -> None:
    scene.set(staging=staging)
    for model in ("B", "A"):
        source = scene.written(model, tmp_path)
        scene.running.run(stage_and_swap(scene, source))
        completion = scene.running.run(scene.running.generate(LONG))
        assert close(completion.logprobs, scene.logprobs(model, completion))


async def updated_in_flight(scene: Scene) -> Completion:
    """A request that A begins and B ends; it is decoded all through the transfer."""
    await scene.take("A")
    sender, source = scene.sender("B")
    sender.before_slice = lambda number: time.sleep(0.02)
    others = [asyncio.create_task(scene.running.generate(LONG, seed)) for seed in range(3)]
    request = asyncio.create_task(scene.running.generate(LONG, seed=9))
    request_id = f"test-{scene.running.num_requests + 1}"
    await asyncio.sleep(0.05)
    before = scene.engine.num_sampled(request_id)
    sender.start(bucket_bytes=BUCKET_BYTES)
    times = await scene.engine.stage(source)
    during = scene.engine.num_sampled(request_id) - before
    assert times.transfer_s > 0.1
    assert during > 5, "it is decoded while the weights come"
    await scene.engine.swap(source.weights)
    await asyncio.gather(*others)
    return await request


async def stage_and_swap(scene: Scene, source: Source) -> None:
    await scene.engine.stage(source)
    await scene.engine.swap(source.weights)


def boundary_of(completion: Completion) -> int:
    versions = completion.versions.tolist()
    boundary = versions.index(2)
    assert 5 < boundary < len(versions) - 5
    assert versions == [1] * boundary + [2] * (len(versions) - boundary)
    assert len(versions) == len(completion.token_ids) == LONG.max_tokens
    return boundary


def test_an_update_in_flight_is_the_old_weights_before_the_swap_and_the_new_ones_after_it(
    scene: Scene,
) -> None:
    scene.set(staging="host")
    completion = scene.running.run(updated_in_flight(scene))
    boundary = boundary_of(completion)
    old, new = np.split(completion.logprobs, [boundary])
    assert close(old, scene.logprobs("A", completion)[:boundary])
    assert close(new, scene.logprobs_with_old_cache(completion, boundary))
    assert not close(new, scene.logprobs("B", completion)[boundary:]), "its cache is A's"


def test_with_recompute_later_tokens_are_those_of_the_new_weights_alone(scene: Scene) -> None:
    scene.set(staging="host", kv_in_flight="recompute")
    completion = scene.running.run(updated_in_flight(scene))
    boundary = boundary_of(completion)
    old, new = np.split(completion.logprobs, [boundary])
    assert close(old, scene.logprobs("A", completion)[:boundary])
    assert close(new, scene.logprobs("B", completion)[boundary:])


def test_a_flipped_byte_is_refused_by_name_and_the_old_version_serves_on(scene: Scene) -> None:
    scene.set(staging="host")
    scene.running.run(scene.take("A"))
    serving = scene.engine.serving
    sender, source = scene.sender("B", bad=True)
    sender.start(bucket_bytes=BUCKET_BYTES)
    last = max(tensors_of(scene.models["B"]))
    with pytest.raises(StagingError, match=rf"{last}.*damaged") as error:
        scene.running.run(scene.engine.stage(source))
    assert not error.value.is_lost
    assert scene.engine.serving == serving
    completion = scene.running.run(scene.running.generate(LONG))
    assert close(completion.logprobs, scene.logprobs("A", completion))


def test_a_manifest_of_another_model_is_refused_by_name(scene: Scene) -> None:
    tensors = tensors_of(scene.models["B"])
    name = max(tensors)
    bad = Version.of(WeightId(99, 1), {**tensors, name: tensors[name][:-1].clone()})
    with pytest.raises(StagingError, match=name):
        scene.running.run(scene.engine.check(bad.json))


@pytest.mark.parametrize("staging", ["host", "none"])
def test_a_sender_that_never_comes_leaves_the_old_version_serving(
    scene: Scene, staging: str
) -> None:
    scene.set(staging=staging)
    scene.running.run(scene.take("A"))
    sender, source = scene.sender("B")

    async def scenario() -> Completion:
        request = asyncio.create_task(scene.running.generate(LONG))
        with pytest.raises(StagingError, match="not everybody came") as error:
            await stage_and_swap(scene, source)
        assert error.value.is_lost
        return await request

    completion = scene.running.run(scenario())
    assert sender.num_sent == 0
    assert set(completion.versions) == {1}
    assert close(completion.logprobs, scene.logprobs("A", completion))


async def never_serves_again(scene: Scene, source: Source, why: str) -> None:
    """The swap to `source` fails half-way, and the engine gives no token after it."""
    serving = scene.engine.serving
    request = asyncio.create_task(scene.running.generate(LONG))
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match=f"half-way.*{why}"):
        await scene.engine.swap(source.weights)
    assert scene.engine.serving == serving
    num_sampled = scene.engine.num_sampled(f"test-{scene.running.num_requests}")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scene.running.generate(), 1)
    assert scene.engine.num_sampled(f"test-{scene.running.num_requests - 1}") == num_sampled
    assert not request.done()
    request.cancel()


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """An engine on two tensor-parallel ranks, with the faults of faulty_vllm.py."""
    monkeypatch.setattr(vllm_start, "EXTENSION", "faulty_vllm.FaultyWeights")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    scene = Scene(tmp_path, num_receivers=2)
    yield scene
    scene.running.close()


def test_every_tensor_parallel_rank_receives_and_none_loads_before_all_have_verified(
    two_ranks: Scene,
) -> None:
    run, generate = two_ranks.running.run, two_ranks.running.generate
    for staging in ("none", "host"):
        two_ranks.set(staging=staging, stall_timeout_s=5.0)
        for model in ("B", "A"):
            run(two_ranks.take(model))
            completion = run(generate(LONG))
            assert close(completion.logprobs, two_ranks.logprobs(model, completion))

    sender, source = two_ranks.sender("B", number=RANK_1_FAILS)
    sender.start(bucket_bytes=BUCKET_BYTES)
    with pytest.raises(StagingError, match="damaged"):
        run(two_ranks.engine.stage(source))
    completion = run(generate(LONG))
    assert close(completion.logprobs, two_ranks.logprobs("A", completion))

    sender, source = two_ranks.sender("B", number=FAILS_IN_LOAD)
    sender.start(bucket_bytes=BUCKET_BYTES)
    run(two_ranks.engine.stage(source))
    run(never_serves_again(two_ranks, source, "planted in the load"))


def test_what_fails_under_pause_after_the_first_write_is_never_served(scene: Scene) -> None:
    """The last test of this engine: it is half of A, half of B."""
    scene.set(staging="none")
    scene.running.run(scene.take("A"))
    sender, source = scene.sender("B", bad=True)
    sender.start(bucket_bytes=BUCKET_BYTES)

    scene.running.run(scene.engine.stage(source))
    scene.running.run(never_serves_again(scene, source, "damaged"))
