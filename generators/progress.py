"""How far the staging of one version is, at one receiver; and waiting for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from asyncrl.types import WeightId
from generators.engine import StageTimes, StagingError

POLL_S = (0.02, 0.2)
"""Seconds between two looks at a staging that runs: at first, and at most."""


class Progress(BaseModel):
    """What one receiver says of the staging that it was last asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str = ""
    """Of the weights."""
    state: Literal["idle", "running", "done", "failed"] = "idle"
    error: str = ""
    is_lost: bool = False
    """As in messages.Staged."""
    times: StageTimes = StageTimes()


async def until_staged(
    look: Callable[[], Awaitable[Sequence[Progress]]], weights: WeightId
) -> StageTimes:
    """Returns when every receiver has the whole of `weights`. Raises StagingError with the reason
    of the first that has failed, or was asked for something else since."""
    wait_s, longest_s = POLL_S
    while True:
        receivers = await look()
        for receiver in receivers:
            if receiver.label != str(weights):
                raise StagingError(f"superseded by {receiver.label}")
            if receiver.state == "failed":
                raise StagingError(receiver.error, is_lost=receiver.is_lost)
        if all(receiver.state == "done" for receiver in receivers):
            return slowest([receiver.times for receiver in receivers])
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_s)


def slowest(times: Sequence[StageTimes]) -> StageTimes:
    """Of several receivers that did the same side by side."""
    return StageTimes(
        max(t.rendezvous_s for t in times),
        max(t.transfer_s for t in times),
        max(t.verify_s for t in times),
    )
