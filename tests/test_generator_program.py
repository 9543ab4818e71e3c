"""`python -m generators` as a process: how it starts, ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
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
from safetensors.torch import load_file
from small_buffer import SmallBuffer, serve
from weights_sender import Sender, Version

from asyncrl.config.schema import Config
from asyncrl.messages import Verdict
from asyncrl.types import WeightId

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
            await buffer.until(lambda: buffer.beats[-1].state == "waiting for leases")
            buffer.done = True
            return await ended(program, 20), buffer

    code, buffer = run(scenario())
    assert code == 0
    assert buffer.beats[-1].num_tokens > 0
    assert not buffer.left, "it has heard of the end"


def test_a_full_program_gives_up_what_heartbeats_say_is_void(
    config: Config, tmp_path: Path
) -> None:
    stuck = make_config(Path(config.model.path).parent, generator__scripted__tokens_per_s=1 / 60)

    async def scenario() -> SmallBuffer:
        async with serve([lease(i) for i in range(4)]) as (buffer, address):
            program = start_program(tmp_path, stuck, address)
            await buffer.until(lambda: len(buffer.started) == 4, 40)
            buffer.void_held = [[0, 2, 0]]
            buffer.leases = [lease(4)]
            await buffer.until(lambda: len(buffer.started) == 5)
            program.send_signal(signal.SIGTERM)
            assert await ended(program, 10) == 143
            return buffer

    assert [failed.group for failed in run(scenario()).failed] == [[0, 2]]


@pytest.mark.parametrize(
    "engine", ["scripted", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.vllm])]
)
def test_ctrl_c_in_a_shell_reaches_all_its_processes_and_shows_no_traceback(
    config: Config, tmp_path: Path, engine: str
) -> None:
    changed = make_config(
        Path(config.model.path).parent,
        generator__engine=engine,
        generator__vllm={"max_num_seqs": 16, "cpu_kv_cache_gib": 1},
    )

    async def scenario() -> tuple[int, str]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, changed, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 100)
            os.killpg(program.pid, signal.SIGINT)
            _, errors = await asyncio.to_thread(program.communicate, timeout=30)
            return program.returncode, errors

    code, errors = run(scenario(), timeout_s=150)
    assert code == 130
    assert "Traceback" not in errors
    assert "leaked" not in errors


@pytest.mark.parametrize(
    ("end", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_program_with_a_farewell_and_without_a_child(
    config: Config, tmp_path: Path, end: int, code: int
) -> None:
    async def scenario() -> tuple[int, float, list[psutil.Process], SmallBuffer]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            children = psutil.Process(program.pid).children(recursive=True)
            assert children, "the reward workers are children"
            started = time.monotonic()
            program.send_signal(end)
            await buffer.until(lambda: bool(buffer.left))
            num_beats = len(buffer.beats)
            exit_code = await ended(program, 10)
            assert len(buffer.beats) == num_beats, "a sign of life after the farewell"
            return exit_code, time.monotonic() - started, children, buffer

    exit_code, took, children, buffer = run(scenario())
    assert exit_code == code
    assert took < 8
    assert buffer.left[0].reason == "ended by a signal"
    assert not alive_after(children, timeout_s=10)


def test_a_signal_ends_the_program_while_the_buffer_does_not_answer(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> float:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            buffer.silent = True
            started = time.monotonic()
            program.send_signal(signal.SIGTERM)
            assert await ended(program, 10) == 143
            return time.monotonic() - started

    assert run(scenario()) < 8


def test_a_stopped_program_goes_on_when_it_is_continued(config: Config, tmp_path: Path) -> None:
    slow = make_config(
        Path(config.model.path).parent,
        network__buffer_timeout_s=2.0,
        generator__scripted__tokens_per_s=10,
    )

    async def scenario() -> int:
        async with serve([lease(i) for i in range(8)]) as (buffer, address):
            program = start_program(tmp_path, slow, address)
            await buffer.until(lambda: len(buffer.groups) >= 1, 40)
            program.send_signal(signal.SIGSTOP)
            buffer.verdict = Verdict(verdict="superseded")  # others got its leases
            await asyncio.sleep(3.5)  # longer than the patience of any of its requests
            num_beats = len(buffer.beats)
            program.send_signal(signal.SIGCONT)
            buffer.leases += [lease(i) for i in range(8, 16)]
            await buffer.until(lambda: len(buffer.groups) == 16, 20)
            assert len(buffer.beats) > num_beats
            buffer.done = True
            return await ended(program, 20)

    assert run(scenario()) == 0


def test_a_buffer_that_is_not_there_at_the_start_is_one_message_and_exit_code_2(
    config: Config, tmp_path: Path
) -> None:
    hasty = make_config(Path(config.model.path).parent, network__wait_for_buffer_s=1.0)
    program = start_program(tmp_path, hasty, "tcp://127.0.0.1:9")
    _, errors = program.communicate(timeout=30)
    assert program.returncode == 2
    assert "no answer from the buffer at tcp://127.0.0.1:9 to Hello within 1 s" in errors
    assert "Traceback" not in errors


def test_a_buffer_of_other_settings_is_one_message_with_both_values_and_exit_code_2(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> tuple[int, str]:
        async with serve([]) as (buffer, address):
            buffer.settings = {"tokenizer": "another", "group_size": "2"}
            program = start_program(tmp_path, config, address)
            _, errors = await asyncio.to_thread(program.communicate, timeout=40)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 2
    assert re.search(r"tokenizer is [0-9a-f]{12} there, the buffer has another", errors)
    assert "group_size" not in errors
    assert "Traceback" not in errors


def test_a_buffer_that_goes_away_for_good_is_one_message_and_exit_code_1(
    config: Config, tmp_path: Path
) -> None:
    hasty = make_config(Path(config.model.path).parent, network__buffer_timeout_s=1.0)

    async def scenario() -> tuple[int, str]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, hasty, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            buffer.silent = True
            _, errors = await asyncio.to_thread(program.communicate, timeout=30)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 1
    assert "no answer from the buffer" in errors
    assert "Traceback" not in errors


SLOW_TO_LOAD = """
import asyncio, sys, time
import generators.__main__ as program

class SlowEngine(program.ScriptedEngine):
    async def start(self):
        await asyncio.to_thread(time.sleep, 60)

program.ScriptedEngine = SlowEngine
sys.exit(program.main())
"""


@pytest.mark.slow
def test_a_run_that_is_done_while_the_engine_loads_ends_the_program_with_0(
    config: Config, tmp_path: Path
) -> None:
    async def scenario() -> int:
        async with serve([]) as (buffer, address):
            program = start_program(tmp_path, config, address, program=["-c", SLOW_TO_LOAD])
            loading = "starting, loading the model"
            await buffer.until(lambda: loading in {beat.state for beat in buffer.beats}, 40)
            states = {beat.state for beat in buffer.beats}
            assert states == {"starting", loading}, "signs of life from the welcome on"
            buffer.done = True
            return await ended(program, 20)

    assert run(scenario()) == 0


ENDLESS_IMPORT = "import time\ntime.sleep(60)\n"


def test_a_run_that_is_done_while_the_generator_checks_its_reward_ends_it_with_0(
    config: Config, tmp_path: Path
) -> None:
    reward = tmp_path / "endless.py"
    reward.write_text(ENDLESS_IMPORT)
    changed = make_config(Path(config.model.path).parent, reward__path=f"{reward}:score")

    async def scenario() -> int:
        async with serve([]) as (buffer, address):
            program = start_program(tmp_path, changed, address)
            await buffer.until(lambda: len(buffer.beats) > 2, 40)
            assert {beat.state for beat in buffer.beats} == {"starting"}
            buffer.done = True
            return await ended(program, 20)

    assert run(scenario()) == 0


@pytest.mark.parametrize("ends_by", ["a signal", pytest.param("a refusal", marks=pytest.mark.slow)])
def test_a_reward_that_imports_for_ever_holds_up_no_end_of_the_program(
    config: Config, tmp_path: Path, ends_by: str
) -> None:
    reward = tmp_path / "endless.py"
    reward.write_text(ENDLESS_IMPORT)
    changed = make_config(Path(config.model.path).parent, reward__path=f"{reward}:score")

    async def scenario() -> tuple[int, list[psutil.Process]]:
        async with serve([]) as (buffer, address):
            if ends_by == "a refusal":
                buffer.settings = {"group_size": "8"}
            program = start_program(tmp_path, changed, address)
            await buffer.until(lambda: bool(buffer.hellos), 40)
            children = psutil.Process(program.pid).children(recursive=True)
            if ends_by == "a signal":
                await buffer.until(lambda: len(buffer.beats) > 2)
                program.send_signal(signal.SIGTERM)
            return await ended(program, 30), children  # other imports are not interrupted

    code, children = run(scenario())
    assert code == (143 if ends_by == "a signal" else 2)
    assert not alive_after(children, timeout_s=10)


def test_sigkill_of_the_program_leaves_no_child(config: Config, tmp_path: Path) -> None:
    async def scenario() -> list[psutil.Process]:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            children = psutil.Process(program.pid).children(recursive=True)
            program.kill()
            await ended(program, 10)
            return children

    assert not alive_after(run(scenario()), timeout_s=10)


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
            _, errors = await asyncio.to_thread(program.communicate, timeout=30)
            return program.returncode, errors

    code, errors = run(scenario())
    assert code == 0
    assert "Current thread" in errors
    assert "heartbeat.py" in errors


@pytest.mark.slow
@pytest.mark.parametrize("end", ["done", "a signal"])
def test_a_broadcast_that_stands_still_holds_up_no_end_of_the_program(
    config: Config, tmp_path: Path, end: str
) -> None:
    model = Path(config.model.path) / "model.safetensors"
    version = Version.of(WeightId(1, 1), load_file(model))
    go_on = threading.Event()

    async def scenario() -> int:
        async with serve([lease(0)]) as (buffer, address):
            program = start_program(tmp_path, config, address)
            await buffer.until(lambda: len(buffer.groups) == 1, 40)
            sender = Sender(version, stall_s=30)
            sender.before_slice = lambda number: number == 3 and go_on.wait(60)
            buffer.offer = version.manifest.weights, version.json.encode()
            buffer.seats.append(sender.seat())
            sender.start()
            await buffer.until(lambda: sender.num_sent == 3, 20)
            buffer.done = end == "done"
            if end == "a signal":
                program.send_signal(signal.SIGTERM)
            return await ended(program, 8)

    try:
        assert run(scenario(), timeout_s=90) == (0 if end == "done" else 143)
    finally:
        go_on.set()


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
    assert took < 8
    assert not alive_after(children, timeout_s=10)
