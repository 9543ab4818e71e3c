"""Episodes: an environment turns one row into one rollout, with the policy's help.

An environment is `async def rollout(row, policy) -> Rollout`. Whoever wrote a token decides its
loss mask: True for the policy's own, False for the environment's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from asyncrl.types import Completion, Int32Array


@dataclass(frozen=True, slots=True)
class Policy:
    """What an environment sees of the policy during one rollout."""

    prompt_ids: Int32Array
    """[P] the row's prompt, rendered once for the whole group."""
    complete: Callable[[Int32Array], Awaitable[Completion]]
    """Samples a continuation of the given ids."""
