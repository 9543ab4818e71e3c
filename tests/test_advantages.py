"""Advantages by group: the reference numbers, and what must be exactly zero."""

from __future__ import annotations

import pytest

from learner.advantages import compute_advantages

FIVE = [1.0, 0.0, 0.0, 1.0, 1.0]
OTHER = [0.0, 0.0, 0.0, 1.0, 0.0]


def test_group_std_is_grpo_with_ddof_1() -> None:
    [found] = compute_advantages([FIVE], std="group")
    assert found == pytest.approx([0.730295, -1.095443, -1.095443, 0.730295, 0.730295], abs=1e-6)


def test_no_std_only_centres() -> None:
    [found] = compute_advantages([FIVE], std="none")
    assert found == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])


def test_batch_std_centres_by_group_and_divides_by_the_whole_batch() -> None:
    first, second = compute_advantages([FIVE, OTHER], std="batch")
    assert first == pytest.approx([0.894427, -1.341641, -1.341641, 0.894427, 0.894427], abs=1e-6)
    assert second == pytest.approx([-0.447214, -0.447214, -0.447214, 1.788854, -0.447214], abs=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero_beside_a_group_with_spread(std: str) -> None:
    noisy = [0.1 + 0.2, 0.3, 0.3]  # equal up to rounding
    for trivial in ([1.0] * 3, noisy, [1.0], [None, 0.5], []):
        _, found = compute_advantages([FIVE, trivial], std=std)  # type: ignore[arg-type, list-item]
        assert found == [None if r is None else 0.0 for r in trivial]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_unscored_rollouts_do_not_move_the_others(std: str) -> None:
    [whole] = compute_advantages([[1.0, 0.0, 0.0]], std=std)  # type: ignore[arg-type]
    [found] = compute_advantages([[None, 1.0, None, 0.0, 0.0]], std=std)  # type: ignore[arg-type]
    assert found == [None, whole[0], None, whole[1], whole[2]]


def test_a_batch_without_any_spread_is_all_zero() -> None:
    assert compute_advantages([[1.0, 1.0], [0.0, 0.0]], std="batch") == [[0.0, 0.0], [0.0, 0.0]]


def test_rewards_of_other_groups_do_not_reach_a_groups_baseline() -> None:
    alone = compute_advantages([FIVE], std="group")[0]
    assert compute_advantages([OTHER, FIVE, [9.0, 8.0]], std="group")[1] == alone


THREE = [2.0, 5.0, 5.0]
"""Of a group that lost two of its five rollouts: mean 4, deviations -2, 1, 1."""


def test_groups_of_different_sizes_in_one_batch() -> None:
    """By hand. FIVE: mean 0.6, deviations 0.4, -0.6, -0.6, 0.4, 0.4, sum of squares 1.2; THREE: sum
    of squares 6. ddof=1: sqrt(1.2 / 4) = 0.547723, sqrt(6 / 2) = 1.732051. Over the batch:
    sqrt((1.2 + 6) / 8) = 0.948683."""
    none = compute_advantages([FIVE, THREE], std="none")
    assert none[0] == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])
    assert none[1] == pytest.approx([-2, 1, 1])
    group = compute_advantages([FIVE, THREE], std="group")
    assert group[0] == pytest.approx([0.730295, -1.095443, -1.095443, 0.730295, 0.730295], abs=1e-5)
    assert group[1] == pytest.approx([-1.154700, 0.577350, 0.577350], abs=1e-5)
    batch = compute_advantages([FIVE, THREE], std="batch")
    assert batch[0] == pytest.approx([0.421637, -0.632456, -0.632456, 0.421637, 0.421637], abs=1e-6)
    assert batch[1] == pytest.approx([-2.108185, 1.054093, 1.054093], abs=1e-6)
