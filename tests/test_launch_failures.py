"""What a program's end means, and what a person is told about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.launch.children import Children, Program
from asyncrl.launch.failures import Ending, how_it_ended, judge, telling_lines
from asyncrl.launch.ranks import Nodes, exit_code, learner_command


def ending(
    role: str,
    code: int,
    *,
    has_worked: bool = True,
    is_over: bool = False,
    is_needed: bool | None = None,
) -> Ending:
    needed = (not is_over or role != "generator") if is_needed is None else is_needed
    return Ending(role, code, has_worked=has_worked, run_is_over=is_over, is_needed=needed)


@pytest.mark.parametrize("role", ["buffer", "learner", "generator"])
@pytest.mark.parametrize("code", [-signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGSEGV])
def test_what_was_killed_is_started_again(role: str, code: int) -> None:
    assert judge(ending(role, code)) == "again"
    assert judge(ending(role, code, has_worked=False)) == "again"


def test_a_generator_that_fails_is_started_again_only_if_it_has_worked() -> None:
    assert judge(ending("generator", 1)) == "again"
    assert judge(ending("generator", 1, has_worked=False)) == "failed"


def test_a_mistake_of_the_user_and_a_failed_learner_or_buffer_end_the_run() -> None:
    assert judge(ending("generator", 2)) == "failed"
    assert judge(ending("learner", 1)) == judge(ending("buffer", 1)) == "failed"


def test_nobody_is_started_again_once_the_run_is_over() -> None:
    assert judge(ending("generator", -signal.SIGKILL, is_over=True)) == "well"
    assert judge(ending("learner", -signal.SIGKILL, is_over=True)) == "failed"


def test_a_buffer_that_is_killed_when_the_learner_has_ended_well_ends_no_run_badly() -> None:
    assert judge(ending("buffer", -signal.SIGKILL, is_over=True, is_needed=False)) == "well"
    assert judge(ending("buffer", -signal.SIGKILL, is_over=True, is_needed=True)) == "failed"
    assert judge(ending("buffer", 1, is_over=True, is_needed=False)) == "failed"


def test_a_buffer_that_was_drained_has_ended_well() -> None:
    assert judge(ending("buffer", 130, is_over=True)) == "well"
    assert judge(ending("buffer", 130)) == "well"


def test_an_end_is_told_by_name() -> None:
    assert how_it_ended(ending("learner", -9)) == "was ended by SIGKILL"
    assert how_it_ended(ending("learner", 143)) == "was ended by SIGTERM"
    assert how_it_ended(ending("learner", 2)) == "ended with exit code 2"
    assert how_it_ended(ending("learner", 255)) == "ended with exit code 255"


def test_the_first_error_of_a_log_is_told_even_when_much_was_said_after_it() -> None:
    log = "\n".join(
        [
            "(EngineCore pid=7) ERROR 08-10 [core.py:9] Traceback (most recent call last):",
            "(EngineCore pid=7) ERROR 08-10 [core.py:9] ValueError: no such head size",
            *(f"cleaning up {i}" for i in range(40)),
            "RuntimeError: engine core failed",
        ]
    )
    first, *_, last = telling_lines(log, count=5)
    assert "no such head size" in first
    assert last == "RuntimeError: engine core failed"
    assert len(telling_lines(log, count=5)) == 7


def test_a_child_that_ends_takes_its_own_processes_with_it(tmp_path: Path) -> None:
    grandchild = "import subprocess as s; p = s.Popen(['sleep', '60']); print(p.pid, flush=True)"
    program = Program("parent", "parent", (sys.executable, "-c", grandchild), {})
    with Children(tmp_path) as children:
        child = children.start(program)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        while children.running():
            time.sleep(0.01)
        assert children.unseen() == [child]
        assert children.newly_ended() == [child]
        assert children.newly_ended() == children.unseen() == []
        pid = int(child.log_text())
    state = subprocess.run(["ps", "-o", "stat=", str(pid)], capture_output=True, text=True).stdout
    assert state.strip()[:1] in ("", "Z")


def test_a_log_is_told_from_where_this_life_began(tmp_path: Path) -> None:
    program = Program("one", "one", (sys.executable, "-c", "import os; print(os.getpid())"), {})
    with Children(tmp_path) as children:
        for _ in range(2):
            child = children.start(program)
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert child.has_ended()
            assert child.log_text() == f"{child.pid}\n"


def test_several_machines_need_to_know_where_the_first_one_is() -> None:
    with pytest.raises(ValueError, match="--master HOST:PORT"):
        Nodes(count=2, this=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Nodes(count=2, this=2, master="node0:29500")


def test_one_rank_is_started_plainly() -> None:
    assert learner_command(1, "c.yaml")[1:] == ("-P", "-m", "learner", "c.yaml")
    command = learner_command(2, "c.yaml", nodes=Nodes(count=2, this=1, master="[::1]:29500"))
    assert command[3:5] == ("asyncrl.launch.ranks", "--nproc-per-node=2")
    assert "--master-addr=::1" in command


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        ([(2, 10)], 2),
        ([(-9, 10)], 137),
        ([(1, 10), (-9, 10)], 137),  # the first could not reach the second any more
        ([(1, 10), (-15, 10)], 1),  # the launcher ended the second
        ([(1, 10), (-9, 13)], 1),  # and killed it, as it did not end
    ],
)
def test_of_several_ranks_the_one_that_began_it_gives_the_exit_code(
    ranks: list[tuple[int, int]], code: int
) -> None:
    failures = [SimpleNamespace(exitcode=exitcode, timestamp=at) for exitcode, at in ranks]
    assert exit_code(failures) == code
