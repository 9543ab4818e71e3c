"""Running `asyncrl-launch local` from a benchmark and reading what it measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run: a record for each step, the buffer's and the learner's in one."""

    directory: Path
    steps: list[dict[str, Any]]

    def median(self, name: str, *, skip: int = 2) -> float:
        """Median over steps, without the first `skip` (engines warm up there)."""
        return statistics.median(record[name] for record in self.steps[skip:])

    def mean(self, name: str) -> float:
        return statistics.fmean(record[name] for record in self.steps)

    def highest(self, name: str) -> float:
        return max(record[name] for record in self.steps)


def launch(config: Path, overrides: Iterable[str], *, directory: Path, name: str) -> Run:
    """Runs it in DIRECTORY/NAME and waits. Raises SystemExit when the run fails."""
    command = [sys.executable, "-m", "asyncrl.launch", "local", str(config), *overrides]
    command += [f"output_dir={directory}", f"run_name={name}", "network.buffer=tcp://127.0.0.1:0"]
    print(f"{name}: {' '.join(overrides)}", file=sys.stderr, flush=True)
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code:
        raise SystemExit(f"{name} ended with exit code {code}")
    return read_run(directory / name)


def read_run(directory: Path) -> Run:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    buffer = {record["step"]: record for record in records if "buffer/num_arrived" in record}
    steps = [record for record in records if "time/step_s" in record]
    return Run(directory, [{**buffer[record["step"]], **record} for record in steps])


def save_result(name: str, result: dict[str, Any]) -> Path:
    """Writes benchmarks/results/NAME.json with machine, commit and date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    header = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}",
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**header, **result}, indent=2) + "\n")
    return path
