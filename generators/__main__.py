"""`python -P -m generators CONFIG [--connect ADDRESS] [--name NAME]`: one generator.

Exit codes: 0 the run is done; 2 something that the user can mend, in one message; 143 after SIGTERM
and 130 after SIGINT; 1 anything else, with a traceback except where the buffer is gone or refuses.
Whoever leaves before the run is done says so to the buffer, so that its leases pass on at once.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.client import Client, RefusedError, Unreachable
from asyncrl.clock import PhaseClock
from asyncrl.config.load import load_resolved
from asyncrl.config.schema import Config
from asyncrl.end_now import end_now, remove_openmp_mark
from asyncrl.handshake import member_settings
from asyncrl.messages import Hello
from asyncrl.run_dir import RunDir
from generators.engine import Engine
from generators.member import Member
from generators.rewards import RewardWorkers, UserError
from generators.scripted_engine import ScriptedEngine
from generators.tokens import Tokens, vocabulary_size
from generators.vllm_engine import VllmEngine
from generators.worker import Worker

log = logging.getLogger("generators")

T = TypeVar("T")


def main() -> int:
    """Returns the exit code. SIGUSR1 dumps all threads."""
    clock = PhaseClock("starting")
    parser = argparse.ArgumentParser(prog="python -m generators", description=__doc__)
    parser.add_argument("config", help="resolved config.yaml in the run directory", type=Path)
    parser.add_argument("--connect", help="address of the buffer (default: network.buffer)")
    parser.add_argument("--name", default="generator-0", help="name in logs and metrics")
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {arguments.name} %(levelname)s %(message)s"
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        with _starting():
            config = load_resolved(arguments.config)
        run_id = RunDir(arguments.config.parent).read_run_id()
        hello = Hello.here("generator", name=arguments.name, run_id=run_id)
        asyncio.run(_generate(config, arguments.connect or config.network.buffer, hello, clock))
    except (UserError, Unreachable, RefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        is_misfit = isinstance(error, RefusedError) and error.is_misfit
        return 2 if is_misfit or isinstance(error, UserError) else 1
    return 0


@contextmanager
def _starting() -> Iterator[None]:
    """Before work begins, whatever is refused is the user's to mend, and so is a buffer that is not
    there; later it is a fault of ours, unless it says otherwise."""
    try:
        yield
    except (ValueError, Unreachable) as error:
        raise UserError(str(error)) from error


async def _generate(config: Config, address: str, hello: Hello, clock: PhaseClock) -> None:
    signals = _cancel_on_signals()
    rewards = RewardWorkers(config.reward)
    try:
        await _serve(config, address, hello, rewards, clock)
    except asyncio.CancelledError:
        rewards.close()
        _end_at_once(128 + signals[0])
    finally:
        rewards.close()
        _end_children()


def _cancel_on_signals() -> list[int]:
    """SIGTERM and SIGINT cancel this task. Returns a list that holds those that came."""
    task = asyncio.current_task()
    assert task is not None
    came: list[int] = []

    def cancel(number: int) -> None:
        came.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    return came


async def _serve(
    config: Config, address: str, hello: Hello, rewards: RewardWorkers, clock: PhaseClock
) -> None:
    settings = await asyncio.to_thread(member_settings, config, "generator")
    client = Client(address, hello=hello.model_copy(update={"settings": settings}))
    try:
        await _take_part(config, client, rewards, clock)
    finally:
        await client.close()


async def _take_part(
    config: Config, client: Client, rewards: RewardWorkers, clock: PhaseClock
) -> None:
    """From hello to the end of the run, or to a farewell."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    parts: tuple[Tokens, Engine] | None = None
    try:
        async with Member(client, ended=ended, clock=clock) as member:
            with _starting():
                parts = await _unless_over(ended, _get_ready(config, member, rewards))
                tokens, engine = parts
                worker = Worker(
                    *(config, client, engine, tokens, rewards),
                    ended=ended,
                    clock=clock,
                    on_swap=member.beat_now,
                )
                member.look, member.give_up = worker.look, worker.give_up
                await _unless_over(ended, engine.start())
            log.info("the engine is ready, %.1f s after the start", clock.phase_s())
            await worker.run()
    finally:
        if parts is not None:
            tokens, engine = parts
            await engine.close()
            tokens.close()


async def _get_ready(
    config: Config, member: Member, rewards: RewardWorkers
) -> tuple[Tokens, Engine]:
    """Joins, and checks meanwhile what can be checked without the model; raises what is found
    first."""
    parts, _, _ = await asyncio.gather(
        asyncio.to_thread(_make_parts, config),
        asyncio.to_thread(rewards.start),
        member.join(deadline_s=config.network.wait_for_buffer_s),
    )
    return parts


def _make_parts(config: Config) -> tuple[Tokens, Engine]:
    """Tokens, and an engine that is not loaded yet."""
    tokens = Tokens(config)
    if config.generator.engine == "scripted":
        vocabulary = vocabulary_size(config.model.path)
        return tokens, ScriptedEngine(
            config.generator.scripted,
            vocab_size=vocabulary,
            model=config.model,
            weights=config.weights,
        )
    return tokens, VllmEngine(config)


async def _unless_over(ended: asyncio.Future[None], work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. A run that is over before that ends the program, as nothing can
    interrupt the threads that load."""
    task = asyncio.create_task(work)
    either: list[asyncio.Future[Any]] = [task, ended]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            log.info("the run was done before this generator was ready")
            _end_at_once(0)
        return task.result()
    finally:
        task.cancel()


def _end_at_once(code: int) -> None:
    """The thread that loads a model cannot be interrupted, and nothing here needs it."""
    _end_children()
    end_now(code)


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
        if child.pid is not None:
            remove_openmp_mark(child.pid)


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    end_now(exit_code)  # a thread may hang in a broadcast, and no destructor may wait for it
