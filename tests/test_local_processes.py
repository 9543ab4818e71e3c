"""`asyncrl-launch local` and its processes: several of them, signals, going on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import launched, run_local, still_running, write_scripted_config

pytestmark = pytest.mark.e2e

FAST = "generator.scripted.tokens_per_s=500"


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    """Scripted generators that need a while for an epoch of 60 prompts."""
    return write_scripted_config(tmp_path / "config.yaml", random_tiny_task)


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_nothing_outlives_the_launcher_nothing_else_is_touched_and_the_run_can_go_on(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    unrelated = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    places = ("local.learner_ranks=2",)
    with launched(config, *places, directory=tmp_path) as launcher:
        launcher.wait_for_steps(5)
        children = launcher.children()
        assert len(launcher.children("learner")) == 2
        assert launcher.weights.is_dir()
        os.kill(launcher.process.pid, number)
        assert still_running(children, timeout_s=15) == []
        assert launcher.process.wait(15) == (-9 if number == signal.SIGKILL else 128 + number)
        assert not launcher.weights.exists()
    assert unrelated.poll() is None
    unrelated.communicate(b"\n")
    assert unrelated.returncode == 0
    finished = run_local(config, "checkpoint.resume=auto", FAST, directory=tmp_path)
    assert finished.code == 0, finished.logs()
    assert [record["step"] for record in finished.steps if record["attempt"] == 2][-1] == 14
    assert "60 trained" in finished.output


def test_one_interrupt_lets_the_step_end_and_says_how_to_go_on(
    config: Path, tmp_path: Path
) -> None:
    places = ("checkpoint.every=0",)
    with launched(config, *places, directory=tmp_path) as launcher:
        launcher.wait_for_steps(2)
        children = launcher.children()
        launcher.process.send_signal(signal.SIGINT)
        drained = launcher.finish(30)
    assert drained.code == 130, drained.logs()
    assert "the learner ends its step and writes a checkpoint" in drained.errors
    assert "run_name=run checkpoint.resume=auto" in drained.errors
    assert still_running(children, timeout_s=0) == []
    done = len(drained.steps)
    assert (drained.run_dir / "checkpoints" / f"version-{done:08d}").is_dir()


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(config: Path, tmp_path: Path) -> None:
    with launched(config, directory=tmp_path) as launcher:
        launcher.wait_for_steps(1)
        children = launcher.children()
        for learner in launcher.children("learner"):
            learner.suspend()  # it would never end its step
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.stderr is not None
        assert "Ctrl-C again stops now" in launcher.process.stderr.readline()
        launcher.process.send_signal(signal.SIGINT)
        assert still_running(children, timeout_s=15) == []
        assert launcher.finish(15).code == 130
