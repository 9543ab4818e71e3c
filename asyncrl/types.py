"""The nouns of the system, each with one meaning (docs/words.md).

Array conventions: T is the number of tokens of one response, P of one prompt, n of rollouts in a
group. All arrays are one-dimensional numpy arrays of the stated dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

Row = dict[str, Any]
"""One row of a data set: `prompt` (text or chat messages), `source`, `answer`, `extra`."""

MIN_REWARD_SPREAD = 1e-8
"""A group whose rewards differ by no more than this says nothing: the buffer filters it, and its
advantages are exactly 0."""

FinishReason = Literal["stop", "length", "abort"]


class GroupId(NamedTuple):
    """Names the group of one prompt: data epoch and position in that epoch's order.

    Evaluation groups live in a number space of their own: (version evaluated, row).
    """

    epoch: int
    position: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.position}"


class WeightId(NamedTuple):
    """Names weights: the life of the learner that made them, then the policy version.

    Ordered: a later life of the learner wins over any version of an earlier one.
    """

    inc: int
    version: int

    def __str__(self) -> str:
        return f"{self.inc}.{self.version}"

    @classmethod
    def parse(cls, label: str) -> WeightId:
        """The inverse of `str`; ValueError on anything else."""
        inc, separator, version = label.partition(".")
        if not (separator and inc.isdigit() and version.isdigit()):
            raise ValueError(f"{label!r} is not a weight label: expected INC.VERSION, as in '1.12'")
        return cls(int(inc), int(version))


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One response: what was sampled, with which probability, by which weights, and its worth."""

    token_ids: Int32Array
    """[T] ids as the engine sampled them (or as an environment wrote them)."""
    logprobs: Float32Array
    """[T] log-probability of each id under the distribution it was sampled from; 0 where the
    environment wrote the token."""
    versions: Int32Array
    """[T] policy version that sampled each token."""
    loss_mask: BoolArray
    """[T] True where the policy wrote the token."""
    finish_reason: FinishReason
    reward: float | None = None
    """None: nobody scored it. Such a rollout is left out of baseline and loss; it is not a 0."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named extras of the reward function, for metrics only."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """The rollouts of one prompt: the unit of lease, advantage and consumption."""

    id: GroupId
    attempt: int
    """0 for the first lease of this prompt, +1 for each re-lease."""
    source: str
    prompt_ids: Int32Array
    """[P] the prompt exactly as the engine was given it."""
    temperature: float
    inc: int
    """Life of the learner whose weights were served when the group was finished."""
    rollouts: tuple[Rollout, ...]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token. Raises ValueError for a group without any."""
        spans = [int(r.versions[r.loss_mask].min()) for r in self.rollouts if r.loss_mask.any()]
        if not spans:
            raise ValueError(f"group {self.id} has no token that the policy wrote")
        return min(spans)

    @property
    def rewards(self) -> list[float | None]:
        return [rollout.reward for rollout in self.rollouts]

    @property
    def num_response_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine samples one response. The seed travels separately."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What an engine returns for one request; all arrays are [T]."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: FinishReason
