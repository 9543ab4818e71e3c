"""Makes one leased group: its prompt rendered, its rollouts, and what becomes of lost ones."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.messages import Lease
from asyncrl.tasks.prompts import OverlongPrompt, PromptError
from asyncrl.types import Int32Array, Rollout, RolloutGroup
from generators.engine import Engine
from generators.rewards import RewardWorkers, UserError
from generators.rollouts import RolloutError, RolloutMaker
from generators.tokens import Tokens
from generators.work import Work

log = logging.getLogger(__name__)

ROLLOUT_SHARE = 0.95
"""A rollout that is not finished and scored after this share of its lease's time is lost: the rest
is for handing in the others."""
MIN_SURVIVORS = 2
"""A group needs so many rollouts, unless it has fewer by configuration: one alone has nothing to
be compared with."""


class GroupError(Exception):
    """A leased group cannot be finished. `content`: its prompt or answers are the cause;
    `hopeless`: no further attempt can help."""

    def __init__(self, reason: str, *, content: bool, hopeless: bool = False) -> None:
        super().__init__(reason)
        self.content = content
        self.hopeless = hopeless


class Losses:
    """The lost rollouts of one group."""

    def __init__(self, lease: Lease) -> None:
        self._num_rollouts = lease.num_rollouts
        # An evaluation is of all its samples: those that are lost may be the hard ones.
        self._needed = (
            lease.num_rollouts if lease.kind == "eval" else min(MIN_SURVIVORS, lease.num_rollouts)
        )
        self._errors: list[RolloutError] = []

    def add(self, error: RolloutError) -> None:
        """Raises GroupError as soon as too few rollouts are left."""
        self._errors.append(error)
        if self._num_rollouts - len(self._errors) < self._needed:
            content = any(error.content for error in self._errors)
            raise GroupError(str(self), content=content)

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __str__(self) -> str:
        reasons = Counter(map(str, self._errors)).most_common()
        listed = "; ".join(f"{count} {reason}" for reason, count in reasons)
        return f"{len(self._errors)} of {self._num_rollouts} rollouts failed: {listed}"


class GroupMaker:
    """Turns leases into groups; any number of them at once."""

    def __init__(
        self, config: Config, *, engine: Engine, tokens: Tokens, rewards: RewardWorkers
    ) -> None:
        self._config = config
        self._engine = engine
        self._tokens = tokens
        self._rollouts = RolloutMaker(config, engine=engine, tokens=tokens, rewards=rewards)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return self._rollouts.num_tokens

    async def make(self, work: Work, *, on_start: Callable[[int], Awaitable[None]]) -> RolloutGroup:
        """The scored group, of at least MIN_SURVIVORS of its rollouts in the order of samples.

        `on_start(version)` is awaited right before the first request. Raises GroupError when this
        group cannot be made; UserError and EngineError end the generator.
        """
        lease = work.lease
        prompt_ids = await self._render(lease)
        await on_start(self._version_at_start(lease))
        rollouts = await self._survivors(work, prompt_ids)
        self._rollouts.finished_group()
        return RolloutGroup(
            id=lease.group_id,
            attempt=lease.attempt,
            source=str(lease.row["source"]),
            prompt_ids=prompt_ids,
            temperature=lease.temperature,
            inc=self._engine.serving.inc,
            rollouts=rollouts,
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

    def _version_at_start(self, lease: Lease) -> int:
        """Swaps between lease and start only make it newer."""
        version = self._engine.serving.version
        if version < lease.min_version:
            raise RuntimeError(
                f"group {lease.group_id} was leased for version {lease.min_version} or newer, but "
                f"{self._engine.serving} serves"
            )
        return version

    async def _survivors(self, work: Work, prompt_ids: Int32Array) -> tuple[Rollout, ...]:
        """The rollouts that are finished in time."""
        time_s = ROLLOUT_SHARE * work.lease.timeout_s
        deadline = asyncio.get_running_loop().time() + time_s
        losses = Losses(work.lease)

        async def one(sample: int) -> Rollout | None:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._rollouts.make(work, prompt_ids, sample)
            except RolloutError as error:
                losses.add(error)
            except TimeoutError:
                losses.add(RolloutError(f"not finished in {time_s:g} s of the lease's time"))
            return None

        made = await _all_or_first_error([one(sample) for sample in range(work.lease.num_rollouts)])
        if losses:
            log.warning("group %s goes on without some: %s", work.lease.group_id, losses)
        return tuple(rollout for rollout in made if rollout is not None)


async def _all_or_first_error(
    rollouts: list[Coroutine[Any, Any, Rollout | None]],
) -> list[Rollout | None]:
    """All results, in order; at the first error the others are cancelled."""
    tasks = [asyncio.create_task(rollout) for rollout in rollouts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
