"""Running `asyncrl-launch local` in tests: real processes and sockets, in a directory of theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from asyncrl.config.load import load_resolved
from asyncrl.run_dir import RunDir

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Finished:
    """A launcher that ended, and what its run left behind."""

    code: int
    output: str
    errors: str
    run_dir: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "time/step_s" in record]

    @property
    def evals(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "eval/accuracy" in record]

    def logs(self) -> str:
        """All logs, for the message of a failed assertion."""
        logs = sorted((self.run_dir / "logs").glob("*.log"))
        tails = [f"== {log.name}\n" + log.read_text()[-3000:] for log in logs]
        return "\n".join([f"exit code {self.code}", self.output[-3000:], self.errors, *tails])


@dataclass(frozen=True, slots=True)
class Launched:
    """A launcher in the background."""

    process: subprocess.Popen[str]
    run_dir: Path

    @property
    def weights(self) -> Path:
        """Where the run publishes its weights. Once its configuration is written."""
        run_dir = RunDir(self.run_dir)
        return run_dir.weights(load_resolved(run_dir.config))

    @property
    def steps_done(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(ln)["step"] + 1 for ln in lines if "time/step_s" in ln), default=0)

    def wait_for_steps(self, count: int) -> None:
        """Returns once so many steps are trained. TimeoutError when that takes too long."""
        deadline = time.monotonic() + 90
        while self.steps_done < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no step {count}\n{self.finish(1).logs()}")
            time.sleep(0.05)

    def children(self, module: str = "") -> list[psutil.Process]:
        """All its descendants, or those that `python -m MODULE` started."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        if not module:
            return found
        found = [p for p in found if ["-m", module] == _command_line(p)[2:4]]
        # a child has the command line of its parent until it begins a program of its own
        return [p for p in found if _parent(p) not in {other.pid for other in found}]

    def wait_for_another(self, module: str, *, than: Sequence[psutil.Process]) -> None:
        """Returns once a process of `python -m MODULE` runs that is none of these. TimeoutError
        when that takes too long."""
        deadline = time.monotonic() + 30
        while not {*self.children(module)} - {*than}:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError(f"no other {module}\n{self.finish(1).logs()}")
            time.sleep(0.05)

    def finish(self, timeout_s: float = 60) -> Finished:
        """Waits for its end; one that has not ended in time is killed."""
        try:
            output, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, errors = self.process.communicate()
        return Finished(self.process.returncode, output, errors, self.run_dir)


def command(config: Path, overrides: Sequence[str], directory: Path, name: str) -> list[str]:
    """The launcher's command line for a run called DIRECTORY/NAME."""
    places = [f"output_dir={directory}", f"run_name={name}", "network.buffer=tcp://127.0.0.1:0"]
    launcher = [sys.executable, "-m", "asyncrl.launch", "local"]
    return [*launcher, str(config), *places, *overrides]


@contextmanager
def launched(
    config: Path, *overrides: str, directory: Path, name: str = "run"
) -> Iterator[Launched]:
    """A launcher in the background; whatever is left of it is ended, its weights are removed."""
    process = subprocess.Popen(
        command(config, overrides, directory, name),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    run_dir = RunDir(directory / name)
    try:
        yield Launched(process, run_dir.path)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if run_dir.config.exists():
            shutil.rmtree(run_dir.weights(load_resolved(run_dir.config)), ignore_errors=True)


def run_local(
    config: Path, *overrides: str, directory: Path, name: str = "run", timeout_s: float = 120
) -> Finished:
    """Runs to the end. Raises subprocess.TimeoutExpired when that takes too long."""
    with launched(config, *overrides, directory=directory, name=name) as launcher:
        output, errors = launcher.process.communicate(timeout=timeout_s)
        return Finished(launcher.process.returncode, output, errors, launcher.run_dir)


def write_scripted_config(path: Path, task: Path, **changes: Any) -> Path:
    """A configuration for the scripted engine and 60 prompts, 4 a step: some seconds a run.

    `task` has model/ and train.jsonl (the fixture random_tiny_task).
    """
    tree = {
        "prompts_per_step": 4,
        "group_size": 2,
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "train_files": [str(task / "train.jsonl")],
            "max_prompt_length": 64,
            "max_response_length": 8,
        },
        "reward": {"path": "tests/rewards_by_text.py:checksum", "workers": 1},
        "generator": {"engine": "scripted", "scripted": {"mode": "fixed", "tokens_per_s": 20}},
        "buffer": {"zero_variance": "train"},
        "learner": {"gradient_checkpointing": False, "optim": {"lr": 1e-3}},
        "checkpoint": {"every": 2, "export_hf": False},
        "network": {"heartbeat_s": 1.0},
        **changes,
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def still_running(processes: Sequence[psutil.Process], *, timeout_s: float) -> list[str]:
    """Command lines of those that have not ended in time; one that nobody has reaped has ended."""
    _, there = psutil.wait_procs(processes, timeout=timeout_s)
    return [" ".join(line) for process in there if (line := _command_line(process))]


def _parent(process: psutil.Process) -> int:
    """0 for one that has ended."""
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, reaped or not."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
