"""Running `asyncrl-launch local` in tests: real processes and sockets, in a directory of theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Finished:
    """A launcher that ended, and what its run left behind."""

    code: int
    output: str
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
        return "\n".join([self.output[-3000:], *tails])


def command(config: Path, overrides: Sequence[str], directory: Path, name: str) -> list[str]:
    """The launcher's command line for a run called DIRECTORY/NAME."""
    places = [f"output_dir={directory}", f"run_name={name}", "network.buffer=tcp://127.0.0.1:0"]
    launcher = [sys.executable, "-m", "asyncrl.launch", "local"]
    return [*launcher, str(config), *places, *overrides]


def run_local(
    config: Path, *overrides: str, directory: Path, name: str = "run", timeout_s: float = 120
) -> Finished:
    """Runs to the end. Raises subprocess.TimeoutExpired when that takes too long."""
    process = subprocess.Popen(
        command(config, overrides, directory, name),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.terminate()
    return Finished(process.returncode, output, directory / name)
