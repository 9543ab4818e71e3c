"""Micro-batches: what is in them, how they are dealt, and that nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import make_group, make_groups

from asyncrl.types import Rollout, RolloutGroup
from learner.batch import StepBatch, make_batch, staleness_metrics


def with_rollouts(group: RolloutGroup, rollouts: list[Rollout]) -> RolloutGroup:
    return replace(group, rollouts=tuple(rollouts))


def batch_of(groups: list[RolloutGroup], *, max_tokens: int = 64, num_ranks: int = 1) -> StepBatch:
    """Advantages are the place of the rollout in the step, so that mix-ups show."""
    advantages: list[list[float | None]] = []
    for group in groups:
        start = sum(map(len, advantages))
        advantages.append(
            [None if r.reward is None else start + i + 0.5 for i, r in enumerate(group.rollouts)]
        )
    return make_batch(groups, advantages, max_tokens=max_tokens, num_ranks=num_ranks)


def read_back(batch: StepBatch) -> dict[int, list[tuple]]:
    """By row: (context, target, behavior, advantage, temperature) of each loss token."""
    found: dict[int, list[tuple]] = {}
    for micro in (m for mine in batch.by_rank for m in mine):
        width = micro.input_ids.shape[1]
        for i in range(len(micro.targets)):
            if not micro.loss_mask[i]:
                continue
            line, column = divmod(int(micro.positions[i]), width)
            context = tuple(micro.input_ids[line, : column + 1].tolist())
            values = (micro.targets[i], micro.behavior[i], micro.advantages[i])
            found.setdefault(int(micro.rows[i]), []).append(
                (context, *(v.item() for v in values), micro.temperatures[i].item())
            )
    return found


@settings(max_examples=40, deadline=None)
@given(num_groups=st.integers(0, 6), max_tokens=st.integers(16, 200), num_ranks=st.integers(1, 4))
def test_every_token_is_predicted_from_all_before_it(
    num_groups: int, max_tokens: int, num_ranks: int
) -> None:
    groups = make_groups(num_groups, temperature=0.5)
    batch = batch_of(groups, max_tokens=max_tokens, num_ranks=num_ranks)
    found = read_back(batch)
    number = 0
    for group in groups:
        for rollout in group.rollouts:
            ids = [*group.prompt_ids.tolist(), *rollout.token_ids.tolist()]
            prompt = len(group.prompt_ids)
            expected = [
                (tuple(ids[: prompt + t]), ids[prompt + t], rollout.logprobs[t], number + 0.5, 0.5)
                for t in range(len(rollout.token_ids))
            ]
            assert found.pop(number) == expected
            number += 1
    assert not found
    assert batch.num_loss_tokens == sum(group.num_response_tokens for group in groups)


@settings(max_examples=40, deadline=None)
@given(num_groups=st.integers(0, 6), max_tokens=st.integers(16, 200), num_ranks=st.integers(1, 4))
def test_all_ranks_get_equally_many_micro_batches_within_the_budget(
    num_groups: int, max_tokens: int, num_ranks: int
) -> None:
    batch = batch_of(make_groups(num_groups), max_tokens=max_tokens, num_ranks=num_ranks)
    assert len({len(mine) for mine in batch.by_rank}) == 1
    assert len(batch.by_rank[0]) >= 1
    for micro in (m for mine in batch.by_rank for m in mine):
        assert micro.input_ids.numel() <= max_tokens
    assert batch.tokens_by_rank() == [sum(len(m.targets) for m in r) for r in batch.by_rank]


def test_ranks_share_the_work_evenly() -> None:
    batch = batch_of(make_groups(8, size=8), max_tokens=10_000, num_ranks=2)
    first, second = (sum(m.input_ids.numel() for m in mine) for mine in batch.by_rank)
    assert abs(first - second) <= 0.1 * first


def test_unscored_and_empty_and_masked_rollouts_are_left_out() -> None:
    group = make_group(0, size=4)
    first, second, third, fourth = group.rollouts
    nothing = replace(
        second,
        token_ids=second.token_ids[:0],
        logprobs=second.logprobs[:0],
        versions=second.versions[:0],
        loss_mask=second.loss_mask[:0],
    )
    masked = replace(third, loss_mask=np.zeros_like(third.loss_mask))
    unscored = replace(fourth, reward=None)
    batch = batch_of([with_rollouts(group, [first, nothing, masked, unscored])])
    assert set(read_back(batch)) == {0}
    assert batch.num_loss_tokens == len(first.token_ids)


def test_tokens_of_the_environment_are_context_but_not_targets() -> None:
    group = make_group(5, size=1)
    rollout = Rollout(
        token_ids=np.arange(10, 16, dtype=np.int32),
        logprobs=np.full(6, -1.0, np.float32),
        versions=np.zeros(6, np.int32),
        loss_mask=np.array([True, True, False, False, True, False]),
        finish_reason="stop",
        reward=1.0,
    )
    [tokens] = read_back(batch_of([with_rollouts(group, [rollout])])).values()
    assert [target for _, target, *_ in tokens] == [10, 11, 14]
    assert tokens[-1][0] == (*group.prompt_ids.tolist(), 10, 11, 12, 13)


def test_a_row_over_the_budget_is_an_error_that_names_the_knob() -> None:
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=4"):
        batch_of(make_groups(2), max_tokens=4)


def test_the_same_groups_give_the_same_batch() -> None:
    first, second = (batch_of(make_groups(4), num_ranks=2) for _ in range(2))
    for a, b in zip(first.by_rank, second.by_rank, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(getattr(x, n), getattr(y, n)) for n in type(x).__slots__)


def test_staleness_is_counted_by_tokens_and_over_the_bound_is_an_error() -> None:
    group = make_group(0, size=1)
    length = 4
    rollout = replace(
        group.rollouts[0],
        token_ids=np.ones(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.array([3, 3, 4, 0], np.int32),
        loss_mask=np.array([True, True, True, False]),
    )
    groups = [with_rollouts(group, [rollout])]
    found = staleness_metrics(groups, step=5, max_staleness=2)
    assert found["staleness/mean"] == pytest.approx(5 / 3)
    assert found["staleness/max"] == 2
    assert [found[f"staleness/tokens_{age}"] for age in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="max_staleness is 1"):
        staleness_metrics(groups, step=5, max_staleness=1)
    with pytest.raises(RuntimeError, match="-1 to 0"):
        staleness_metrics(groups, step=3, max_staleness=1)
