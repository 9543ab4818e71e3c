"""One rollout of a leased group: generated, checked, scored."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.types import Completion, Int32Array, Rollout, Sampling
from asyncrl.versions import sample_seed
from generators.engine import Engine, EngineError, RequestError
from generators.environments import Policy
from generators.environments.single_turn import rollout as single_turn
from generators.rewards import RewardWorkers
from generators.tokens import Tokens
from generators.work import Work

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""How often a request that fails is tried before its rollout is lost."""
MAX_FAILED_IN_A_ROW = 32
"""Rollouts that failed every try, with no finished group between them, that end the generator."""
MAX_REJECTED_SHARE = 0.05
MIN_REJECTED = 16
"""Rollouts rejected for non-finite logprobs end the generator when they are this many, and this
share of all: the weights or the engine are broken."""


class RolloutError(Exception):
    """One rollout is lost. `content`: the prompt or the answer is the cause. The message does not
    name the rollout, so that equal ones can be counted."""

    def __init__(self, reason: str, *, content: bool = False) -> None:
        super().__init__(reason)
        self.content = content


class RolloutMaker:
    """Makes the rollouts of all groups in hand, and sees when the engine is broken."""

    def __init__(
        self, config: Config, *, engine: Engine, tokens: Tokens, rewards: RewardWorkers
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokens = tokens
        self._rewards = rewards
        self._request_ids = itertools.count(1)
        self._num_rollouts = 0
        self._num_rejected = 0
        self._num_failed_in_a_row = 0
        self.num_tokens = 0
        """Tokens sampled so far."""

    def finished_group(self) -> None:
        """The engine works: a row of failures ends here."""
        self._num_failed_in_a_row = 0

    async def make(self, work: Work, prompt_ids: Int32Array, sample: int) -> Rollout:
        """Rollout number `sample` of the group, checked and scored.

        Raises RolloutError when it is lost; UserError and EngineError end the generator.
        """
        row, name = work.lease.row, f"group {work.lease.group_id} sample {sample}"
        try:
            rollout = await self._generate(work, prompt_ids, sample, name)
        finally:
            work.left()
        self._check_logprobs(rollout)
        text = await self._tokens.decode(rollout.token_ids[rollout.loss_mask])
        score = await self._rewards.score(row, text, name=name)
        return replace(rollout, reward=score.reward, reward_parts=score.parts)

    async def _generate(
        self, work: Work, prompt_ids: Int32Array, sample: int, name: str
    ) -> Rollout:
        lease = work.lease
        seed = sample_seed(self._config.seed, lease.kind, *lease.group_id, sample, lease.seed_k)
        sampling = Sampling(
            temperature=lease.temperature,
            max_tokens=self._config.data.max_response_length,
            stop_token_ids=self._tokens.end_ids,
            stop=tuple(self._config.sampling.stop),
        )

        async def complete(token_ids: Int32Array) -> Completion:
            request_id = str(next(self._request_ids))
            work.asks(sample, request_id)
            completion = await self._engine.generate(
                token_ids, sampling, seed=seed, request_id=request_id
            )
            work.got(sample, len(completion.token_ids))
            self.num_tokens += len(completion.token_ids)
            return completion

        for attempt in range(1, MAX_TRIES + 1):
            try:
                return await single_turn(lease.row, Policy(prompt_ids, complete))
            except RequestError as error:
                reason = str(error)
                log.warning("%s, try %d of %d: %s", name, attempt, MAX_TRIES, reason)
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise EngineError(f"{self._num_failed_in_a_row} rollouts failed in a row: {reason}")
        raise RolloutError(f"failed {MAX_TRIES} times ({reason})")

    def _check_logprobs(self, rollout: Rollout) -> None:
        """A sampled token without a finite logprob cannot be trained."""
        self._num_rollouts += 1
        if np.isfinite(rollout.logprobs[rollout.loss_mask]).all():
            return
        self._num_rejected += 1
        if self._num_rejected >= max(MIN_REJECTED, MAX_REJECTED_SHARE * self._num_rollouts):
            raise EngineError(
                f"{self._num_rejected} of {self._num_rollouts} rollouts have non-finite logprobs "
                f"(weights {self._engine.serving})"
            )
        raise RolloutError("non-finite logprob", content=True)
