"""The vLLM engine on real vLLM: the contract of generators/vllm_engine.py and vllm_extension.py.

One engine starts from weights A, another from weights B; each is then swapped to the other's, so
that either is the fresh engine against which the other is held. float32 throughout.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from generator_scene import Scene, lease
from generator_scene import make_config as make_scene_config
from small_buffer import SmallBuffer
from transformers import Qwen3ForCausalLM
from vllm_running import (
    GREEDY,
    PROMPT,
    VOCABULARY,
    Running,
    make_config,
    publish,
    save_model,
    tensors_of,
)

import generators.vllm_start
from asyncrl.types import Completion, Sampling, WeightId
from generators.engine import EngineError, RequestError, Source, StagingError
from generators.rewards import RewardWorkers
from generators.tokens import Tokens
from generators.vllm_engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

A, B = WeightId(1, 1), WeightId(1, 2)


@dataclass
class Pair:
    """Engines started from A and from B, their weights, and their greedy answers at the start."""

    root: Path
    models: tuple[Path, Path]
    locations: tuple[str, str]
    engines: tuple[Running, Running]
    greedy: tuple[Completion, Completion]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("untied")
    models = tuple(save_model(root / f"model{i}", tied=False, seed=i) for i in range(2))
    yield from start_pair(root, models)


@pytest.fixture(scope="module")
def tied_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The two models differ in their one shared embedding only."""
    root = tmp_path_factory.mktemp("tied")
    first = save_model(root / "model0", tied=True, seed=0)
    second = Path(shutil.copytree(first, root / "model1"))
    model = Qwen3ForCausalLM.from_pretrained(second)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(torch.linspace(0.5, 2, VOCABULARY)[:, None])
    model.save_pretrained(second)
    assert "lm_head.weight" not in tensors_of(second)
    yield from start_pair(root, (first, second))


def start_pair(root: Path, models: tuple[Path, ...]) -> Iterator[Pair]:
    locations = [publish(root, w, tensors_of(m)) for w, m in zip((A, B), models, strict=True)]
    engines = [Running(model) for model in models]
    greedy = [engine.run(engine.generate()) for engine in engines]
    yield Pair(
        root,
        (models[0], models[1]),
        (locations[0], locations[1]),
        (engines[0], engines[1]),
        (greedy[0], greedy[1]),
    )
    for engine in engines:
        engine.close()


def differ(a: Completion, b: Completion) -> bool:
    return not (
        np.array_equal(a.token_ids, b.token_ids)
        and np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
    )


def check_swap_both_ways(pair: Pair) -> None:
    first, second = pair.engines
    assert differ(pair.greedy[0], pair.greedy[1])
    first.take(B, pair.locations[1])
    after = first.run(first.generate())
    assert not differ(after, pair.greedy[1])
    assert set(after.versions) == {B.version}
    second.take(A, pair.locations[0])
    assert not differ(second.run(second.generate()), pair.greedy[0])


def test_greedy_output_after_a_swap_equals_a_fresh_engine(pair: Pair) -> None:
    check_swap_both_ways(pair)


def test_tied_embeddings_arrive(tied_pair: Pair) -> None:
    check_swap_both_ways(tied_pair)


@pytest.mark.parametrize("reset", [True, False])
def test_a_swap_under_load_invalidates_the_prefix_cache(
    pair: Pair, reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests hold the prompt's blocks all the time; without the reset it shows."""
    if not reset:
        monkeypatch.setattr(VllmEngine, "_cache_salt", lambda self: "never changes")
    first = pair.engines[0]
    first.take(WeightId(2, 1 + reset), publish(pair.root, WeightId(2, 1 + reset), weights_a(pair)))
    weights = WeightId(3, 1 + reset)
    location = publish(pair.root, weights, tensors_of(pair.models[1]))

    async def scenario() -> Completion:
        long = Sampling(temperature=1.0, max_tokens=300)
        load = [asyncio.create_task(first.generate(long, seed)) for seed in range(4)]
        await first.generate()
        await first.engine.stage(Source(weights=weights, location=location))
        await first.engine.swap(weights)
        assert not any(task.done() for task in load)
        after = await first.generate()
        await asyncio.gather(*load)
        return after

    assert differ(first.run(scenario()), pair.greedy[1]) == (not reset)


def weights_a(pair: Pair) -> dict[str, torch.Tensor]:
    return tensors_of(pair.models[0])


def newer(pair: Pair, index: int = 0) -> WeightId:
    return WeightId(pair.engines[index].engine.serving.inc + 1, 1)


def test_tokens_carry_their_versions_across_a_swap_and_are_not_changed_by_it(pair: Pair) -> None:
    first = pair.engines[0]
    start = newer(pair)
    first.take(start, publish(pair.root, start, weights_a(pair)))
    long = Sampling(temperature=1.0, max_tokens=200)
    undisturbed = first.run(first.generate(long, seed=7))
    after = WeightId(start.inc + 1, 9)
    location = publish(pair.root, after, tensors_of(pair.models[1]))

    async def scenario() -> Completion:
        await first.engine.stage(Source(weights=after, location=location))
        request = asyncio.create_task(first.generate(long, seed=7))
        await asyncio.sleep(0.3)
        await first.engine.swap(after)
        return await request

    completion = first.run(scenario())
    versions = completion.versions.tolist()
    boundary = versions.index(9)
    assert 0 < boundary < len(versions) == len(completion.token_ids) == 200
    assert versions == [start.version] * boundary + [9] * (200 - boundary)
    assert completion.token_ids[:boundary].tolist() == undisturbed.token_ids[:boundary].tolist()
    assert completion.token_ids[boundary:].tolist() != undisturbed.token_ids[boundary:].tolist()


def test_decoding_goes_on_while_weights_are_staged_and_a_newer_staging_supersedes(
    pair: Pair,
) -> None:
    """The file of the version is a pipe that nobody fills: staging lasts as long as we like."""
    first = pair.engines[0]
    slow, good = newer(pair), WeightId(newer(pair).inc, 2)
    location = Path(publish(pair.root, slow, weights_a(pair)))
    pipe = min(location.glob("*.safetensors"))
    pipe.unlink()
    os.mkfifo(pipe)

    async def scenario() -> None:
        staging = asyncio.create_task(
            first.engine.stage(Source(weights=slow, location=str(location)))
        )
        for _ in range(10):
            await first.generate()
        assert not staging.done()
        with pytest.raises(ValueError, match="not staged"):
            await first.engine.swap(slow)
        await first.engine.stage(
            Source(weights=good, location=publish(pair.root, good, weights_a(pair)))
        )
        with pytest.raises(StagingError, match="superseded"):
            await staging
        await first.engine.swap(good)

    first.run(scenario())
    threading.Thread(target=pipe.write_bytes, args=[b""], daemon=True).start()  # frees the reader
    assert first.engine.serving == good


def damage(location: str) -> None:
    """Flips one bit of the last tensor's data."""
    file = max(Path(location).glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("fault", ["missing", "renamed", "misshapen", "wrong type", "damaged"])
def test_a_bad_tensor_is_refused_by_name_and_the_old_version_serves_on(
    pair: Pair, fault: str
) -> None:
    first = pair.engines[0]
    before = first.run(first.generate())
    serving, weights = first.engine.serving, WeightId(newer(pair).inc, 50)
    tensors = tensors_of(pair.models[1])
    name = max(tensors)
    if fault == "missing":
        del tensors[name]
    if fault == "renamed":
        tensors[name + "x"] = tensors.pop(name)
    if fault == "misshapen":
        tensors[name] = tensors[name][:-1].clone()
    if fault == "wrong type":
        tensors[name] = tensors[name].to(torch.bfloat16)
    location = publish(pair.root / fault.replace(" ", "_"), weights, tensors)
    if fault == "damaged":
        damage(location)
        with pytest.raises(StagingError, match="damaged"):
            first.run(first.engine.stage(Source(weights=weights, location=location)))
    else:
        with pytest.raises(StagingError, match=name.replace(".", r"\.")):
            first.run(first.engine.stage(Source(weights=weights, location=location)))
    assert first.engine.serving == serving
    assert not differ(first.run(first.generate()), before)


def test_logprobs_are_those_of_the_tempered_distribution(pair: Pair) -> None:
    first = pair.engines[0]
    weights = newer(pair)
    first.take(weights, publish(pair.root, weights, weights_a(pair)))
    completion = first.run(first.generate(Sampling(temperature=0.6, max_tokens=30), seed=3))
    model = Qwen3ForCausalLM.from_pretrained(pair.models[0], dtype=torch.float32)
    ids = torch.tensor(np.concatenate([PROMPT, completion.token_ids])[None].astype(np.int64))
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.6, -1)
    expected = expected.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    assert np.abs(completion.logprobs - expected.numpy()).max() < 1e-4


def test_seeds_reproduce_samples_whatever_else_runs(pair: Pair) -> None:
    first = pair.engines[0]
    sampling = Sampling(temperature=1.0, max_tokens=20)
    alone = first.run(first.generate(sampling, seed=2**62 + 5))

    async def among_others() -> list[Completion]:
        seeds = [2**62 + 5, 1, 2, 3]
        return list(await asyncio.gather(*[first.generate(sampling, seed) for seed in seeds]))

    same, *others = first.run(among_others())
    assert same.token_ids.tolist() == alone.token_ids.tolist()
    assert all(o.token_ids.tolist() != alone.token_ids.tolist() for o in others)


def test_a_void_lease_frees_the_engine_at_once_and_the_other_groups_go_on_as_they_were(
    pair: Pair, random_tiny_task: Path
) -> None:
    """Eight rollouts fill the engine's places, four more wait at the buffer for those given up."""
    config = make_scene_config(
        random_tiny_task, data__max_response_length=300, generator__max_concurrent_rollouts=8
    )
    tokens, rewards = Tokens(config), RewardWorkers(config.reward)
    tokens.end_ids = ()  # all responses are of full length
    engine = pair.engines[0].engine

    async def scenario(*, void: list[list[int]]) -> SmallBuffer:
        async with Scene(config, tokens, rewards, [lease(i) for i in range(4)], engine) as running:
            buffer, worker = running.buffer, running.worker
            await buffer.until(lambda: len(buffer.started) == 4)
            await buffer.until(lambda: all(sum(w.lengths()) > 20 for w in worker._held.values()))
            worker.give_up(void)
            buffer.leases = [lease(4), lease(5)]
            if void:
                await buffer.until(lambda: len(buffer.started) == 6)
                assert not buffer.groups, "two new groups began before any of the others ended"
                assert engine._llm.output_processor.get_num_unfinished_requests() == 8
            await running.groups(6 - len(void))
            assert engine._llm.output_processor.get_num_unfinished_requests() == 0
            return buffer

    try:
        undisturbed = pair.engines[0].run(scenario(void=[]))
        buffer = pair.engines[0].run(scenario(void=[[0, 1, 0], [0, 2, 0]]))
    finally:
        rewards.close()
        tokens.close()
    expected = {group.id: group for group in undisturbed.groups}
    for group in buffer.groups:
        for found, wanted in zip(group.rollouts, expected[group.id].rollouts, strict=True):
            assert found.token_ids.tolist() == wanted.token_ids.tolist()
            # other groups beside it: the same numbers but for the order of their sums
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)
    assert sorted(failed.group for failed in buffer.failed) == [[0, 1], [0, 2]]
    lengths = [length for failed in buffer.failed for length in failed.lengths]
    assert all(5 < length < 300 for length in lengths), lengths


def test_the_stop_token_ends_the_response_and_stays_in_it(pair: Pair) -> None:
    first = pair.engines[0]
    whole = first.run(first.generate())
    stop = int(whole.token_ids[3])
    end = whole.token_ids.tolist().index(stop) + 1
    stopped = first.run(first.generate(Sampling(0.0, 12, stop_token_ids=(stop,))))
    assert stopped.token_ids.tolist() == whole.token_ids[:end].tolist()
    assert (stopped.finish_reason, whole.finish_reason) == ("stop", "length")


def test_a_request_that_does_not_fit_fails_alone(pair: Pair) -> None:
    first = pair.engines[0]
    too_long = np.zeros(2000, np.int32)
    with pytest.raises(RequestError):
        first.run(first.engine.generate(too_long, GREEDY, seed=0, request_id="long"))
    assert len(first.run(first.generate()).token_ids) == 12


def test_a_load_that_fails_half_way_is_fatal_and_nothing_is_served_after_it(
    tied_pair: Pair,
) -> None:
    second = tied_pair.engines[1]
    second.engine._staged = WeightId(9, 9)  # the worker has no such weights: its load raises
    with pytest.raises(EngineError, match=r"loading weights 9\.9 failed half-way.*not staged"):
        second.run(second.engine.swap(WeightId(9, 9)))
    with pytest.raises(TimeoutError):
        second.run(second.generate(), timeout_s=1)


def test_a_dead_engine_is_an_engine_error(tied_pair: Pair) -> None:
    first = tied_pair.engines[0]
    children = {child.pid for child in multiprocessing.active_children()}

    async def scenario() -> None:
        request = asyncio.create_task(first.generate(Sampling(1.0, 400)))
        await asyncio.sleep(0.2)
        for process in first.engine._llm.engine_core.resources.engine_manager.processes:
            assert process.pid in children
            process.kill()
        await request

    with pytest.raises(EngineError, match="died"):
        first.run(scenario())


def test_an_untested_vllm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generators.vllm_start, "SUPPORTED_VLLM", ((0, 1), (0, 2)))
    engine = VllmEngine(make_config(tmp_path))
    with pytest.raises(ValueError, match=r"tested with >=0\.1,<0\.2"):
        asyncio.run(engine.start())


def test_insecure_serialisation_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(ValueError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        asyncio.run(VllmEngine(make_config(tmp_path)).start())


def test_a_model_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: there is no directory .*nowhere"):
        asyncio.run(VllmEngine(make_config(tmp_path / "nowhere")).start())
