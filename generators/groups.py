"""Makes one leased group: prompt -> rollouts -> checks -> scores."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.messages import Lease
from asyncrl.tasks.prompts import OverlongPrompt, PromptError
from asyncrl.types import Completion, Int32Array, Rollout, RolloutGroup, Sampling
from asyncrl.versions import sample_seed
from generators.engine import Engine, EngineError, RequestError
from generators.environments import Policy
from generators.environments.single_turn import rollout as single_turn
from generators.rewards import RewardWorkers, UserError
from generators.tokens import Tokens

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""How often a request that fails is tried before its group fails."""
MAX_FAILED_IN_A_ROW = 32
"""Rollouts that failed every try, with no finished group between them, that end the generator."""
MAX_REJECTED_SHARE = 0.05
MIN_REJECTED = 16
"""Rollouts rejected for non-finite logprobs end the generator when they are this many, and this
share of all: the weights or the engine are broken."""


class GroupError(Exception):
    """A leased group cannot be finished. `content`: its prompt or answers are the cause;
    `hopeless`: no further attempt can help."""

    def __init__(self, reason: str, *, content: bool, hopeless: bool = False) -> None:
        super().__init__(reason)
        self.content = content
        self.hopeless = hopeless


class Room:
    """Places in the engine, counted in rollouts."""

    def __init__(self, capacity: int, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change of `num_running`."""
        self._capacity = capacity
        self._changed = asyncio.Event()
        self._on_change = on_change
        self.num_running = 0

    def take(self, count: int) -> Places:
        self.num_running += count
        self._on_change()
        return Places(self, count)

    def groups(self, group_size: int) -> int:
        """Groups that fit; one even if it does not fit when nothing runs."""
        free = (self._capacity - self.num_running) // group_size
        return max(free, 0 if self.num_running else 1)

    async def wait(self, group_size: int) -> int:
        """`groups`, as soon as it is not 0."""
        while not (fits := self.groups(group_size)):
            self._changed.clear()
            await self._changed.wait()
        return fits

    def give_back(self, count: int) -> None:
        self.num_running -= count
        self._changed.set()
        self._on_change()


@dataclass(slots=True)
class Places:
    """The places of one group: each is given back when its rollout leaves the engine."""

    room: Room
    left: int

    def give_back(self, count: int) -> None:
        self.left -= count
        self.room.give_back(count)

    def give_back_all(self) -> None:
        self.give_back(self.left)


class GroupMaker:
    """Turns leases into groups; any number of them at once."""

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

    async def make(
        self, lease: Lease, places: Places, *, on_start: Callable[[int], Awaitable[None]]
    ) -> RolloutGroup:
        """The scored group of `lease`. `on_start(version)` is awaited before its first request.

        Raises GroupError when this group cannot be made; UserError and EngineError end the
        generator.
        """
        try:
            prompt_ids = await self._render(lease)
            await on_start(self._engine.serving.version)
            samples = range(lease.num_rollouts)
            rollouts = await _all_or_first_error(
                [self._sample(lease, prompt_ids, sample, places) for sample in samples]
            )
        finally:
            places.give_back_all()
        self._num_failed_in_a_row = 0
        return RolloutGroup(
            id=lease.group_id,
            attempt=lease.attempt,
            source=str(lease.row["source"]),
            prompt_ids=prompt_ids,
            temperature=lease.temperature,
            inc=self._engine.serving.inc,
            rollouts=tuple(rollouts),
        )

    async def _render(self, lease: Lease) -> Int32Array:
        try:
            return await self._tokens.render(lease.row)
        except OverlongPrompt as error:
            if self._config.data.overlong_prompts == "drop":
                raise GroupError(str(error), content=True, hopeless=True) from None
            raise UserError(
                f"the prompt of group {lease.group_id} is too long: {error}. Raise the limit, or "
                "set data.overlong_prompts to drop"
            ) from None
        except PromptError as error:
            raise GroupError(str(error), content=True) from None

    async def _sample(
        self, lease: Lease, prompt_ids: Int32Array, sample: int, places: Places
    ) -> Rollout:
        """One rollout of the group, checked and scored."""
        name = f"group {lease.group_id} sample {sample}"
        rollout = await self._generate(lease, prompt_ids, sample, name)
        places.give_back(1)
        self.num_tokens += len(rollout.token_ids)
        self._check_logprobs(rollout, name)
        text = await self._tokens.decode(rollout.token_ids[rollout.loss_mask])
        score = await self._rewards.score(lease.row, text, name=name)
        return replace(rollout, reward=score.reward, reward_parts=score.parts)

    async def _generate(
        self, lease: Lease, prompt_ids: Int32Array, sample: int, name: str
    ) -> Rollout:
        seed = sample_seed(self._config.seed, lease.kind, *lease.group_id, sample, lease.seed_k)
        sampling = Sampling(
            temperature=lease.temperature,
            max_tokens=self._config.data.max_response_length,
            stop_token_ids=self._tokens.end_ids,
            stop=tuple(self._config.sampling.stop),
        )

        async def complete(token_ids: Int32Array) -> Completion:
            return await self._engine.generate(
                token_ids, sampling, seed=seed, request_id=str(next(self._request_ids))
            )

        for attempt in range(1, MAX_TRIES + 1):
            try:
                return await single_turn(lease.row, Policy(prompt_ids, complete))
            except RequestError as error:
                reason = str(error)
                log.warning("%s, try %d of %d: %s", name, attempt, MAX_TRIES, reason)
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise EngineError(f"{self._num_failed_in_a_row} rollouts failed in a row: {reason}")
        raise GroupError(f"{name} failed {MAX_TRIES} times: {reason}", content=False)

    def _check_logprobs(self, rollout: Rollout, name: str) -> None:
        """A sampled token without a finite logprob cannot be trained: its group is given up."""
        self._num_rollouts += 1
        if np.isfinite(rollout.logprobs[rollout.loss_mask]).all():
            return
        self._num_rejected += 1
        if self._num_rejected >= max(MIN_REJECTED, MAX_REJECTED_SHARE * self._num_rollouts):
            raise EngineError(
                f"{self._num_rejected} of {self._num_rollouts} rollouts have non-finite logprobs "
                f"(weights {self._engine.serving})"
            )
        raise GroupError(f"{name} has a non-finite logprob", content=True)


async def _all_or_first_error(rollouts: list[Coroutine[Any, Any, Rollout]]) -> list[Rollout]:
    """All results, in order; at the first error the others are cancelled."""
    tasks = [asyncio.create_task(rollout) for rollout in rollouts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
