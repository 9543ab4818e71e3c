"""Which backend a broadcast of weights takes: NCCL between GPUs, gloo for all else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Backend = Literal["gloo", "nccl"]
CPU = "cpu"


def choose_backend(
    wanted: Literal["auto", "nccl", "gloo"],
    sender: str,
    receivers: Mapping[str, Sequence[str]],
) -> tuple[Backend, dict[str, str]]:
    """The backend, and why members cannot take part in it (by generator, in words).

    `sender` is the learner's device and `receivers` those of each generator's tensor-parallel
    ranks: "cpu", or the UUID of a GPU. NCCL refuses two ranks on one GPU. Two communicators that
    meet on the same GPUs can wait for each other for ever, and tensor-parallel ranks have one
    already: so auto takes gloo for them.
    """
    if wanted == "gloo":
        return "gloo", {}
    refused = _without_gpus(sender, receivers)
    if wanted == "nccl":
        return "nccl", refused
    is_parallel = any(len(devices) > 1 for devices in receivers.values())
    return ("gloo" if refused or is_parallel else "nccl"), {}


def _without_gpus(sender: str, receivers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Those that have no GPU of their own."""
    if sender == CPU:
        return dict.fromkeys(receivers, "weights.backend is nccl, but the learner has no GPU")
    taken, refused = {sender}, {}
    for name, devices in receivers.items():
        if CPU in devices:
            refused[name] = "weights.backend is nccl, but it has no GPU"
        elif taken & set(devices) or len(set(devices)) < len(devices):
            refused[name] = "weights.backend is nccl, but it shares a GPU with another member"
        taken |= set(devices)
    return refused
