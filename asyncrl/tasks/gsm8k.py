"""A reward for word problems whose answer is one number, as in GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1 if the response's answer equals the expected number, else 0. verl's signature.

    The answer is the first number behind the last `####`; without that mark, the last number of the
    response.
    """
    _, mark, behind = solution_str.rpartition("####")
    found = _numbers(behind)
    if not found:
        return 0.0
    answer = found[0] if mark else found[-1]
    expected = _numbers(str(ground_truth))
    return float(len(expected) == 1 and answer == expected[0])


def _numbers(text: str) -> list[Decimal]:
    return [Decimal(number.replace(",", "")) for number in _NUMBER.findall(text)]
