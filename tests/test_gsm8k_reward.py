"""The reward for word problems: which number counts as the answer."""

from __future__ import annotations

import pytest

from asyncrl.tasks.gsm8k import compute_score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("3 apples and 4 apples make 7.\n#### 7", "7", 1.0),
        ("#### 1,200", "1200", 1.0),
        ("The total is $1,200.50.", "1200.5", 1.0),
        ("#### -3 degrees, not 5", "-3", 1.0),
        ("First #### 1, no, wait: #### 2", "2", 1.0),
        ("It is 7, as 3 + 4 = 8", "7", 0.0),
        ("7\n####", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ],
)
def test_the_number_behind_the_mark_counts_or_else_the_last(
    response: str, truth: str, score: float
) -> None:
    assert compute_score("openai/gsm8k", response, truth, {}) == score


def test_a_number_is_accepted_as_the_truth_as_well_as_a_text() -> None:
    assert compute_score("openai/gsm8k", "#### 18", 18, None) == 1.0
