"""The two sides of the loop: where its batches come from, and where its versions go.

    a live run                   a BufferLine (buffer_line.py), a Publisher (weights_out.py)
    a recorded run, once more    a JournalLine and a DigestCheck (replay.py)

Every rank has both and calls them alike, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncrl.messages import Heartbeat, Registered
from asyncrl.types import WeightId
from asyncrl.wire import Packet
from learner.policy import Policy


class Line(Protocol):
    """Has the batches, and hears what became of them."""

    is_recorded: bool
    """Its batches are those of another run: perhaps not sampled by this learner's versions."""

    def give_signs_of_life(self, look: Callable[[], Heartbeat]) -> None:
        """From now on the signs of life are what `look` returns."""

    def register(self, *, checkpoint_version: int, config_digest: str) -> Registered:
        """Takes over at `checkpoint_version`. ValueError when there is no going on from there."""

    def fetch(self, step: int) -> None:
        """Asks for the batch of `step`, in the background."""

    def next_reply(self, *, give_up: str = "") -> Packet:
        """The next answer to `fetch`: any number of Waiting, then one Batch or End. With a reason
        to `give_up` on the lead it is an End that says so."""

    def commit(self, version: int, metrics: dict[str, float]) -> bool:
        """Says that the weights are now `version`; whether a checkpoint of it is asked for."""

    def checkpointed(self, versions: list[int]) -> None:
        """Says which checkpoints there are."""

    def close(self, reason: str) -> None:
        """Says that this learner's work is done, and hangs up. Safe to call twice."""


class Outlet(Protocol):
    """Takes the versions that come out of the training."""

    def snapshot(self, policy: Policy, weights: WeightId) -> None:
        """Takes the policy's weights as they are now. A collective of all ranks."""

    def trouble(self) -> str:
        """What keeps it from its work, and since when; empty when nothing does."""

    def why_give_up(self) -> str:
        """Why training on makes no sense; empty when it does."""

    def metrics(self) -> dict[str, float]:
        """For the record of the step after which it is asked."""

    def close(self, *, drain_s: float) -> bool:
        """Ends its work, within `drain_s`; whether the newest version went out."""
