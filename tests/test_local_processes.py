"""The launcher and its processes: signals, deaths, several ranks and generators, going on later."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from local_runs import REPOSITORY, command, run_local

from asyncrl.config.load import load_resolved
from asyncrl.run_dir import RunDir

pytestmark = pytest.mark.e2e


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    """Scripted generators that need a while for an epoch of 60 prompts."""
    tree = {
        "prompts_per_step": 4,
        "group_size": 2,
        "model": {"path": str(random_tiny_task / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(random_tiny_task / "train.jsonl")],
            "max_prompt_length": 8,
            "max_response_length": 8,
        },
        "reward": {"path": "tests/rewards_by_text.py:checksum", "workers": 1},
        "generator": {"engine": "scripted", "scripted": {"mode": "fixed", "tokens_per_s": 20}},
        "buffer": {"zero_variance": "train"},
        "learner": {"gradient_checkpointing": False, "optim": {"lr": 1e-3}},
        "checkpoint": {"every": 2, "export_hf": False},
        "network": {"heartbeat_s": 1.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def launched(config: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a launcher in the background; whatever is left of it is ended."""
    started: list[subprocess.Popen[str]] = []

    def launch(*overrides: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(config, overrides, tmp_path, "run"),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()
    run_dir = RunDir(tmp_path / "run")  # a launcher that was killed leaves its weights
    shutil.rmtree(run_dir.weights(load_resolved(run_dir.config)), ignore_errors=True)


def test_two_ranks_and_two_generators_train_together(config: Path, tmp_path: Path) -> None:
    finished = run_local(
        config, "local.learner_ranks=2", "local.generators=2", "max_steps=3", directory=tmp_path
    )
    assert finished.code == 0, finished.logs()
    assert len(finished.steps) == 3


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        signal.SIGKILL,
    ],
)
def test_no_process_outlives_the_launcher(
    launched: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    launcher = launched("local.generators=2")
    wait_for_step(tmp_path / "run", 1)
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) >= 4
    os.kill(launcher.pid, number)
    assert still_running(children, timeout_s=10) == []
    if number != signal.SIGKILL:
        assert launcher.wait(5) == 128 + number


@pytest.mark.parametrize(
    "role",
    [
        pytest.param("learner", marks=pytest.mark.slow),
        "generator-1",
        pytest.param("buffer", marks=pytest.mark.slow),
    ],
)
def test_the_first_failure_ends_the_run_and_is_shown(
    launched: Callable[..., subprocess.Popen[str]], tmp_path: Path, role: str
) -> None:
    launcher = launched("local.generators=2")
    wait_for_step(tmp_path / "run", 1)
    program = {"learner": "learner", "generator-1": "generators", "buffer": "buffer"}[role]
    children = psutil.Process(launcher.pid).children()
    victims = [child for child in children if program in child.cmdline()]
    victims[-1].kill()
    output, _ = launcher.communicate(timeout=75)
    assert launcher.returncode == 1
    assert f"{role} was killed by SIGKILL" in output
    assert still_running(children, timeout_s=2) == []


def test_a_killed_run_goes_on_where_it_was_and_trains_every_prompt_once(
    launched: Callable[..., subprocess.Popen[str]], config: Path, tmp_path: Path
) -> None:
    launcher = launched()
    wait_for_step(tmp_path / "run", 5)
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    psutil.wait_procs(children, timeout=10)
    finished = run_local(
        config,
        "checkpoint.resume=auto",
        "generator.scripted.tokens_per_s=500",
        directory=tmp_path,
    )
    assert finished.code == 0, finished.logs()
    assert [record["step"] for record in finished.steps if record["attempt"] == 2][-1] == 14
    assert "60 trained" in finished.output


def still_running(processes: list[psutil.Process], *, timeout_s: float) -> list[str]:
    """Command lines of those that have not ended in time; one that nobody has reaped has ended."""
    _, there = psutil.wait_procs(processes, timeout=timeout_s)
    alive = [p for p in there if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return [" ".join(process.cmdline()) for process in alive]


def wait_for_step(run_dir: Path, step: int) -> None:
    """Returns once `step` is in metrics.jsonl."""
    deadline = time.monotonic() + 60
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if any("time/step_s" in line and json.loads(line)["step"] >= step for line in lines):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no step {step} within 60 s; logs in {run_dir / 'logs'}")
