"""`python -P -m generators CONFIG [--connect ADDRESS] [--name NAME]`: one generator."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config.load import load_resolved
from asyncrl.config.schema import Config
from asyncrl.heartbeat import HeartbeatThread
from asyncrl.messages import Hello
from asyncrl.run_dir import RunDir
from asyncrl.transport import Client, RefusedError, Unreachable
from generators.engine import Engine
from generators.rewards import RewardWorkers, UserError
from generators.scripted_engine import ScriptedEngine
from generators.tokens import Tokens, vocabulary_size
from generators.vllm_engine import VllmEngine
from generators.weights_in import UNREACHABLE_S
from generators.worker import Worker

log = logging.getLogger("generators")

TERMINATED = 143
"""Exit code after SIGTERM or SIGINT (128 + 15)."""


def main() -> int:
    """Exit code: 0 the run is done, 2 something that the user can mend, 1 anything else (then
    with a traceback, except where the buffer is gone or refuses). SIGUSR1 dumps all threads."""
    parser = argparse.ArgumentParser(prog="python -m generators", description=__doc__)
    parser.add_argument("config", help="resolved config.yaml in the run directory")
    parser.add_argument("--connect", help="address of the buffer (default: network.buffer)")
    parser.add_argument("--name", default="generator-0", help="name in logs and metrics")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {arguments.name} %(levelname)s %(message)s"
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        with _starting():
            config = load_resolved(Path(arguments.config))
            hello = Hello.here(
                "generator",
                name=arguments.name,
                run_id=RunDir(Path(arguments.config).parent).read_run_id(),
            )
        asyncio.run(_generate(config, arguments.connect or config.network.buffer, hello))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Unreachable, RefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _starting() -> Iterator[None]:
    """Before work begins, whatever is refused is the user's to mend; later it is a fault of ours,
    unless it says otherwise."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


async def _generate(config: Config, address: str, hello: Hello) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    rewards = RewardWorkers(config.reward)
    try:
        await _serve(config, address, hello, rewards)
    except asyncio.CancelledError:
        # Loading a model runs in a thread that cannot be interrupted; nothing here needs it.
        _end_children()
        os._exit(TERMINATED)
    finally:
        rewards.close()
        _end_children()


async def _serve(config: Config, address: str, hello: Hello, rewards: RewardWorkers) -> None:
    """Checks what can be checked without the model, then loads it and works."""
    with _starting():
        _, tokens = await asyncio.gather(
            asyncio.to_thread(rewards.start), asyncio.to_thread(Tokens, config)
        )
        engine: Engine = VllmEngine(config)
        if config.generator.engine == "scripted":
            vocabulary = await asyncio.to_thread(vocabulary_size, config.model.path)
            engine = ScriptedEngine(config.generator.scripted, vocab_size=vocabulary)
    client = Client(address, hello=hello)
    welcome = await client.connect(deadline_s=UNREACHABLE_S)
    worker = Worker(config, engine=engine, tokens=tokens, rewards=rewards)
    loop = asyncio.get_running_loop()

    def on_done() -> None:
        loop.call_soon_threadsafe(worker.finish)

    heartbeat = HeartbeatThread(
        address,
        hello=hello,
        interval_s=welcome.heartbeat_s,
        look=worker.look,
        on_done=on_done,
    )
    heartbeat.start()
    try:
        started = time.monotonic()
        with _starting():
            await engine.start()
        log.info("engine ready after %.1f s", time.monotonic() - started)
        await worker.run(client, on_swap=heartbeat.beat_now)
    finally:
        heartbeat.close()
        await client.close()
        await engine.close()
        tokens.close()


def _end_children() -> None:
    """No process that this one started outlives it."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    deadline = time.monotonic() + 2.0
    for child in children:
        child.join(timeout=max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()


if __name__ == "__main__":
    sys.exit(main())
