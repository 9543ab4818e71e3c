"""Starting buffer, learner and generators by their own commands, as people do in several shells."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_runs import REPOSITORY

from asyncrl.config.load import load_resolved
from asyncrl.journal import fates
from asyncrl.run_dir import RunDir

STEP_S = 120.0
"""The longest that a test waits for the next thing to happen."""


@dataclass(slots=True)
class Program:
    """One started command and what it printed."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = STEP_S) -> int:
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, and the end of it."""
        self.process.kill()
        self.process.wait(10)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@dataclass(slots=True)
class Shells:
    """Programs of one run, each with a file for what it prints."""

    config: Path
    directory: Path
    name: str = "run"
    port: int = field(default_factory=lambda: free_port())
    programs: list[Program] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.directory / self.name

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self, role: str, *arguments: str, settings: tuple[str, ...] = ()) -> Program:
        """`asyncrl-launch ROLE CONFIG settings... arguments...` in a shell of its own."""
        places = [f"output_dir={self.directory}", f"network.buffer={self.address}"]
        launcher = [sys.executable, "-P", "-m", "asyncrl.launch", role, str(self.config)]
        log = self.directory / f"shell-{len(self.programs)}-{role}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*launcher, *places, *settings, *arguments],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        program = Program(role, process, log)
        self.programs.append(program)
        return program

    def buffer(self, *settings: str) -> Program:
        """Starts the run, or goes on with it."""
        names = (f"run_name={self.name}", "checkpoint.resume=auto")
        return self.start("buffer", settings=(*names, *settings))

    def end(self) -> None:
        """Ends what is left, and only what was started here."""
        for program in self.programs:
            try:
                os.killpg(program.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            program.process.wait()

    def steps(self) -> list[dict[str, Any]]:
        """Trained steps in metrics.jsonl, replayed ones as often as they were trained."""
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line) for line in lines if "time/step_s" in line]

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda: any(record["step"] >= step for record in self.steps()), f"step {step}"
        )

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """TimeoutError, with all that was printed, when it does not come true."""
        deadline = time.monotonic() + STEP_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {STEP_S:g} s\n{self.logs()}")
            time.sleep(0.05)

    def codes(self, *programs: Program) -> list[int]:
        """Exit codes, once all have ended. TimeoutError, with all that was printed, otherwise."""
        self.wait_for(lambda: all(p.process.poll() is not None for p in programs), "the end")
        return [program.wait() for program in programs]

    def logs(self) -> str:
        tails = [
            f"== {p.log.name} (exit {p.process.poll()})\n{p.output[-3000:]}" for p in self.programs
        ]
        return "\n".join(tails)

    def fates(self) -> dict[str, int]:
        return fates(self.run_dir)


@contextmanager
def shells(config: Path, directory: Path, *, name: str = "run") -> Iterator[Shells]:
    """Nothing that was started outlives the `with`."""
    opened = Shells(config, directory, name)
    try:
        yield opened
    finally:
        opened.end()
        for config_file in directory.glob("*/config.yaml"):  # a killed learner leaves its weights
            weights = RunDir(config_file.parent).weights(load_resolved(config_file))
            shutil.rmtree(weights, ignore_errors=True)


def outlive_everything(run: Shells) -> None:
    """A second generator joins at step 3, the first is killed at 5, the learner at 7, the buffer
    at 9; both come back. Exit code 0, and the second generator never loads its engine again."""
    buffer, learner = run.buffer(), run.start("learner")
    first = run.start("generator", "--name", "generator-0")
    run.wait_for_step(3)
    second = run.start("generator", "--name", "generator-1")
    run.wait_for_step(5)
    first.kill()
    run.wait_for_step(7)
    learner.kill()
    learner = run.start("learner")
    run.wait_for_step(9)
    buffer.kill()
    buffer = run.buffer()
    assert run.codes(buffer, learner, second) == [0, 0, 0], run.logs()
    assert second.output.count("the engine is ready") == 1
    assert max(record["staleness/max"] for record in run.steps()) <= 2


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
