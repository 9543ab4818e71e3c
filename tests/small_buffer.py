"""A buffer of one screen for generator tests: real sockets, leases from a list, no policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.messages import (
    Beat,
    Failed,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Leases,
    Leave,
    Ok,
    Ready,
    Seat,
    Served,
    Settings,
    Staged,
    Started,
    Submit,
    Verdict,
    WatchWeights,
    Weights,
    Welcome,
)
from asyncrl.transport import Reply, Server
from asyncrl.types import RolloutGroup, WeightId
from asyncrl.wire import Packet, decode_group

WAIT_S = 0.5
"""The longest that a request without an answer yet is kept."""


class SmallBuffer:
    """Hands out `leases` in order, to a generator that serves their min_version."""

    def __init__(self, leases: list[Lease]) -> None:
        self.leases = leases
        self.published = (WeightId(0, 0), "")
        """The newest weights, and the directory that holds them."""
        self.offer: tuple[WeightId, bytes] | None = None
        """Weights of the collective transport, and their manifest."""
        self.seats: list[Seat] = []
        """Handed out in order to whoever is ready for the offer."""
        self.ready: list[Ready] = []
        self.staged: list[Staged] = []
        self.served: list[Served] = []
        self.done = False
        self.settings: Settings = {}
        """What it says that members must agree with."""
        self.verdict = Verdict(verdict="accepted")
        """Answer to whatever is submitted."""
        self.void: list[list[int]] = []
        """Leases that the next answer to a LeaseRequest says are void."""
        self.void_held: list[list[int]] = []
        """Leases that every Beat says are void, as long as they are held."""
        self.on_submit: Callable[[Submit], None] = lambda submit: None
        """Called before the verdict."""
        self.silent = False
        """True: takes every message and answers none, as a dead buffer would."""
        self.started: list[Started] = []
        self.groups: list[RolloutGroup] = []
        self.failed: list[Failed] = []
        self.beats: list[Heartbeat] = []
        self.left: list[Leave] = []
        self.hellos: list[Hello] = []
        self.requests: list[LeaseRequest] = []
        self.changed = asyncio.Condition()

    def publish(self, weights: WeightId) -> None:
        self.published = (weights, f"memory:{weights}")

    def is_ready_for(self, weights: WeightId) -> bool:
        """Whether these are what the generator asked for last."""
        return bool(self.ready) and WeightId(self.ready[-1].inc, self.ready[-1].version) == weights

    async def until(self, condition: Any, timeout_s: float = 10.0) -> None:
        """Waits for `condition()`; AssertionError after `timeout_s`."""
        ends = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < ends, "the condition did not come true"
            await asyncio.sleep(0.01)

    async def handle(self, peer: bytes, packet: Packet) -> Reply:
        message = packet.message
        if self.silent:
            return None
        match message:
            case Hello():
                self.hellos.append(message)
                return Welcome(
                    run_id="test", run_name="run", heartbeat_s=0.1, settings=self.settings
                )
            case LeaseRequest():
                self.requests.append(message)
                return await self._lease(message)
            case Started():
                self.started.append(message)
                return None
            case Submit():
                self.groups.append(decode_group(packet.frames[0]))
                self.on_submit(message)
                return self.verdict
            case Failed():
                self.failed.append(message)
                return Verdict(verdict="accepted")
            case Heartbeat():
                self.beats.append(message)
                weights = max(self.published[0], self.offer[0] if self.offer else (0, 0))
                void = [key for key in message.held if key in self.void_held]
                return Beat(inc=weights[0], version=weights[1], void=void, done=self.done)
            case Leave():
                self.left.append(message)
                return Ok()
            case WatchWeights():
                return await self._newer(WeightId(*message.have))
            case Ready():
                self.ready.append(message)
                return await self._seat(WeightId(message.inc, message.version), message.error)
            case Staged():
                self.staged.append(message)
                return Ok()
            case Served():
                self.served.append(message)
                return Ok()
        raise AssertionError(f"a generator sent {message!r}")

    async def _newer(self, have: WeightId) -> Reply:
        def newest() -> WeightId:
            return max(self.published[0], self.offer[0] if self.offer else self.published[0])

        await self._wait(lambda: newest() > have)
        if self.offer is not None and self.offer[0] > have:
            (inc, version), manifest = self.offer
            return Weights(inc=inc, version=version, transport="collective"), (manifest,)
        (inc, version), location = self.published
        transport: Any = "disk" if location else "none"
        return Weights(inc=inc, version=version, transport=transport, location=location)

    async def _seat(self, weights: WeightId, error: str) -> Seat:
        def is_over() -> bool:
            return bool(error) or self.offer is None or self.offer[0] != weights

        await self._wait(lambda: is_over() or bool(self.seats))
        if is_over():
            return Seat(is_over=True)
        return self.seats.pop(0) if self.seats else Seat()

    async def _lease(self, request: LeaseRequest) -> Leases:
        def ready() -> list[Lease]:
            fit = [x for x in self.leases if x.min_version <= request.weights.version]
            return fit[: request.slots]

        await self._wait(lambda: bool(ready() or self.void or self.done))
        granted = ready()
        void, self.void = self.void, []
        self.leases = [lease for lease in self.leases if lease not in granted]
        return Leases(leases=granted, void=void, done=self.done)

    async def _wait(self, condition: Any) -> None:
        for _ in range(int(WAIT_S / 0.01)):
            if condition():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serve(leases: list[Lease]) -> AsyncIterator[tuple[SmallBuffer, str]]:
    """(buffer, address) while the `async with` lasts."""
    buffer = SmallBuffer(leases)
    server = Server("tcp://127.0.0.1:0", buffer.handle)
    task = asyncio.create_task(server.serve())
    try:
        yield buffer, server.address
    finally:
        task.cancel()
        await server.close()
