"""The supervisor of `asyncrl-launch local`, with programs of a few lines for the real ones."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.journal import Journal
from asyncrl.journal.tables import Change
from asyncrl.launch.children import Children, Program
from asyncrl.launch.progress import Progress
from asyncrl.launch.signals import Signals
from asyncrl.launch.supervise import Supervisor
from asyncrl.messages import End
from asyncrl.run_dir import RunDir

PREAMBLE = """
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["RUN"])
def wait_until(look):
    while not look():
        time.sleep(0.01)
def is_known(name):
    return (run / name).exists()
def has_been_seen(name):  # it has ended, and the launcher has taken notice
    return is_known(name) and not pathlib.Path("/proc", (run / name).read_text()).exists()
def say_who(name):
    (run / ".me").write_text(str(os.getpid()))
    (run / ".me").rename(run / name)
"""
LISTEN = 'say_who("buffer"); (run / "buffer_address").write_text("tcp://127.0.0.1:9")\n'


@dataclass(frozen=True, slots=True)
class Supervised:
    """How a supervised run ended, and what was said."""

    code: int
    errors: str


def supervise(directory: Path, *, buffer: str, learner: str, generator: str = "") -> Supervised:
    """A run of three programs, given as what they do."""
    run_dir = RunDir(directory)
    run_dir.logs.mkdir()
    errors = io.StringIO()

    def program(name: str, does: str) -> Program:
        command = (sys.executable, "-c", PREAMBLE + does)
        return Program(name, name, command, {"RUN": str(directory)})

    with Signals() as signals, Children(run_dir.logs) as children:
        supervisor = Supervisor(
            run_dir,
            children,
            buffer=program("buffer", LISTEN + buffer),
            others=lambda address: [program("learner", learner), program("generator", generator)],
            max_restarts=3,
            progress=Progress(Console(file=io.StringIO()), run_dir, max_steps=None),
            errors=Console(file=errors, width=500),
        )
        return Supervised(supervisor.run(signals), errors.getvalue())


def test_a_buffer_killed_after_the_learner_has_ended_well_does_not_spoil_the_run(
    tmp_path: Path,
) -> None:
    done = supervise(
        tmp_path,
        buffer='wait_until(lambda: has_been_seen("learner")); os.kill(os.getpid(), signal.SIGKILL)',
        learner='say_who("learner")',
    )
    assert done.code == 0
    assert "buffer was ended by SIGKILL, but is not needed now" in done.errors


def test_a_learner_ended_by_an_interrupt_that_was_not_ours_is_started_again(tmp_path: Path) -> None:
    done = supervise(
        tmp_path,
        buffer='wait_until(lambda: has_been_seen("second"))',
        learner='is_again = is_known("first"); say_who("second" if is_again else "first")\n'
        "sys.exit(0 if is_again else 130)",
    )
    assert done.code == 0
    assert "learner was ended by SIGINT: started again (restart 1 of 3)" in done.errors


def test_programs_that_are_killed_in_one_moment_are_all_started_again(tmp_path: Path) -> None:
    both = 'wait_until(lambda: is_known("other")); other = int((run / "other").read_text())\n'
    kill = "os.kill(other, signal.SIGKILL); os.kill(os.getpid(), signal.SIGKILL)"
    done = supervise(
        tmp_path,
        buffer=f'if is_known("second"): sys.exit(0)\n{both}say_who("second"); {kill}',
        learner='if is_known("second"): sys.exit(0)\nsay_who("other"); time.sleep(60)',
    )
    assert done.code == 0
    assert "buffer was ended by SIGKILL: started again" in done.errors
    assert "learner was ended by SIGKILL: started again" in done.errors


def test_when_the_restarts_are_used_up_the_run_ends(tmp_path: Path) -> None:
    done = supervise(
        tmp_path, buffer="time.sleep(60)", learner="os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert done.code == 1
    assert done.errors.count("started again") == 3
    assert "learner was ended by SIGKILL; local.max_restarts is used up" in done.errors


def test_an_interrupt_after_the_run_has_ended_changes_nothing(tmp_path: Path) -> None:
    done = supervise(
        tmp_path,
        buffer="",
        learner='wait_until(lambda: has_been_seen("buffer")); os.kill(os.getppid(), signal.SIGINT)',
    )
    assert done.code == 0
    assert "Ctrl-C again stops now" in done.errors


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path) -> None:
    done = supervise(
        tmp_path,
        buffer="time.sleep(60)",
        learner="while True: os.kill(os.getppid(), signal.SIGINT); time.sleep(0.1)",
        generator="time.sleep(60)",
    )
    assert done.code == 130
    assert "Ctrl-C again stops now" in done.errors
    assert "stopped by SIGINT" in done.errors


@pytest.mark.parametrize("first", ["buffer", "learner"])
def test_a_run_that_fails_says_why_and_not_what_a_program_said_last(
    tmp_path: Path, first: str
) -> None:
    journal = Journal(tmp_path)
    end = End(reason="8 groups in a row gave nothing", failed=True, records=[])
    journal.write(Change(meta={"end": end.model_dump_json()})).result()
    journal.close()
    fail = 'print("much else"); sys.exit(1)'
    programs = {
        name: f'say_who("{name}"); wait_until(lambda: is_known("buffer") and is_known("learner"))\n'
        + (fail if name == first else f'wait_until(lambda: has_been_seen("{first}")); {fail}')
        for name in ("buffer", "learner")
    }
    done = supervise(tmp_path, **programs)
    assert done.code == 1
    assert f"the run failed: 8 groups in a row gave nothing (logs: {tmp_path}/logs)" in done.errors
    assert "much else" not in done.errors


def test_the_first_failure_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    done = supervise(
        tmp_path,
        buffer="time.sleep(60)",
        learner='print("ValueError: no such head size"); sys.exit(1)',
        generator="time.sleep(60)",
    )
    assert done.code == 1
    assert f"learner ended with exit code 1. What it said last ({tmp_path}/logs/" in done.errors
    assert "    ValueError: no such head size" in done.errors
