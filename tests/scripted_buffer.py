"""A buffer for tests of the learner: a real socket, and batches that are always ready."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from learner_cases import make_groups

from asyncrl.messages import (
    Batch,
    Beat,
    Checkpointed,
    Commit,
    Committed,
    End,
    Fetch,
    Heartbeat,
    Hello,
    Leave,
    Ok,
    Published,
    Record,
    Refused,
    Register,
    Registered,
    Settings,
    Waiting,
    Welcome,
)
from asyncrl.transport import Reply, Server
from asyncrl.wire import Packet, encode_group


class ScriptedBuffer:
    """Hands out `num_steps` batches; `heard` is what the learners of the run said."""

    def __init__(self, *, num_steps: int, committed: int = 0, first_batch: int = 0) -> None:
        """Step s gets the groups of batch `first_batch` + s."""
        self.num_steps = num_steps
        self.committed = committed
        self.first_batch = first_batch
        self.inc = 1 if committed else 0
        self.waiting: dict[int, int] = {}
        """How often Fetch of a step is answered by Waiting first."""
        self.waiting_for: dict[int, str] = {}
        """A step whose batch is not ready before the learner has said this."""
        self.num_fetched: Counter[int] = Counter()
        """How often the batch of a step was handed out."""
        self.on_waiting: Callable[[int], None] = lambda step: None
        """Called with the step before an answer of Waiting."""
        self.on_commit: Callable[[], None] = lambda: None
        self.settings: Settings = {}
        """What it says that members must agree with."""
        self.failed = False
        self.stop_at: int | None = None
        """The commit of this version is answered by: the run is being stopped."""
        self.is_stopping = False
        self.asks_at: set[int] = set()
        """The commits of these versions ask for a checkpoint, and each Waiting at them for what
        the next step is waiting for."""
        self.fence_at: int | None = None
        self.refuse_register = ""
        self.heard: list[str] = []
        self.digests: dict[int, str] = {}
        """Of the versions that were published."""
        self.beats: list[Heartbeat] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> ScriptedBuffer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def said(self, what: str) -> list[str]:
        """All that was heard and begins like this."""
        return [said for said in self.heard if said.startswith(what)]

    def until(self, said: str, *, timeout_s: float = 60) -> None:
        """Waits until a learner has said this; AssertionError after `timeout_s`."""
        with self._changed:
            came = self._changed.wait_for(lambda: said in self.heard, timeout=timeout_s)
        assert came, f"no {said!r} in {self.heard}"

    def until_beat(self, state: str) -> None:
        """Waits until a new sign of life says this; AssertionError after 60 s."""
        with self._changed:
            since = len(self.beats)
            came = self._changed.wait_for(
                lambda: state in {beat.state for beat in self.beats[since:]}, timeout=60
            )
        assert came, f"no {state!r} in {self.beats[since:]}"

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = Server("tcp://127.0.0.1:0", self._answer)
        self.address = server.address
        serving = asyncio.create_task(server.serve())
        self._ready.set()
        await self._stop.wait()
        serving.cancel()
        await server.close()

    def _hear(self, said: str) -> None:
        with self._changed:
            self.heard.append(said)
            self._changed.notify_all()

    async def _answer(self, peer: bytes, packet: Packet) -> Reply:
        message: Any = packet.message
        match message:
            case Hello():
                return Welcome(
                    run_id="run", run_name="run", heartbeat_s=0.05, settings=self.settings
                )
            case Register() if self.refuse_register:
                return Refused(code="invalid", reason=self.refuse_register)
            case Register():
                self.inc += 1
                self._hear(f"register {message.checkpoint_version}")
                return Registered(inc=self.inc, committed=self.committed)
            case Fetch():
                return await self._fetch(message.step)
            case Commit() if message.version == self.fence_at:
                return Refused(code="fenced", reason="learner 3 has registered")
            case Commit():
                self.committed = max(self.committed, message.version)
                self.is_stopping = self.is_stopping or message.version == self.stop_at
                self._hear(f"commit {message.version}")
                asks = message.version in self.asks_at
                committed = Committed(stop=self.is_stopping, checkpoint=asks)
                self.on_commit()
                return committed
            case Heartbeat():
                with self._changed:
                    self.beats.append(message)
                    self._changed.notify_all()
                return Beat(inc=0, version=0, done=False)
            case Leave():
                self._hear(f"leave: {message.reason}")
            case Published():
                self.digests[message.version] = message.digest
                self._hear(f"published {message.inc}.{message.version}")
            case Checkpointed():
                self._hear(f"checkpointed {message.versions}")
        return Ok()

    async def _fetch(self, step: int) -> Reply:
        if self.is_stopping:
            return End(reason="stopped by SIGINT", stopped=True, records=[])
        if step >= self.num_steps:
            return End(reason="all steps are trained", failed=self.failed, records=[])
        self.waiting[step] = self.waiting.get(step, 0) - 1
        if self.waiting[step] >= 0 or not self._may_have(step):
            self.on_waiting(step)
            await asyncio.sleep(0.02)
            asks = self.committed == step and step in self.asks_at and not self._may_have(step)
            return Waiting(step=step, reason="1 group is missing", checkpoint=asks, records=[])
        record = Record(name="eval", step=step, values={"accuracy": 0.5})
        batch = Batch(
            step=step,
            max_staleness=step,  # the groups are all of version 0
            replayed=step < self.committed,
            records=[record],
        )
        self.num_fetched[step] += 1
        groups = make_groups(2, start=10 * (self.first_batch + step))
        return batch, tuple(encode_group(group) for group in groups)

    def _may_have(self, step: int) -> bool:
        return self.waiting_for.get(step, "") in ["", *self.heard]
