"""What a generator needs of an inference engine. Two implementations: vllm and scripted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from asyncrl.types import Completion, Int32Array, Sampling, WeightId

GENERATOR_PID = "ASYNCRL_GENERATOR_PID"
"""Environment variable that names the process with which the engine's processes end."""


class RequestError(Exception):
    """One request failed and the engine goes on: the request may be tried again."""


class StagingError(Exception):
    """New weights could not be staged; nothing was written, the served ones serve on."""


class EngineError(RuntimeError):
    """The engine is dead, or holds half of a version: the process must end."""


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds that the parts of one swap took.

    The pause waits for the step under way; from then to the resumption nothing is decoded.
    """

    pause_s: float
    load_s: float
    resume_s: float

    @property
    def total_s(self) -> float:
        return self.pause_s + self.load_s + self.resume_s


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

    async def stage(self, weights: WeightId, location: str) -> None:
        """Takes `weights` from `location` into memory, verified, while requests go on.

        Raises StagingError with the reason. A later call supersedes an earlier one.
        """

    async def swap(self, weights: WeightId) -> SwapTimes:
        """Serves the staged `weights` from the next step of the engine on.

        Requests in flight go on with their cache and carry both versions; no later request sees
        anything that older weights computed. Raises EngineError when loading fails half-way, and
        ValueError when other weights, or none, are staged.
        """

    async def close(self) -> None:
        """Ends the engine and every process it started. Safe to call twice."""
