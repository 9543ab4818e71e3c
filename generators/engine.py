"""What a generator needs of an inference engine. Two implementations: vllm and scripted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from asyncrl.messages import Seat
from asyncrl.types import Completion, Int32Array, Sampling, WeightId

GENERATOR_PID = "ASYNCRL_GENERATOR_PID"
"""Environment variable that names the process with which the engine's processes end."""


class RequestError(Exception):
    """One request failed and the engine goes on: the request may be tried again."""


class StagingError(Exception):
    """New weights could not be taken in; nothing was written, the served ones serve on."""

    def __init__(self, reason: str, *, is_lost: bool = False) -> None:
        """`is_lost`: the group failed under this receiver (messages.Staged)."""
        super().__init__(reason)
        self.is_lost = is_lost


class EngineError(RuntimeError):
    """The engine is dead, or holds half of a version: the process must end."""


class Source(BaseModel):
    """Where weights are taken from: a directory, or a seat in the group of a broadcast."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: WeightId
    location: str = ""
    """Transport `disk`: the directory."""
    seat: Seat | None = None
    """Transport `collective`: that of the engine's first receiver."""
    manifest: str = ""
    """Transport `collective`: asyncrl.manifest.Manifest as JSON."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that the parts of taking one version in took; of several receivers the slowest."""

    rendezvous_s: float = 0.0
    """Until all members of the group were there."""
    transfer_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds that the parts of one swap took.

    The pause waits for the step under way; from then to the resumption nothing is decoded.
    """

    pause_s: float = 0.0
    load_s: float = 0.0
    reset_s: float = 0.0
    """Until the KV cache of requests in flight was dropped (weights.kv_in_flight=recompute)."""
    resume_s: float = 0.0
    stage: StageTimes = StageTimes()
    """What was taken in during the pause (weights.staging=none)."""

    @property
    def total_s(self) -> float:
        staged_s = self.stage.rendezvous_s + self.stage.transfer_s + self.stage.verify_s
        return self.pause_s + staged_s + self.load_s + self.reset_s + self.resume_s


class Engine(Protocol):
    """One inference engine, used from one event loop."""

    @property
    def serving(self) -> WeightId:
        """The weights that sample now."""

    async def start(self) -> None:
        """Loads the model. Raises ValueError for what the user can mend."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: Sampling, *, seed: int, request_id: str
    ) -> Completion:
        """Samples one response; `request_id` is unique in the life of the engine.

        Cancelling it frees what the request holds. Raises RequestError or EngineError.
        """

    def num_sampled(self, request_id: str) -> int:
        """Tokens sampled so far of a request in flight; 0 for any other."""

    async def check(self, manifest: str) -> list[str]:
        """The devices of its receivers, in the order of their ranks ("cpu", or a GPU's UUID).

        Raises StagingError that names the first tensor in which the version of this manifest
        (JSON) differs from the model.
        """

    async def stage(self, source: Source) -> StageTimes:
        """Takes a version into memory, whole and verified, while requests go on. With
        weights.staging=none it only remembers where the swap is to take it from.

        Raises StagingError with the reason. A later call supersedes an earlier one.
        """

    async def swap(self, weights: WeightId) -> SwapTimes:
        """Serves the staged `weights` from the next step of the engine on.

        Requests in flight go on and carry both versions, with their KV cache or with one computed
        anew (weights.kv_in_flight); no later request sees anything that older weights computed.
        Raises EngineError when loading fails half-way, StagingError when weights to be taken in
        during the pause did not come and nothing was written, and ValueError when other weights,
        or none, are staged.
        """

    async def close(self) -> None:
        """Ends the engine and every process it started. Safe to call twice."""
