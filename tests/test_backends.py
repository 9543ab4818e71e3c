"""Which backend a broadcast takes, and who cannot take part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest

from asyncrl.backends import choose_backend

APART = {"generator-0": ["GPU-b"], "generator-1": ["GPU-c"]}


@pytest.mark.parametrize(
    ("sender", "receivers", "backend"),
    [
        ("GPU-a", APART, "nccl"),
        ("GPU-a", {}, "nccl"),
        ("cpu", APART, "gloo"),
        ("cpu", {"generator-0": ["cpu"]}, "gloo"),
        ("GPU-a", {"generator-0": ["GPU-b"], "generator-1": ["cpu"]}, "gloo"),
        ("GPU-a", {"generator-0": ["GPU-a"]}, "gloo"),
        ("GPU-a", {"generator-0": ["GPU-b"], "generator-1": ["GPU-b"]}, "gloo"),
        ("GPU-a", {"generator-0": ["GPU-b", "GPU-c"]}, "gloo"),
    ],
)
def test_auto_takes_nccl_only_between_gpus_of_one_member_each(
    sender: str, receivers: Mapping[str, Sequence[str]], backend: str
) -> None:
    assert choose_backend("auto", sender, receivers) == (backend, {})


@pytest.mark.parametrize(
    ("sender", "receivers", "refused"),
    [
        ("GPU-a", APART, {}),
        ("GPU-a", {"generator-0": ["GPU-b", "GPU-c"]}, {}),
        ("cpu", APART, {"generator-0": "the learner has no GPU", "generator-1": "no GPU"}),
        ("GPU-a", APART | {"generator-2": ["cpu"]}, {"generator-2": "it has no GPU"}),
        ("GPU-a", {"generator-0": ["GPU-a"]}, {"generator-0": "shares a GPU"}),
        ("GPU-a", APART | {"generator-2": ["GPU-c"]}, {"generator-2": "shares a GPU"}),
        ("GPU-a", {"generator-0": ["GPU-b", "GPU-b"]}, {"generator-0": "shares a GPU"}),
    ],
)
def test_nccl_by_name_refuses_those_who_have_no_gpu_of_their_own(
    sender: str, receivers: Mapping[str, Sequence[str]], refused: Mapping[str, str]
) -> None:
    backend, found = choose_backend("nccl", sender, receivers)
    assert backend == "nccl" and list(found) == list(refused)
    assert all(refused[name] in reason for name, reason in found.items())


@pytest.mark.parametrize("wanted", ["auto", "gloo"])
def test_gloo_refuses_nobody(wanted: Literal["auto", "gloo"]) -> None:
    assert choose_backend(wanted, "cpu", {"generator-0": ["GPU-a", "cpu"]}) == ("gloo", {})
