"""The generator's loop: lease -> generate -> score -> submit, with the engine kept full."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from asyncrl.client import Client
from asyncrl.clock import PhaseClock
from asyncrl.config.schema import Config
from asyncrl.messages import Failed, Heartbeat, LeaseRequest, Started, Submit
from asyncrl.types import WeightId
from asyncrl.wire import encode_group
from generators.engine import Engine, SwapTimes
from generators.eval_pins import EvalPins
from generators.groups import GroupError, GroupMaker
from generators.rewards import RewardWorkers
from generators.tokens import Tokens
from generators.weights_in import WeightsIn
from generators.work import Room, VoidLease, Work

log = logging.getLogger(__name__)


class Worker:
    """Runs on one event loop until the buffer says that the run is done.

    Waits for room in the engine, consumes leases, produces groups; beside that, WeightsIn waits
    for newer weights. Groups are tasks of their own: scoring one overlaps generating the next.

    Its clock is in exactly one phase: starting; generating; scoring (nothing runs in the engine,
    and groups in hand wait for their rewards); swapping (the engine stands still for new weights);
    waiting for the buffer (it has yet to take in what is finished, or is not there); waiting for
    leases.
    """

    def __init__(
        self,
        config: Config,
        client: Client,
        engine: Engine,
        tokens: Tokens,
        rewards: RewardWorkers,
        *,
        ended: asyncio.Future[None],
        clock: PhaseClock,
        on_swap: Callable[[], None],
    ) -> None:
        """`ended` is done when the run is, or fails with what ends this generator; `clock` has been
        in phase "starting" since the program began; `on_swap` is called when other weights begin to
        serve."""
        self._config = config
        self._client = client
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._on_swap = on_swap
        self._maker = GroupMaker(config, engine=engine, tokens=tokens, rewards=rewards)
        limit = config.generator.max_concurrent_rollouts
        capacity = config.generator.vllm.max_num_seqs if limit == "auto" else limit
        self._room = Room(capacity, on_change=self._enter_phase)
        self._pins = EvalPins()
        self._weights_in = WeightsIn(
            engine,
            client,
            pins=self._pins,
            weights=config.weights,
            buffer_timeout_s=config.network.buffer_timeout_s,
            on_pause=self._on_pause,
            on_swap=self._on_weights,
        )
        client.on_line = self._on_line
        self._tasks: set[asyncio.Task[None]] = set()
        self._swapped = asyncio.Event()
        self._held: dict[tuple[int, ...], Work] = {}
        self._num_in_hand = self._num_told = 0
        self._is_buffer_there = True
        self._has_started = False
        self._is_paused = False
        self._paused_s = 0.0

    async def run(self) -> None:
        """Returns when the run is done; raises what ended it otherwise.

        The engine has loaded its model. UserError is the user's to mend (a prompt, the reward
        function); EngineError, Unreachable and RefusedError are not.
        """
        self._spawn(self._begin())
        try:
            await self._ended
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> Heartbeat:
        """What the generator does now; called from the heartbeat's thread."""
        return Heartbeat(
            state=self._state(),
            state_s=self._clock.phase_s(),
            seconds=self._clock.total(),
            serving=list(self._engine.serving),
            held=[list(key) for key in list(self._held)],
            num_running=self._room.num_running,
            num_tokens=self._maker.num_tokens,
            paused_s=self._paused_s,
        )

    def give_up(self, void: Sequence[Sequence[int]]) -> None:
        """These leases ([epoch, position, attempt]) are no longer this generator's. Groups that are
        finished and on their way to the buffer are left alone: they may still win."""
        for key in map(tuple, void):
            if key in self._held:
                self._held[key].give_up()

    def _state(self) -> str:
        """The phase, and what the weights do beside it."""
        beside, phase = self._weights_in.doing, self._clock.phase
        return f"{phase}, {beside}" if beside and phase != "swapping" else phase

    def _on_weights(self, times: SwapTimes) -> None:
        self._paused_s += times.total_s
        self._swapped.set()
        self._on_swap()

    def _on_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._enter_phase()

    def _on_line(self, is_up: bool) -> None:
        self._is_buffer_there = is_up
        self._enter_phase()

    def _enter_phase(self) -> None:
        if not self._has_started:
            return
        if self._is_paused:
            phase = "swapping"
        elif self._room.num_running:
            phase = "generating"
        elif self._num_in_hand > self._num_told:
            phase = "scoring"
        elif self._num_told or not self._is_buffer_there:
            phase = "waiting for the buffer"
        else:
            phase = "waiting for leases"
        if phase != self._clock.phase:
            self._clock.enter(phase)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task whose failure ends the generator."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    async def _begin(self) -> None:
        """Takes the newest weights before the first lease: for older ones there may be none."""
        beat = await self._client.call(
            self.look(), deadline_s=self._config.network.buffer_timeout_s
        )
        await self._weights_in.catch_up(WeightId(beat.message.inc, beat.message.version))
        self._has_started = True
        self._enter_phase()
        self._spawn(self._weights_in.run())
        self._spawn(self._lease_loop())

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
        packet = await self._client.call(request, deadline_s=self._config.network.buffer_timeout_s)
        self.give_up(packet.message.void)
        for lease in packet.message.leases:
            self._spawn(self._serve(Work(lease, self._room, self._engine)))
        if packet.message.done and not self._ended.done():
            self._ended.set_result(None)

    async def _serve(self, work: Work) -> None:
        """One lease from its start to the buffer's verdict. Whatever the verdict is, the group is
        done with here: another generator may have been faster (superseded)."""
        lease = work.lease
        key = (*lease.group, lease.attempt)
        self._num_in_hand += 1
        if lease.kind == "train":
            self._held[key] = work
        message, frames = await self._finish(work)
        self._num_told += 1
        self._enter_phase()
        packet = await self._client.call(
            message, frames=frames, deadline_s=self._config.network.buffer_timeout_s
        )
        self._held.pop(key, None)
        self._num_in_hand -= 1
        self._num_told -= 1
        self._enter_phase()
        if packet.message.verdict == "invalid":
            log.warning("group %s was refused: %s", lease.group_id, packet.message.reason)

    async def _finish(self, work: Work) -> tuple[Submit | Failed, tuple[bytes, ...]]:
        """What is sent to the buffer when the group is finished, has failed or is given up."""
        lease = work.lease
        about: dict[str, Any] = {
            "kind": lease.kind,
            "group": lease.group,
            "attempt": lease.attempt,
        }

        async def tell_start(version: int) -> None:
            await self._client.send(Started(**about, version=version))

        pinned: AbstractAsyncContextManager[None] = nullcontext()
        if lease.kind == "eval":
            pinned = self._pins.hold(lease.timeout_s)
        try:
            async with pinned:
                group = await work.unless_void(self._maker.make(work, on_start=tell_start))
        except GroupError as error:
            log.warning("group %s failed: %s", lease.group_id, error)
            content, hopeless = error.content, error.hopeless
            return Failed(**about, reason=str(error), content=content, hopeless=hopeless), ()
        except VoidLease as error:
            log.info("group %s is given up: %s", lease.group_id, error)
            return Failed(**about, reason=str(error), content=False, lengths=error.lengths), ()
        return Submit(**about), (encode_group(group),)
