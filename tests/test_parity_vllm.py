"""Parity with real engine and real learner: a good pair is one policy, each fault is not one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm

from asyncrl.config.schema import Config, Parity
from asyncrl.tasks.rows import load_rows
from asyncrl.types import RolloutGroup
from generators.sample import sample_round
from generators.tokens import Tokens
from generators.vllm_engine import VllmEngine
from learner.compare import log_ratios
from learner.parity import Gap, excesses, measure
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def make_config(task: Path, dtype: str, temperature: float) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(task / "model"), "dtype": dtype},
            "data": {
                "train_files": [str(task / "train.jsonl")],
                "max_prompt_length": 24,
                "max_response_length": 16,
            },
            "reward": {"path": "unused:unused"},
            "sampling": {"temperature": temperature},
            "generator": {"vllm": {"max_num_seqs": 256, "cpu_kv_cache_gib": 1}},
        }
    )


class BothSides:
    """An engine and a learner with the same weights."""

    def __init__(self, task: Path, dtype: str) -> None:
        self.task, self.dtype = task, dtype
        config = make_config(task, dtype, 1.0)
        self.tokens = Tokens(config)
        self.rows = load_rows(config).train[:256]
        self.policy: Policy = load_policy(config, start_ranks())
        self.runner = asyncio.Runner()
        self.engine = VllmEngine(config)
        self.runner.run(self.engine.start())
        self.num_rounds = 0

    def sample(self, temperature: float, *, rounds: int = 1) -> list[RolloutGroup]:
        config = make_config(self.task, self.dtype, temperature)

        async def sample() -> list[RolloutGroup]:
            prompts = [(row, await self.tokens.render(row)) for row in self.rows]
            groups: list[RolloutGroup] = []
            for _ in range(rounds):
                self.num_rounds += 1
                groups += await sample_round(
                    config, self.engine, prompts, self.num_rounds, self.tokens.end_ids
                )
            return groups

        return self.runner.run(sample())

    def gap(self, groups: list[RolloutGroup]) -> Gap:
        config = make_config(self.task, self.dtype, 1.0)
        return measure(log_ratios(self.policy, groups, config))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()
        self.tokens.close()


def both_sides(task: Path, dtype: str) -> Iterator[BothSides]:
    sides = BothSides(task, dtype)
    yield sides
    sides.close()


@pytest.fixture(scope="module")
def bfloat16(tiny_task: Path) -> Iterator[BothSides]:
    yield from both_sides(tiny_task, "bfloat16")


@pytest.fixture(scope="module")
def float32(tiny_task: Path) -> Iterator[BothSides]:
    yield from both_sides(tiny_task, "float32")


@pytest.fixture(scope="module")
def raw(tiny_task: Path) -> Iterator[BothSides]:
    """An engine that reports logprobs from before the temperature."""
    real = vllm.AsyncEngineArgs

    def with_raw_logprobs(**options: Any) -> Any:
        return real(**{**options, "logprobs_mode": "raw_logprobs"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "AsyncEngineArgs", with_raw_logprobs)
        yield from both_sides(tiny_task, "bfloat16")


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_at_any_temperature_the_mean_ratio_is_1_within_a_hundredth_and_nothing_is_refused(
    bfloat16: BothSides, temperature: float
) -> None:
    gap = bfloat16.gap(bfloat16.sample(temperature, rounds=8))
    error = (2 * gap.k3 / gap.num_tokens) ** 0.5
    print(f"T {temperature}: {gap.in_words()}, standard error of the mean ratio {error:.5f}")
    assert gap.num_tokens > 4000 and error < 0.003, "enough to say so"
    assert 0.99 <= gap.ratio_mean <= 1.01
    assert not excesses(gap, Parity())


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_raw_logprobs_are_refused(raw: BothSides, temperature: float) -> None:
    gap = raw.gap(raw.sample(temperature, rounds=2))
    print(f"raw, T {temperature}: {gap.in_words()}")
    assert excesses(gap, Parity())


def with_logprobs_rolled(group: RolloutGroup) -> RolloutGroup:
    rollout = group.rollouts[0]
    return replace(group, rollouts=(replace(rollout, logprobs=np.roll(rollout.logprobs, 1)),))


def with_another_template(group: RolloutGroup) -> RolloutGroup:
    """As a template that begins with one more token renders it."""
    return replace(group, prompt_ids=np.concatenate([group.prompt_ids[:1], group.prompt_ids]))


@pytest.mark.parametrize("fault", [with_logprobs_rolled, with_another_template])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_shifted_positions_and_another_template_are_refused(
    bfloat16: BothSides, temperature: float, fault: Any
) -> None:
    gap = bfloat16.gap([fault(group) for group in bfloat16.sample(temperature, rounds=2)])
    print(f"{fault.__name__}, T {temperature}: {gap.in_words()}")
    assert excesses(gap, Parity())


def test_in_float32_no_logprob_is_a_thousandth_apart(float32: BothSides) -> None:
    gap = float32.gap(float32.sample(1.0, rounds=2))
    print(f"float32: {gap.in_words()}")
    assert gap.num_tokens > 1000 and gap.max < 1e-3
