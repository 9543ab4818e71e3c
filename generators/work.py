"""Leases in hand: their places in the engine, what they have sampled, whether they are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncrl.messages import Lease
from generators.engine import Engine

T = TypeVar("T")


class Room:
    """Places in the engine, counted in rollouts."""

    def __init__(self, capacity: int, *, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change of `num_running`."""
        self._capacity = capacity
        self._changed = asyncio.Event()
        self._on_change = on_change
        self.num_running = 0

    def take(self, count: int) -> None:
        self.num_running += count
        self._on_change()

    def give_back(self, count: int) -> None:
        self.num_running -= count
        self._changed.set()
        self._on_change()

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


class VoidLease(Exception):
    """Nobody wants the group any more. `lengths`: tokens sampled so far of each rollout."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__("its lease is void")
        self.lengths = lengths


class Work:
    """One lease in hand, from its arrival until its group is made or given up.

    It takes a place in the engine for each rollout; each is given back when its rollout leaves
    the engine, whether finished, failed or cancelled.
    """

    def __init__(self, lease: Lease, room: Room, engine: Engine) -> None:
        self.lease = lease
        self._room = room
        self._engine = engine
        self._num_places = lease.num_rollouts
        self._num_tokens = [0] * lease.num_rollouts
        self._request_ids = [""] * lease.num_rollouts
        self._lengths_when_void: list[int] | None = None
        self._making: asyncio.Task[Any] | None = None
        room.take(self._num_places)

    def asks(self, sample: int, request_id: str) -> None:
        """Rollout `sample` has a request in the engine now."""
        self._request_ids[sample] = request_id

    def got(self, sample: int, num_tokens: int) -> None:
        """The request of rollout `sample` is finished."""
        self._num_tokens[sample] += num_tokens

    def lengths(self) -> list[int]:
        """Tokens sampled so far of each rollout."""
        in_flight = map(self._engine.num_sampled, self._request_ids)
        return [done + more for done, more in zip(self._num_tokens, in_flight, strict=True)]

    def left(self) -> None:
        """One rollout has left the engine: its place is free."""
        self._give_back(1)

    async def unless_void(self, making: Coroutine[Any, Any, T]) -> T:
        """What `making` returns. After `give_up` it is cancelled, and VoidLease raised."""
        this = asyncio.current_task()
        assert this is not None
        self._making = asyncio.create_task(making)
        try:
            return await self._making
        except asyncio.CancelledError:
            if self._lengths_when_void is None or this.cancelling():
                raise  # this task is cancelled, too
            raise VoidLease(self._lengths_when_void) from None
        finally:
            self._give_back(self._num_places)

    def give_up(self) -> None:
        """The lease is void. A group that is made already, and on its way, is left alone."""
        if self._making is None or self._making.done() or self._lengths_when_void is not None:
            return
        self._lengths_when_void = self.lengths()
        self._making.cancel()

    def _give_back(self, count: int) -> None:
        self._num_places -= count
        self._room.give_back(count)
