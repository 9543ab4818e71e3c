"""One prompt, one response."""

from __future__ import annotations

import numpy as np

from asyncrl.types import Rollout, Row
from generators.environments import Policy


async def rollout(row: Row, policy: Policy) -> Rollout:
    """The response to the row's prompt; every token is the policy's."""
    completion = await policy.complete(policy.prompt_ids)
    return Rollout(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        versions=completion.versions,
        loss_mask=np.ones(len(completion.token_ids), np.bool_),
        finish_reason=completion.finish_reason,
    )
