"""The generator's loop: lease -> generate -> score -> submit, with the engine kept full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.messages import Failed, Heartbeat, Lease, LeaseRequest, Started, Submit
from asyncrl.transport import Client, RefusedError
from asyncrl.types import RolloutGroup
from asyncrl.wire import encode_group
from generators.engine import Engine, SwapTimes
from generators.groups import GroupError, GroupMaker, Places, Room
from generators.rewards import RewardWorkers
from generators.tokens import Tokens
from generators.weights_in import UNREACHABLE_S, EvalPins, WeightsIn

log = logging.getLogger(__name__)


class Worker:
    """Runs on one event loop until the buffer says that the run is done.

    Waits for room in the engine, consumes leases, produces groups; beside that, WeightsIn waits
    for newer weights. Groups are tasks of their own: scoring one overlaps generating the next.
    """

    def __init__(
        self, config: Config, *, engine: Engine, tokens: Tokens, rewards: RewardWorkers
    ) -> None:
        self._config = config
        self._engine = engine
        self._maker = GroupMaker(config, engine=engine, tokens=tokens, rewards=rewards)
        limit = config.generator.max_concurrent_rollouts
        self._room = Room(config.generator.vllm.max_num_seqs if limit == "auto" else limit)
        self._pins = EvalPins()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._swapped = asyncio.Event()
        self._weights_in: WeightsIn | None = None
        self._held: dict[tuple[int, int, int], Lease] = {}
        self._paused_s = 0.0

    async def run(self, client: Client, *, on_swap: Callable[[], None]) -> None:
        """Returns when the run is done; raises what ended it otherwise.

        `on_swap` is called when other weights begin to serve. UserError is the user's to mend (a
        prompt, the reward function); EngineError, Unreachable and RefusedError are not.
        """

        def swapped(times: SwapTimes) -> None:
            self._paused_s += times.total_s
            self._swapped.set()
            on_swap()

        self._client = client
        self._weights_in = WeightsIn(
            self._engine,
            client,
            pins=self._pins,
            timeout_s=self._config.weights.timeout_s,
            on_swap=swapped,
        )
        self._spawn(self._weights_in.run())
        self._spawn(self._lease_loop())
        try:
            await self._ended
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def finish(self) -> None:
        """The run is done: `run` returns."""
        if not self._ended.done():
            self._ended.set_result(None)

    def look(self) -> Heartbeat:
        """What the generator does now; called from the heartbeat's thread."""
        return Heartbeat(
            state=self._state(),
            serving=list(self._engine.serving),
            held=[list(key) for key in list(self._held)],
            num_running=self._room.num_running,
            num_tokens=self._maker.num_tokens,
            paused_s=self._paused_s,
        )

    def _state(self) -> str:
        if self._weights_in is None:
            return "starting"
        if self._weights_in.state != "idle":
            return self._weights_in.state
        return "generating" if self._room.num_running else "waiting for leases"

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task whose failure ends the generator."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None or self._ended.done():
            return
        if isinstance(error, RefusedError) and error.code == "stopping":
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _lease_loop(self) -> None:
        """Asks for as many groups as there is room for; anew after a swap, since a request that
        waits at the buffer names the weights that were served when it was sent."""
        while True:
            slots = await self._room.wait(self._config.group_size)
            self._swapped.clear()
            asked = self._spawn(self._ask(slots))
            swapped = asyncio.create_task(self._swapped.wait())
            try:
                await asyncio.wait({asked, swapped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                swapped.cancel()

    async def _ask(self, slots: int) -> None:
        request = LeaseRequest(slots=slots, serving=list(self._engine.serving))
        packet = await self._client.call(request, deadline_s=UNREACHABLE_S)
        for lease in packet.message.leases:
            self._spawn(self._serve(lease, self._room.take(lease.num_rollouts)))
        if packet.message.done:
            self.finish()

    async def _serve(self, lease: Lease, places: Places) -> None:
        """One lease from its start to the buffer's verdict."""
        key = (*lease.group_id, lease.attempt)
        if lease.kind == "train":
            self._held[key] = lease
        message, frames = await self._finish(lease, places)
        packet = await self._client.call(message, frames=frames, deadline_s=UNREACHABLE_S)
        self._held.pop(key, None)
        if packet.message.verdict == "invalid":
            log.warning("group %s was refused: %s", lease.group_id, packet.message.reason)

    async def _finish(
        self, lease: Lease, places: Places
    ) -> tuple[Submit | Failed, tuple[bytes, ...]]:
        """What is sent to the buffer when the group is finished, or has failed."""
        try:
            group = await self._make_in_time(lease, places)
        except GroupError as error:
            log.warning("group %s failed: %s", lease.group_id, error)
            failed = Failed(
                kind=lease.kind,
                group=lease.group,
                attempt=lease.attempt,
                reason=str(error),
                content=error.content,
            )
            return failed, ()
        submit = Submit(kind=lease.kind, group=lease.group, attempt=lease.attempt)
        return submit, (encode_group(group),)

    async def _make_in_time(self, lease: Lease, places: Places) -> RolloutGroup:
        async def tell_start(version: int) -> None:
            started = Started(
                kind=lease.kind, group=lease.group, attempt=lease.attempt, version=version
            )
            await self._client.send(started)

        try:
            async with asyncio.timeout(lease.timeout_s):
                if lease.kind == "train":
                    return await self._maker.make(lease, places, on_start=tell_start)
                with self._pins.hold(lease.timeout_s):
                    return await self._maker.make(lease, places, on_start=tell_start)
        except TimeoutError:
            places.give_back_all()
            raise GroupError(
                f"not finished in {lease.timeout_s:g} s, the time of its lease: the generator may "
                "be too slow for it",
                content=False,
            ) from None
