"""A tenth of the answers take eight steps: what both orders do, by the real policy on a simulated
clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulation import Scenario, simulate

from asyncrl.types import GroupId

EVERY_PROMPT = Counter(GroupId(0, number) for number in range(40 * 8))


@pytest.mark.parametrize("order", ["fifo", "ready"])
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_waiting_trains_exactly_what_was_issued(bound: int, order: Any) -> None:
    outcome = simulate(Scenario(bound, order, groups_per_step=8, num_steps=40))
    assert Counter(outcome.trained) == EVERY_PROMPT
    assert max(outcome.ages) <= bound


@pytest.mark.parametrize("on_late", ["drop", "reissue"])
def test_letting_late_groups_go_favours_short_answers_and_says_so(on_late: str) -> None:
    outcome = simulate(Scenario(1, "ready", on_late, groups_per_step=8, num_steps=40))
    fate = "stale" if on_late == "drop" else "quarantined"
    assert outcome.fates["trained"] + outcome.fates[fate] == len(EVERY_PROMPT)
    assert outcome.fates[fate] > 0
    summary = outcome.summary()
    assert summary["length_let_go"] > summary["length_kept"]


def test_a_larger_bound_makes_the_learner_wait_less() -> None:
    busy = [
        simulate(Scenario(bound, groups_per_step=8, num_steps=40)).summary()["steps_per_unit"]
        for bound in (0, 1, 2, 4, 8)
    ]
    assert busy == sorted(busy)
    assert busy[-1] > 4 * busy[0]


def test_nothing_is_let_go_in_lock_step() -> None:
    outcome = simulate(Scenario(0, "ready", "drop", groups_per_step=8, num_steps=40))
    assert not outcome.let_go
    assert Counter(outcome.trained) == EVERY_PROMPT
