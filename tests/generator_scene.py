"""A generator in tests: its configuration, leases, and a worker or a whole program at work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil  # type: ignore[import-untyped]
from local_runs import REPOSITORY
from small_buffer import SmallBuffer, serve

from asyncrl.client import Client
from asyncrl.clock import PhaseClock
from asyncrl.config.load import save_resolved
from asyncrl.config.schema import Config
from asyncrl.messages import Hello, Lease
from asyncrl.types import WeightId
from generators.rewards import RewardWorkers
from generators.scripted_engine import ScriptedEngine
from generators.tokens import Tokens
from generators.worker import Worker

if TYPE_CHECKING:  # torch takes seconds to import
    from weights_sender import Version

T = TypeVar("T")
VERIFIERS = REPOSITORY / "tests" / "verifiers.py"
HELLO = Hello(role="generator", member="generator-0-test", run_id=None, host="here", pid=1)


def make_config(tiny: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "seed": 3,
        "group_size": 2,
        "model": {"path": str(tiny / "model"), "dtype": "float32"},
        "data": {
            "train_files": ["unused.jsonl"],
            "max_prompt_length": 8,
            "max_response_length": 6,
        },
        "reward": {"path": f"{VERIFIERS}:score", "workers": 1, "timeout_s": 1.0},
        "generator": {
            "engine": "scripted",
            "max_concurrent_rollouts": 8,
            "scripted": {"tokens_per_s": 200, "length": 8},
        },
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return Config.model_validate(tree)


def lease(position: int, **changes: Any) -> Lease:
    fields = {
        "kind": "train",
        "group": [0, position],
        "attempt": 0,
        "seed_k": 0,
        "row": {"prompt": "___abc>", "source": "tiny", "answer": "cba", "extra": {}},
        "num_rollouts": 2,
        "temperature": 1.0,
        "min_version": 0,
        "timeout_s": 20.0,
        **changes,
    }
    return Lease.model_validate(fields)


class Running:
    """A worker that runs against a small buffer inside the test's loop."""

    def __init__(
        self, buffer: SmallBuffer, address: str, worker: Worker, task: asyncio.Task[None]
    ) -> None:
        self.buffer, self.address, self.worker, self.task = buffer, address, worker, task

    async def groups(self, count: int) -> None:
        """Waits until `count` groups came, or passes the worker's failure on."""
        waited = asyncio.create_task(self.buffer.until(lambda: len(self.buffer.groups) >= count))
        await asyncio.wait({waited, self.task}, return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            waited.cancel()
            self.task.result()
        await waited

    async def done(self) -> None:
        self.buffer.done = True
        await asyncio.wait_for(self.task, 5)


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = 60) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


class Scene:
    """`async with Scene(...) as running`."""

    def __init__(
        self,
        config: Config,
        tokens: Tokens,
        rewards: RewardWorkers,
        leases: list[Lease],
        engine: Any = None,
        *,
        published: WeightId | None = None,
        location: str | None = None,
        offered: Version | None = None,
    ) -> None:
        """Before the worker starts there are weights in a directory (`published`; at `location`
        "": their learner is not there), or `offered` by broadcast."""
        self.parts = (config, tokens, rewards, leases)
        self.published, self.location, self.offered = published, location, offered
        self.engine = engine or ScriptedEngine(config.generator.scripted, vocab_size=64)

    async def __aenter__(self) -> Running:
        config, tokens, rewards, leases = self.parts
        self.server = serve(leases)
        buffer, address = await self.server.__aenter__()
        if self.published is not None:
            buffer.publish(self.published)
        if self.location is not None:
            buffer.published = (buffer.published[0], self.location)
        if self.offered is not None:
            buffer.offer = self.offered.manifest.weights, self.offered.json.encode()
        self.client = Client(address, hello=HELLO)
        await self.client.connect(deadline_s=5)
        worker = Worker(
            *(config, self.client, self.engine, tokens, rewards),
            ended=asyncio.get_running_loop().create_future(),
            clock=PhaseClock("starting"),
            on_swap=lambda: None,
        )
        task = asyncio.create_task(worker.run())
        self.running = Running(buffer, address, worker, task)
        return self.running

    async def __aexit__(self, *error: object) -> None:
        self.running.task.cancel()
        await asyncio.gather(self.running.task, return_exceptions=True)
        await self.client.close()
        await self.server.__aexit__(None, None, None)


def start_program(
    directory: Path, config: Config, address: str, *, program: Sequence[str] = ("-m", "generators")
) -> subprocess.Popen[str]:
    save_resolved(config, directory / "config.yaml")
    command = [sys.executable, "-P", *program, str(directory / "config.yaml")]
    command += ["--connect", address, "--name", "generator-7"]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


async def ended(program: subprocess.Popen[str], timeout_s: float) -> int:
    return await asyncio.wait_for(asyncio.to_thread(program.wait), timeout_s)


def alive_after(processes: list[psutil.Process], *, timeout_s: float) -> list[psutil.Process]:
    """Those that still run; one that only waits to be reaped by init does not."""
    ends = time.monotonic() + timeout_s
    while True:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > ends:
            return alive
        time.sleep(0.05)
