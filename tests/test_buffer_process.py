"""The buffer as a process: killed and started again, stopped, and started wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scripted_peers import Generator, Learner, make_config

from asyncrl.client import RefusedError
from asyncrl.config import Config
from asyncrl.config.load import load_resolved, save_resolved
from asyncrl.journal import fates

pytestmark = pytest.mark.e2e

NUM_ROWS = 64


def begin(run_dir: Path, config: Config) -> Config:
    """A run directory as the launcher leaves it."""
    data = run_dir / "train.jsonl"
    lines = [
        {"prompt": f"{i}", "data_source": "words", "reward_model": {"ground_truth": f"{i}"}}
        for i in range(NUM_ROWS)
    ]
    data.write_text("\n".join(json.dumps(line) for line in lines))
    files = config.data.model_copy(update={"train_files": [str(data)]})
    config = config.model_copy(update={"data": files})
    save_resolved(config, run_dir / "config.yaml")
    (run_dir / "run_id").write_text("run-1")
    return config


def config_of(run_dir: Path) -> Config:
    """That of the run in this directory, whose settings its members must have."""
    return load_resolved(run_dir / "config.yaml")


def start(run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "buffer", str(run_dir / "config.yaml")]
    root = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root}
    )


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()


@contextmanager
def buffer_process(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(run_dir)
    try:
        yield process
    finally:
        kill(process)


def address_of(run_dir: Path, process: subprocess.Popen[str]) -> str:
    ends = time.monotonic() + 30
    while not (run_dir / "buffer_address").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < ends
        time.sleep(0.02)
    return (run_dir / "buffer_address").read_text()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_killed_buffer_comes_back_on_its_port_and_the_run_goes_on(
    tmp_path: Path, max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.client.RESEND_S", 1.0)  # also sends most requests several times
    num_steps, kills = 8, (2, 5)

    async def train_through_kills() -> tuple[Learner, int | None]:
        process = start(tmp_path)
        address = address_of(tmp_path, process)
        learner = Learner(address, "learner-0").fits(config_of(tmp_path))
        generators = [
            Generator(address, f"generator-{i}").fits(config_of(tmp_path)) for i in range(2)
        ]
        try:
            await learner.register()
            workers = [asyncio.create_task(generator.work()) for generator in generators]
            for version in kills:
                await learner.train(stop_at=version)
                kill(process)
                process = start(tmp_path)
            end = await learner.train()
            assert end is not None
            assert not end.failed
            await asyncio.gather(*workers)
            return learner, await asyncio.to_thread(process.wait, 20)
        finally:
            kill(process)
            for peer in (learner, *generators):
                await peer.close()

    begin(tmp_path, make_config(max_steps=num_steps, max_staleness=max_staleness))
    learner, code = asyncio.run(asyncio.wait_for(train_through_kills(), 90))
    assert code == 0
    assert [id.position for id in learner.trained_ids()] == list(range(4 * num_steps))
    assert learner.max_staleness() <= max_staleness
    assert fates(tmp_path) == {
        "trained": 4 * num_steps,
        "not_issued": NUM_ROWS - 4 * num_steps,
    }


def test_a_buffer_killed_in_the_middle_of_a_step_takes_the_commit_and_the_leases_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.client.RESEND_S", 1.0)

    async def scenario() -> int | None:
        process = start(tmp_path)
        address = address_of(tmp_path, process)
        learner, generator = (
            Learner(address, "learner-0").fits(config_of(tmp_path)),
            Generator(address, "generator-0").fits(config_of(tmp_path)),
        )
        try:
            await learner.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await learner.fetch(0)
            held = await generator.lease(4)
            for lease in held:
                await generator.start(lease)
            await generator.status()  # behind what is not answered
            kill(process)
            process = start(tmp_path)
            await learner.commit()
            assert (await learner.status())["version"] == 1
            for lease in held:
                assert (await generator.submit(lease)).verdict == "accepted"
            worker = asyncio.create_task(generator.work())
            end = await learner.train()
            await worker
            assert end is not None and not end.failed
            assert {group.attempt for group in learner.groups(1)} == {0}
            return await asyncio.to_thread(process.wait, 20)
        finally:
            kill(process)
            for peer in (learner, generator):
                await peer.close()

    begin(tmp_path, make_config(max_steps=3, max_staleness=1))
    assert asyncio.run(asyncio.wait_for(scenario(), 90)) == 0
    assert fates(tmp_path) == {"trained": 12, "not_issued": NUM_ROWS - 12}


def test_a_buffer_that_was_stopped_for_a_while_blames_nobody(tmp_path: Path) -> None:
    """Nobody is dead for not having been heard, and no lease has run out meanwhile."""

    async def scenario(process: subprocess.Popen[str]) -> None:
        address = address_of(tmp_path, process)
        generator = Generator(address, "generator-0").fits(config_of(tmp_path))
        held = await generator.lease(4)
        for lease in held:
            await generator.start(lease)
        await generator.beat()
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(3.0)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.6)
        values = await generator.status()
        assert values["counts"] == {"leased": 4}
        assert values["leases"][0]["attempt"] == 0
        assert values["leases"][0]["age_s"] < 2.5
        await generator.close()

    begin(tmp_path, make_config(buffer__lease_timeout_s=2.5, network__heartbeat_s=0.3))
    with buffer_process(tmp_path) as process:
        asyncio.run(asyncio.wait_for(scenario(process), 60))
        process.kill()
        _, stderr = process.communicate(timeout=10)
    assert "sent nothing" not in stderr


def test_sigint_once_drains_and_the_run_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    async def life(name: str, *, version: int, interrupt_at: int | None) -> tuple[Learner, int]:
        process = start(tmp_path)
        address = address_of(tmp_path, process)
        learner, generator = (
            Learner(address, name).fits(config_of(tmp_path)),
            Generator(address, f"generator-of-{name}").fits(config_of(tmp_path)),
        )
        try:
            await learner.register(version)
            worker = asyncio.create_task(generator.work())
            if interrupt_at is not None:
                await learner.train(stop_at=interrupt_at)
                process.send_signal(signal.SIGINT)
                while not (await learner.status())["stopped"]:
                    await asyncio.sleep(0.02)
                assert await learner.commit()
                assert (await learner.end()).stopped
            else:
                await learner.train()
            await worker
            return learner, await asyncio.to_thread(process.wait, 20)
        finally:
            kill(process)
            for peer in (learner, generator):
                await peer.close()

    async def scenario() -> None:
        first, code = await life("a", version=0, interrupt_at=2)
        assert (first.version, code) == (3, 130)
        second, code = await life("b", version=3, interrupt_at=None)
        assert code == 0
        ids = [id for id in first.trained_ids() if id.position < 12] + second.trained_ids()
        assert [id.position for id in ids] == list(range(20))

    begin(tmp_path, make_config(max_steps=5, max_staleness=2))
    asyncio.run(asyncio.wait_for(scenario(), 90))
    assert fates(tmp_path) == {"trained": 20, "not_issued": NUM_ROWS - 20}


def test_a_second_sigint_ends_a_buffer_that_waits_for_its_learner(tmp_path: Path) -> None:
    async def hold_a_batch(address: str) -> None:
        learner, generator = (
            Learner(address, "learner-0").fits(config_of(tmp_path)),
            Generator(address, "generator-0").fits(config_of(tmp_path)),
        )
        await learner.register()
        for lease in await generator.lease(4):
            await generator.submit(lease)
        await learner.fetch(0)
        for peer in (learner, generator):
            await peer.close()

    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as process:
        asyncio.run(asyncio.wait_for(hold_a_batch(address_of(tmp_path, process)), 30))
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 143


@pytest.mark.parametrize("gap_s", [0.0, 0.01, 0.05])
def test_many_sigints_end_the_buffer_with_a_code_of_its_own(tmp_path: Path, gap_s: float) -> None:
    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as process:
        address_of(tmp_path, process)
        for _ in range(20):
            process.send_signal(signal.SIGINT)
            time.sleep(gap_s)
        code = process.wait(timeout=15)
        assert code in (130, 143)  # 130: it had drained before the second one came
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_sigint_without_members_ends_the_buffer_at_once(tmp_path: Path) -> None:
    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as process:
        address_of(tmp_path, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=15) == 130


def test_sigterm_ends_the_buffer_promptly(tmp_path: Path) -> None:
    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as process:
        address_of(tmp_path, process)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 143
        assert time.monotonic() - began < 6


def test_a_port_that_is_taken_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        begin(tmp_path, make_config(network__buffer=f"tcp://127.0.0.1:{port}"))
        with buffer_process(tmp_path) as process:
            _, stderr = process.communicate(timeout=30)
        assert process.returncode == 2
        assert re.search(rf"error: cannot listen on tcp://127.0.0.1:{port}: .*free one", stderr)
        assert "Traceback" not in stderr


def test_a_second_buffer_of_the_same_run_is_refused(tmp_path: Path) -> None:
    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as first:
        address_of(tmp_path, first)
        with buffer_process(tmp_path) as second:
            _, stderr = second.communicate(timeout=30)
        assert second.returncode == 2
        assert "another buffer has the journal" in stderr
        assert first.poll() is None


def test_an_error_in_serving_is_ours_with_traceback_and_exit_code_1(tmp_path: Path) -> None:
    async def close_a_batch(address: str) -> None:
        learner, generator = (
            Learner(address, "learner-0").fits(config_of(tmp_path)),
            Generator(address, "generator-0").fits(config_of(tmp_path)),
        )
        await learner.register()
        worker = asyncio.create_task(generator.work())
        await learner.fetch(0)
        worker.cancel()
        for peer in (learner, generator):
            await peer.close()

    async def ask_again(address: str) -> None:
        learner = Learner(address, "learner-1").fits(config_of(tmp_path))
        await learner.register()
        with pytest.raises(RefusedError, match="the buffer has failed"):
            await learner.fetch(0)
        await learner.close()

    begin(tmp_path, make_config())
    with buffer_process(tmp_path) as process:
        asyncio.run(asyncio.wait_for(close_a_batch(address_of(tmp_path, process)), 30))
    with sqlite3.connect(tmp_path / "journal.sqlite") as journal:
        journal.execute("UPDATE steps SET record='{}'")  # pydantic's error is a ValueError
    journal.close()
    with buffer_process(tmp_path) as process:
        asyncio.run(asyncio.wait_for(ask_again(address_of(tmp_path, process)), 30))
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" in stderr
    assert "RuntimeError: the buffer has failed" in stderr


def test_data_that_cannot_be_read_is_told_before_anything_listens(tmp_path: Path) -> None:
    begin(tmp_path, make_config())
    (tmp_path / "train.jsonl").write_text('{"prompt": 7}\n')
    with buffer_process(tmp_path) as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "train.jsonl" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "buffer_address").exists()
