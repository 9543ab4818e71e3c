"""The scripted engine: its samples are a pure function of seed and (by_version) served version."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from asyncrl.config.schema import ScriptedOptions
from asyncrl.types import Completion, Sampling, WeightId
from generators.engine import RequestError, Source
from generators.scripted_engine import ScriptedEngine, scripted_completion, slowness

SAMPLING = Sampling(temperature=1.0, max_tokens=6, stop_token_ids=(1, 2))
PROMPT = np.array([5, 6], np.int32)


def sample(seed: int, version: int, mode: str = "by_version", **changes: int) -> Completion:
    options = ScriptedOptions.model_validate({"mode": mode, "length": 8})
    sampling = Sampling(1.0, changes.get("max_tokens", 6), (1, 2))
    return scripted_completion(
        seed=seed, version=version, options=options, sampling=sampling, vocab_size=64
    )


def same(a: Completion, b: Completion) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)


def test_same_seed_and_version_give_the_same_sample() -> None:
    assert all(same(sample(seed, 3), sample(seed, 3)) for seed in range(50))


def test_by_version_shows_a_wrong_version_and_fixed_does_not() -> None:
    assert not any(same(sample(seed, 3), sample(seed, 4)) for seed in range(50))
    assert all(same(sample(seed, 3, "fixed"), sample(seed, 4, "fixed")) for seed in range(50))
    assert sample(7, 4, "fixed").versions.tolist() == [4] * len(sample(7, 4, "fixed").token_ids)


def test_samples_are_legal_and_both_finish_reasons_occur() -> None:
    samples = [sample(seed, 0) for seed in range(300)]
    for s in samples:
        assert 1 <= len(s.token_ids) <= 6
        assert len(s.logprobs) == len(s.versions) == len(s.token_ids)
        assert s.token_ids.dtype == np.int32
        assert s.logprobs.dtype == np.float32
        assert ((s.token_ids >= 0) & (s.token_ids < 64)).all()
        assert np.isfinite(s.logprobs).all()
        assert (s.logprobs <= 0).all()
        assert (s.token_ids[-1] == 1) or s.finish_reason == "length"
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    assert {len(s.token_ids) for s in samples} == set(range(1, 7))


def test_engine_serves_the_swapped_version_and_equals_the_pure_function() -> None:
    async def scenario() -> tuple[Completion, Completion]:
        engine = ScriptedEngine(ScriptedOptions(tokens_per_s=1e6), vocab_size=64)
        first = await engine.generate(PROMPT, SAMPLING, seed=5, request_id="a")
        await engine.stage(Source(weights=WeightId(1, 2), location="nowhere"))
        await engine.swap(WeightId(1, 2))
        assert engine.serving == WeightId(1, 2)
        with pytest.raises(ValueError, match="not staged"):
            await engine.swap(WeightId(1, 3))
        return first, await engine.generate(PROMPT, SAMPLING, seed=5, request_id="b")

    before, after = asyncio.run(scenario())
    assert same(before, sample(5, 0))
    assert same(after, sample(5, 2))


def test_a_response_takes_its_length_over_the_stated_speed() -> None:
    engine = ScriptedEngine(ScriptedOptions(tokens_per_s=20, mode="fixed"), vocab_size=64)
    started = time.monotonic()
    completion = asyncio.run(engine.generate(PROMPT, SAMPLING, seed=5, request_id="a"))
    assert time.monotonic() - started >= len(completion.token_ids) / 20


def test_an_empty_prompt_is_a_failed_request() -> None:
    engine = ScriptedEngine(ScriptedOptions(), vocab_size=64)
    with pytest.raises(RequestError, match="empty prompt"):
        asyncio.run(engine.generate(PROMPT[:0], SAMPLING, seed=5, request_id="a"))


def test_a_seeded_share_of_the_responses_takes_slow_factor_times_as_long() -> None:
    options = ScriptedOptions(slow_share=0.1, slow_factor=8)
    slow = [seed for seed in range(5000) if slowness(seed, options) == 8]
    assert 0.08 < len(slow) / 5000 < 0.12
    assert all(slowness(seed, ScriptedOptions(slow_factor=8)) == 1 for seed in slow)
    quick = next(seed for seed in range(5000) if seed not in slow)

    async def took_s(seed: int) -> float:
        options = ScriptedOptions(tokens_per_s=100, slow_share=0.1, slow_factor=8)
        engine = ScriptedEngine(options, vocab_size=64)
        began = time.monotonic()
        completion = await engine.generate(PROMPT, SAMPLING, seed=seed, request_id="a")
        assert same(completion, sample(seed, 0)), "slow or not, the tokens are the same"
        return (time.monotonic() - began) / len(completion.token_ids)

    assert asyncio.run(took_s(slow[0])) >= 0.08
    assert 0.01 <= asyncio.run(took_s(quick)) < 0.08


def test_tokens_of_a_request_in_flight_can_be_counted() -> None:
    engine = ScriptedEngine(ScriptedOptions(tokens_per_s=100), vocab_size=64)
    seed = next(seed for seed in range(100) if len(sample(seed, 0).token_ids) == 6)

    async def scenario() -> list[int]:
        request = asyncio.create_task(engine.generate(PROMPT, SAMPLING, seed=seed, request_id="a"))
        counts = []
        while not request.done():
            await asyncio.sleep(0.005)
            counts.append(engine.num_sampled("a"))
        assert engine.num_sampled("b") == 0
        return counts

    *during, after = asyncio.run(scenario())
    assert during == sorted(during)
    assert 0 < max(during) <= 6
    assert after == 0, "it is finished"
