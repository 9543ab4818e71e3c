"""Scores rollouts by the user's function, in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from pebble import ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from asyncrl.config.schema import Reward
from asyncrl.parent import end_with_parent
from asyncrl.tasks.rewards import call_reward, resolve
from asyncrl.types import Row

log = logging.getLogger(__name__)


class UserError(ValueError):
    """The run cannot go on, and the user can mend that: exit code 2, also in the middle of work."""


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one call. `reward` is None when nobody could score the rollout."""

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)


class RewardWorkers:
    """A pool of reward.workers processes; a call over reward.timeout_s has its process killed."""

    def __init__(self, config: Reward) -> None:
        self._config = config
        self._pool = self._make_pool()
        self._reported = False
        self._check: Future[None] | None = None

    def start(self) -> None:
        """Starts the workers. Raises ValueError when reward.path names no usable function, and
        CancelledError when they are closed meanwhile."""
        self._check = self._pool.schedule(_check_function, args=[self._config.path])
        try:
            self._check.result()
        except (BrokenProcessPool, ProcessExpired) as error:
            raise ValueError(
                f"reward.path {self._config.path}: importing it ends the process ({error})"
            ) from None

    async def score(self, row: Row, text: str, *, name: str) -> Score:
        """Scores one response; `name` identifies it in messages.

        An error or time-out gives a Score without reward, or raises UserError, as reward.on_error
        says. The limit counts from when a worker takes the call up, not from this call.
        """
        pool = self._pool
        try:
            call = pool.schedule(
                _call, args=[self._config.path, row, text], timeout=self._config.timeout_s
            )
            reward, parts = await asyncio.wrap_future(call)
        except (BrokenProcessPool, RuntimeError) as error:  # a worker died between two calls
            if pool is self._pool:
                self._pool = self._make_pool()
            return self._failed(name, f"its processes died: {error}")
        except TimeoutError:
            return self._failed(name, f"took longer than {self._config.timeout_s} s and was killed")
        except ProcessExpired as error:
            return self._failed(name, f"ended its process with code {error.exitcode}")
        except _RewardError as error:
            return self._failed(name, str(error))
        return Score(reward, parts)

    def close(self) -> None:
        """Kills the workers, busy or not."""
        self._pool.stop()
        if self._check is not None:
            self._check.cancel()
        for child in multiprocessing.active_children():
            if child.name == WORKERS_NAME:
                child.kill()
        self._pool.join()

    def _make_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._config.workers,
            initializer=_prepare_worker,
            initargs=(self._config.path,),
            context=multiprocessing.get_context("spawn"),
        )

    def _failed(self, name: str, reason: str) -> Score:
        message = f"reward function {self._config.path} for {name}: {reason}"
        if self._config.on_error == "stop":
            raise UserError(f"{message} (reward.on_error is stop; drop goes on without a score)")
        if not self._reported:
            self._reported = True
            log.error("%s. The rollout stays unscored; further errors are not logged.", message)
        return Score(None)


class _RewardError(Exception):
    """Carries a worker's traceback as text: the user's own exceptions may not survive pickling."""


_functions: dict[str, Callable[..., Any]] = {}


def _prepare_worker(path: str) -> None:
    """Resolves the function before the first call, whose time limit then covers the call only."""
    end_with_parent(signal.SIGKILL)
    with contextlib.suppress(ValueError):  # told by _check_function, which start() waits for
        _functions[path] = resolve(path)


def _check_function(path: str) -> None:
    resolve(path)


def _call(path: str, row: Row, text: str) -> tuple[float, dict[str, float]]:
    try:
        return call_reward(_functions[path], row, text)
    except Exception:
        raise _RewardError(traceback.format_exc()) from None
