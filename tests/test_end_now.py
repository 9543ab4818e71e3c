"""What ends at once, or is killed, leaves nothing in shared memory."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_runs import REPOSITORY

from asyncrl.launch.children import Children, Program
from asyncrl.launch.placement import cpu_environment

SHARED_MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")

USE_OPENMP = "import torch; torch.randn(64, 64).sum(); "
END = "from asyncrl.end_now import end_now; end_now(3)"
KILL = "import os; os.kill(os.getpid(), 9)"


def marks(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{pid}_*"))


@pytest.fixture
def environment() -> dict[str, str]:
    """As the launcher gives it to programs: with Intel's OpenMP, where it is installed."""
    found = cpu_environment(1)
    if "LD_PRELOAD" not in found:
        pytest.skip("Intel's OpenMP is not installed")
    return found


def test_a_process_that_ends_at_once_leaves_nothing_of_openmp(environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", USE_OPENMP + END],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )
    assert process.wait(60) == 3
    assert marks(process.pid) == []


def test_the_launcher_removes_what_a_killed_child_has_left(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    command = (sys.executable, "-c", USE_OPENMP + KILL)
    with Children(tmp_path) as children:
        child = children.start(Program("killed", "learner", command, environment))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert len(marks(child.pid)) == 1  # nothing else would remove it
        while not child.has_ended():
            time.sleep(0.01)
    assert child.exit_code == -9
    assert marks(child.pid) == []


SEMAPHORE = (
    "import multiprocessing as m, os; lock = m.get_context('spawn').Lock(); "
    "print(lock._semlock.name, flush=True); os.kill(os.getpid(), 9)"
)


def test_semaphores_of_a_killed_child_are_removed(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        command = (sys.executable, "-c", SEMAPHORE)
        child = children.start(Program("killed", "generator", command, {}))
        while not child.has_ended():
            time.sleep(0.01)
    name, *_ = child.log_text().splitlines()  # then the warning that it was left behind
    assert not (SHARED_MEMORY / f"sem.{name[1:]}").exists()


def test_make_clean_removes_the_weights_of_killed_runs_and_no_others(tmp_path: Path) -> None:
    name = f"killed-{secrets.token_hex(4)}"
    for run, run_id in ((name, "0123456789abcdef"), ("empty", "")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run_id").write_text(run_id)
    (tmp_path / "runs" / "no run").mkdir()
    left = SHARED_MEMORY / f"asyncrl-{name}-01234567"
    other = SHARED_MEMORY / f"asyncrl-{name}-76543210"
    left.mkdir()
    other.mkdir()
    try:
        subprocess.run(
            ["make", "-f", str(REPOSITORY / "Makefile"), "clean"], cwd=tmp_path, check=True
        )
        assert not left.exists()
        assert other.exists()
        assert not (tmp_path / "runs").exists()
    finally:
        for directory in (left, other):
            if directory.exists():
                directory.rmdir()
