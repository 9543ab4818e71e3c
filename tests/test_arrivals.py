"""What the buffer reads off a group that comes in, without taking it apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_peers import make_group

from asyncrl.messages import Lease, Submit
from asyncrl.types import RolloutGroup, WeightId
from asyncrl.wire import decode_columns, encode_group
from buffer.arrivals import Arrival, fault, summarize

LEASE = Lease(
    kind="train",
    group=[0, 3],
    attempt=0,
    seed_k=0,
    row={"source": "words"},
    num_rollouts=3,
    temperature=1.0,
    min_version=0,
    timeout_s=60.0,
)
GROUP = make_group(LEASE, version=4, inc=1, length=5)


def changed(index: int, **columns: Any) -> RolloutGroup:
    """GROUP with other arrays in one of its rollouts."""
    arrays: dict[str, Any] = {
        name: np.array(values, getattr(GROUP.rollouts[0], name).dtype)
        for name, values in columns.items()
    }
    rollouts = list(GROUP.rollouts)
    rollouts[index] = replace(rollouts[index], **arrays)
    return replace(GROUP, rollouts=tuple(rollouts))


def arrival_of(group: RolloutGroup) -> Arrival:
    return summarize(decode_columns(encode_group(group)))


def fault_of(group: RolloutGroup) -> str | None:
    columns = decode_columns(encode_group(group))
    return fault(
        columns,
        summarize(columns),
        Submit(kind="train", group=[0, 3], attempt=0),
        max_rollouts=3,
        max_length=5,
        temperature=1.0,
        newest=WeightId(1, 6),
    )


def test_tokens_are_counted_by_version_where_the_policy_wrote_them() -> None:
    assert arrival_of(GROUP).token_versions == {4: 15}
    group = changed(1, versions=[2, 2, 3, 5, 6], loss_mask=[1, 1, 1, 0, 1])
    arrival = arrival_of(group)
    assert arrival.token_versions == {2: 2, 3: 1, 4: 10, 6: 1}
    assert arrival.oldest_version == 2
    assert arrival.lengths == (5, 5, 5) and arrival.rewards == (0.0, 1.0, 0.0)


def test_a_group_without_a_written_token_has_no_oldest_version() -> None:
    empty: dict[str, Any] = {
        name: [] for name in ("token_ids", "logprobs", "versions", "loss_mask")
    }
    rollouts = tuple(changed(i, **empty).rollouts[i] for i in range(3))
    arrival = arrival_of(replace(GROUP, rollouts=rollouts))
    assert arrival.oldest_version is None and arrival.lengths == (0, 0, 0)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"token_ids": [1, 2, -7, 4, 5]}, "rollout 1 has a token id of -7"),
        ({"logprobs": [0, 0, 0, 0, np.nan]}, "rollout 1 has a log-probability that is not finite"),
        ({"versions": [4, 4, 4, 4, 7]}, "versions 4 to 7, the newest published one is 6"),
        ({"versions": [-1, 4, 4, 4, 4]}, "versions -1 to 4"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(columns: dict[str, Any], problem: str) -> None:
    assert fault_of(GROUP) is None
    assert problem in (fault_of(changed(1, **columns)) or "")


def test_tokens_that_an_environment_wrote_need_no_probability_and_no_version() -> None:
    mask = [1, 1, 1, 1, 0]
    logprobs, versions = [0, 0, 0, 0, np.inf], [4, 4, 4, 4, 99]
    assert fault_of(changed(2, logprobs=logprobs, versions=versions, loss_mask=mask)) is None


def test_a_rollout_that_is_too_long_is_named() -> None:
    long = {name: np.ones(6) for name in ("token_ids", "logprobs", "versions", "loss_mask")}
    assert fault_of(changed(2, **long)) == "rollout 2 has 6 tokens, 5 are allowed"
