"""A real buffer on the event loop of a test, and the peers that talk to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripted_peers import Generator, Learner, Peer, rows

from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.messages import End, Settings
from buffer.loop_clock import LoopClock
from buffer.run import Run
from buffer.server import BufferServer

DEADLINE_S = 30.0


@dataclass
class Serving:
    """A buffer that serves on this event loop."""

    run: Run
    server: BufferServer
    task: asyncio.Task[int]
    peers: list[Peer]

    def generator(self, name: str = "generator-0", **options: Any) -> Generator:
        return self._joined(Generator(self.server.address, name, **options))

    def learner(self, name: str = "learner-0") -> Learner:
        return self._joined(Learner(self.server.address, name))

    def monitor(self) -> Peer:
        return self._joined(Peer(self.server.address, "monitor", "monitor-0"))

    def _joined(self, peer: Any) -> Any:
        self.peers.append(peer)
        return peer


@asynccontextmanager
async def serving(
    run_dir: Path,
    config: Config,
    *,
    train: int = 12,
    val: int = 0,
    max_wait_s: float = 0.3,
    segment_bytes: int = 1 << 20,
    settings: Settings | None = None,
) -> AsyncIterator[Serving]:
    journal = Journal(run_dir, segment_bytes=segment_bytes)
    try:
        run = Run(config, train=rows(train), val=rows(val), journal=journal, now=time.monotonic())
        async with serving_run(run, max_wait_s=max_wait_s, settings=settings) as here:
            yield here
    finally:
        journal.close()


@asynccontextmanager
async def serving_run(
    run: Run,
    *,
    max_wait_s: float,
    settings: Settings | None = None,
    clock: LoopClock | None = None,
) -> AsyncIterator[Serving]:
    server = BufferServer(
        run,
        "tcp://127.0.0.1:0",
        run_id="run-1",
        run_name="run",
        settings=settings or {},
        max_wait_s=max_wait_s,
        clock=clock,
    )
    task = asyncio.create_task(server.serve())
    here = Serving(run, server, task, [])
    try:
        yield here
    finally:
        server.stop()
        await asyncio.gather(task, return_exceptions=True)
        for peer in here.peers:
            await peer.close()


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, DEADLINE_S)

    asyncio.run(bounded())


async def run_to_end(here: Serving, *, generators: int = 2) -> tuple[Learner, End]:
    learner = here.learner()
    await learner.register()
    workers = [
        asyncio.create_task(here.generator(f"generator-{i}").work()) for i in range(generators)
    ]
    end = await learner.train()
    await asyncio.gather(*workers)
    assert end is not None
    return learner, end
