"""A full disk is told in one message, and the run goes on once there is room."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chaos_runs import NUM_PROMPTS, chaos, write_chaos_config
from safetensors import SafetensorError

from asyncrl.full_disk import why_full


def test_a_write_that_the_disk_refuses_is_told_with_path_and_room(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"x")
    told = why_full(caught.value, tmp_path)
    assert told is not None
    assert told.startswith(f"the disk is full: {tmp_path} cannot be written")
    assert "MB are free. Make room" in told
    assert "\n" not in told


def test_a_database_that_cannot_grow_is_told_whatever_was_raised_from_it(tmp_path: Path) -> None:
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count=2")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("CREATE TABLE one(x)").execute("CREATE TABLE two(x)")
    database.close()
    broken = RuntimeError("the buffer has failed")
    broken.__cause__ = caught.value
    assert "database or disk is full" in (why_full(broken, tmp_path) or "")


def test_other_errors_keep_their_tracebacks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "missing").read_text()
    for error in (caught.value, RuntimeError("7 groups"), sqlite3.OperationalError("locked")):
        assert why_full(error, tmp_path) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_tensors_that_do_not_fit_are_told(small_disk: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises((SafetensorError, OSError)) as caught:
        save_file({"large": torch.zeros(2 << 20)}, small_disk / "large.safetensors")
    assert "MB of 4.2 MB are free" in (why_full(caught.value, small_disk) or "")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_run_whose_disk_is_full_ends_with_one_message_and_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path, random_tiny_task: Path
) -> None:
    config = write_chaos_config(tmp_path, random_tiny_task)
    (tmp_path / "run").symlink_to(small_disk)
    with chaos(config, tmp_path, "generator.scripted.tokens_per_s=20") as run:
        for name in ("buffer", "learner", "generator-0"):
            run.start(name)
        learner = run.programs["learner"]
        assert learner.wait() == 1  # its first checkpoint does not fit
        check_told(learner.output, small_disk)
        assert list((small_disk / "checkpoints").iterdir()) == []
        buffer = run.programs["buffer"]
        fill(small_disk)
        assert buffer.wait() == 1
        check_told(buffer.output, small_disk)
        make_room(small_disk)
        run.programs["generator-0"].kill()  # it may have left with the buffer, or wait for it
        for name in ("buffer", "learner", "generator-0"):
            run.start(name)
        run.shells.wait_for(run.have_ended, "the end")
        assert run.shells.fates() == {"trained": NUM_PROMPTS}


def check_told(output: str, disk: Path) -> None:
    assert output.count("the disk is full: ") == 1, output
    assert "MB of 4.2 MB are free" in output
    assert "Traceback" not in output


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
    (disk / "filler").unlink()
