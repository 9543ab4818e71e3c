"""A reward: 1 if the answer is the expected text, white space around it aside, else 0."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """verl's signature."""
    return float(solution_str.strip() == str(ground_truth).strip())
