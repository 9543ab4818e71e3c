"""`python -m generators` as a process: how it starts, ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
from generator_scene import (
    VERIFIERS,
    alive_after,
    ended,
    lease,
    make_config,
    run,
    start_program,
)
from small_buffer import SmallBuffer, serve

from asyncrl.config.schema import Config

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def config(random_tiny_task: Path) -> Config:
    return make_config(random_tiny_task)


def test_the_program_generates_beats_and_exits_0_when_the_run_is_done(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> tuple[int, SmallBuffer]:
        async with serve([lease(i) for i in range(6)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 6, 40)
            await buffer.until(lambda: len(buffer.beats) > 10)
            buffer.done = True
            return await ended(program, 8), buffer

    code, buffer = run(scenario())
    assert code == 0
    assert max(beat.num_tokens for beat in buffer.beats) > 0
    assert "waiting for leases" in {beat.state for beat in buffer.beats}


def test_sigterm_ends_the_program_within_5_s_and_leaves_no_child(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> tuple[float, list[psutil.Process]]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            children = psutil.Process(program.pid).children(recursive=True)
            assert children, "the reward workers are children"
            started = time.monotonic()
            program.send_signal(signal.SIGTERM)
            await ended(program, 10)
            return time.monotonic() - started, children

    took, children = run(scenario())
    assert took < 5
    assert not alive_after(children, timeout_s=1)


def test_sigkill_of_the_program_leaves_no_child(config: Config, tmp_path: Path) -> None:
    async def scenario() -> list[psutil.Process]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            children = psutil.Process(program.pid).children(recursive=True)
            program.kill()
            await ended(program, 10)
            return children

    assert not alive_after(run(scenario()), timeout_s=5)


def test_a_bad_reward_path_is_one_message_and_exit_code_2(config: Config, tmp_path: Path) -> None:
    changed = make_config(Path(config.model.path).parent, reward__path=f"{VERIFIERS}:scor")
    program = start_program(tmp_path, changed, "tcp://127.0.0.1:9")
    _, errors = program.communicate(timeout=30)
    assert program.returncode == 2
    assert "scor" in errors
    assert "Traceback" not in errors


FAULTY = """
import sys
import generators.__main__ as program

class FaultyEngine(program.ScriptedEngine):
    async def generate(self, *arguments, **options):
        raise ValueError("a slip of ours")

program.ScriptedEngine = FaultyEngine
sys.exit(program.main())
"""


def test_a_value_error_in_the_middle_of_work_is_a_traceback_and_exit_code_1(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> tuple[int, str]:
        async with serve([lease(0)]) as (_, address):
            program = start_program(tmp_path, config, address, program=["-c", FAULTY])
            _, errors = await asyncio.to_thread(program.communicate, timeout=40)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 1
    assert "Traceback" in errors
    assert "a slip of ours" in errors


def test_a_reward_error_with_on_error_stop_is_one_message_and_exit_code_2(
    config: Config, tmp_path: Path
) -> None:
    changed = make_config(
        Path(config.model.path).parent,
        reward__path=f"{VERIFIERS}:missing_answer",
        reward__on_error="stop",
    )

    async def scenario() -> tuple[int, str]:
        async with serve([lease(0)]) as (_, address):
            program = start_program(tmp_path, changed, address)
            _, errors = await asyncio.to_thread(program.communicate, timeout=40)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 2
    assert "reward.on_error is stop" in errors
    assert "asyncio" not in errors, "only the traceback of the reward function is shown"


def test_sigusr1_dumps_all_threads_and_the_program_goes_on(config: Config, tmp_path: Path) -> None:
    async def scenario() -> tuple[int, str]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            program.send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.2)
            assert program.poll() is None
            buffer.done = True
            _, errors = await asyncio.to_thread(program.communicate, timeout=10)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 0
    assert "Current thread" in errors
    assert "heartbeat.py" in errors


@pytest.mark.vllm
@pytest.mark.parametrize(
    "end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_vllms_processes_end_with_the_program(config: Config, tmp_path: Path, end: int) -> None:
    changed = make_config(
        Path(config.model.path).parent,
        generator__engine="vllm",
        generator__vllm={"max_num_seqs": 16, "cpu_kv_cache_gib": 1},
    )

    async def scenario() -> tuple[float, list[psutil.Process]]:
        async with serve([lease(i) for i in range(4)]) as (buffer, address):
            program = start_program(tmp_path, changed, address)
            await buffer.until(lambda: len(buffer.groups) == 4, 100)
            children = psutil.Process(program.pid).children(recursive=True)
            assert any("EngineCore" in child.name() for child in children)
            started = time.monotonic()
            program.send_signal(end)
            await ended(program, 10)
            return time.monotonic() - started, children

    took, children = run(scenario(), timeout_s=150)
    assert took < 5
    assert not alive_after(children, timeout_s=3)
