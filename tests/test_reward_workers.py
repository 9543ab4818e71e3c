"""Scoring in killable processes: whatever a verifier does, the others are scored, in time."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Reward
from generators.rewards import RewardWorkers, Score, UserError

VERIFIERS = Path(__file__).parent / "verifiers.py"
ROW: dict[str, Any] = {"prompt": "?", "source": "test", "answer": "yes", "extra": {}}


def make(function: str = "score", **options: Any) -> RewardWorkers:
    settings = {"timeout_s": 0.6, "workers": 2, "path": f"{VERIFIERS}:{function}", **options}
    return RewardWorkers(Reward.model_validate(settings))


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardWorkers]:
    workers = make()
    workers.start()
    yield workers
    workers.close()


def scores(workers: RewardWorkers, *texts: str) -> list[Score]:
    async def all_at_once() -> list[Score]:
        calls = [workers.score(ROW, text, name=f"sample {i}") for i, text in enumerate(texts)]
        return await asyncio.gather(*calls)

    return asyncio.run(all_at_once())


@pytest.mark.parametrize(
    ("text", "reward", "parts"),
    [
        ("yes", 1.0, {}),
        ("no", 0.0, {}),
        ("numpy", 0.5, {}),
        ("bool", 1.0, {}),
        ("dict", 1.0, {"format": 0.25}),
        ("raise", None, {}),
        ("exit", None, {}),
        ("nan", None, {}),
        ("text", None, {}),
    ],
)
def test_a_result_is_a_number_or_no_reward(
    rewards: RewardWorkers, text: str, reward: float | None, parts: dict[str, float]
) -> None:
    (score,) = scores(rewards, text)
    assert score.reward == reward
    assert score.parts == parts


def test_a_hanging_verifier_is_killed_while_16_others_are_scored(rewards: RewardWorkers) -> None:
    started = time.monotonic()
    results = scores(rewards, *["yes"] * 8, "hang", *["no"] * 8)
    assert [r.reward for r in results] == [1.0] * 8 + [None] + [0.0] * 8
    assert 0.6 <= time.monotonic() - started < 8


def test_the_event_loop_stays_free_while_verifiers_hang(rewards: RewardWorkers) -> None:
    async def longest_gap() -> float:
        call = asyncio.create_task(rewards.score(ROW, "hang", name="sample"))
        longest, last = 0.0, time.monotonic()
        while not call.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    assert asyncio.run(longest_gap()) < 0.3


def test_an_async_reward_function_is_awaited() -> None:
    workers = make("score_async")
    workers.start()
    try:
        assert [s.reward for s in scores(workers, "yes", "no")] == [1.0, 0.0]
    finally:
        workers.close()


def test_the_first_error_is_logged_with_its_traceback_and_sample(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers = make()
    workers.start()
    try:
        with caplog.at_level(logging.ERROR):
            scores(workers, "raise")
            scores(workers, "raise")
    finally:
        workers.close()
    (record,) = [record for record in caplog.records if record.name == "generators.rewards"]
    assert "sample 0" in record.getMessage()
    assert "KeyError: 'no such answer'" in record.getMessage()
    assert "verifiers.py" in record.getMessage()


def test_on_error_stop_ends_the_run_with_the_reason() -> None:
    workers = make(on_error="stop")
    workers.start()
    try:
        with pytest.raises(UserError, match=r"(?s)sample 0.*no such answer.*on_error is stop"):
            scores(workers, "raise")
    finally:
        workers.close()


def test_a_path_without_a_function_is_an_error_at_start() -> None:
    workers = make("scores")
    try:
        with pytest.raises(ValueError, match="scores"):
            workers.start()
    finally:
        workers.close()


def test_close_leaves_no_process_even_if_a_verifier_ignores_sigterm() -> None:
    workers = make(timeout_s=60)
    workers.start()

    async def hang_then_close() -> float:
        call = asyncio.create_task(workers.score(ROW, "hang hard", name="sample"))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        workers.close()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        return time.monotonic() - started

    assert asyncio.run(hang_then_close()) < 3
    assert not multiprocessing.active_children()
