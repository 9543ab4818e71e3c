"""How fast groups go through the buffer process: submit, journal, assign, fetch.

    python benchmarks/bench_buffer.py [--quick]

For each size of response and number of producers: a buffer with the journal on, one with it off
(`buffer.durability: none`), bare writes of the same bytes (SQLite rows and segment files, as many
transactions), and a bare ZeroMQ echo of the same bytes over as many connections. The four take
turns, a second each, so that noise hits all alike. Writes benchmarks/results/bench_buffer.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bare_paths import BareWrites, Echo, num_transactions
from buffer_load import Load
from encoded_groups import Frames, write_data
from launched_run import save_result
from rich.console import Console
from rich.table import Table

from asyncrl.config import Config
from asyncrl.config.load import save_resolved
from asyncrl.types import WeightId

GROUP_SIZE = 8
MAX_STALENESS = 4
SLOTS = 64
"""Groups in flight, shared out among the producers."""
GROUPS_PER_STEP = {1024: 64, 8192: 32, 32768: 16}
"""By tokens of a rollout."""
PRODUCERS = (1, 8, 64)


class BufferProcess:
    """`python -P -m buffer` on a run directory of its own, and the load on it."""

    def __init__(self, run_dir: Path, *, num_tokens: int, producers: int, durability: str) -> None:
        run_dir.mkdir()
        self.run_dir = run_dir
        self._groups_per_step = GROUPS_PER_STEP[num_tokens]
        config = _config(run_dir, num_tokens, durability)
        save_resolved(config, run_dir / "config.yaml")
        with (run_dir / "log").open("w") as log:
            command = [sys.executable, "-P", "-m", "buffer", str(run_dir / "config.yaml")]
            root = str(Path(__file__).parent.parent)
            environment = {**os.environ, "PYTHONPATH": root}
            self._process = subprocess.Popen(command, stderr=log, env=environment)
        frames = Frames(num_tokens=num_tokens, group_size=GROUP_SIZE)
        self.load = Load(self._address(), config, producers=producers, slots=SLOTS, frames=frames)
        self._cpu = psutil.Process(self._process.pid)
        self._me = psutil.Process()

    def run(self, seconds: float) -> dict[str, float]:
        """One window: groups a second, and cores used by the buffer and by the load."""
        before = _cpu_s(self._cpu), _cpu_s(self._me), time.perf_counter()
        steps, num_bytes, took = self.load.run(warm_steps=MAX_STALENESS + 1, seconds=seconds)
        wall = time.perf_counter() - before[2]
        return {
            "groups_per_s": steps * self._groups_per_step / took,
            "mb_per_s": num_bytes / 1e6 / took,
            "buffer_cores": (_cpu_s(self._cpu) - before[0]) / wall,
            "load_cores": (_cpu_s(self._me) - before[1]) / wall,
        }

    def num_groups(self) -> int:
        return self.load.consumer.version * self._groups_per_step

    def close(self) -> None:
        self.load.close()
        self._process.kill()
        self._process.wait()

    def _address(self) -> str:
        path, ends = self.run_dir / "buffer_address", time.monotonic() + 30
        while not path.exists():
            if self._process.poll() is not None or time.monotonic() > ends:
                raise SystemExit((self.run_dir / "log").read_text())
            time.sleep(0.02)
        return path.read_text()


@dataclass
class Cell:
    """All windows for one size of response and number of producers."""

    num_tokens: int
    producers: int
    windows: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, name: str, values: dict[str, float]) -> None:
        self.windows.setdefault(name, []).append(values)

    def spread(self, name: str, key: str) -> tuple[float, float, float]:
        """Minimum, median and maximum over the rounds."""
        values = [window[key] for window in self.windows[name]]
        return min(values), statistics.median(values), max(values)

    def ratio(self, name: str, reference: str) -> float:
        """Median over the rounds of the two windows' quotient in bytes a second."""
        pairs = zip(self.windows[name], self.windows[reference], strict=True)
        return statistics.median(a["mb_per_s"] / b["mb_per_s"] for a, b in pairs)

    def result(self) -> dict[str, Any]:
        return {
            "tokens": self.num_tokens,
            "producers": self.producers,
            "on_to_bare_writes": self.ratio("on", "writes"),
            "off_to_echo": self.ratio("off", "echo"),
            "windows": self.windows,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 producers, one short round")
    parser.add_argument("--tokens", type=int, nargs="+", default=[*GROUPS_PER_STEP])
    parser.add_argument("--producers", type=int, nargs="+", default=None)
    parser.add_argument("--rounds", type=int, default=None)
    arguments = parser.parse_args()
    producers = arguments.producers or ((8,) if arguments.quick else PRODUCERS)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    cells = []
    for num_tokens in arguments.tokens:
        for number in producers:
            cells.append(measure(num_tokens, number, rounds=rounds, seconds=1.0))
            Console(stderr=True).print(f"{num_tokens} tokens, {number} producers: done")
    Console(width=170).print(table(cells))
    save_result("bench_buffer", {"cells": [cell.result() for cell in cells]})


def measure(num_tokens: int, producers: int, *, rounds: int, seconds: float) -> Cell:
    cell = Cell(num_tokens, producers)
    payloads = _payloads(num_tokens)
    size = len(payloads[0])
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        place = Path(directory)

        def start(name: str, durability: str) -> BufferProcess:
            process = BufferProcess(
                place / name, num_tokens=num_tokens, producers=producers, durability=durability
            )
            stack.callback(process.close)
            return process

        on, off = start("on", "process"), start("off", "none")
        echo = Echo(producers=producers, payloads=payloads)
        stack.callback(echo.close)
        writes = BareWrites(place / "writes", payloads=payloads)
        stack.callback(writes.close)
        for _ in range(rounds):
            before = num_transactions(on.run_dir), on.num_groups()
            cell.add("on", on.run(seconds))
            number = num_transactions(on.run_dir) - before[0]
            together = (on.num_groups() - before[1]) / max(1, number)
            count, took = writes.run(seconds=seconds, groups_per_transaction=together)
            cell.add("writes", _rates(count, took, size) | {"groups_per_commit": together})
            cell.add("off", off.run(seconds))
            cell.add("echo", _rates(*echo.run(seconds=seconds), size))
    return cell


def table(cells: list[Cell]) -> Table:
    shown = Table(title="Groups of 8 rollouts through the buffer: median (minimum - maximum)")
    names = ["tokens", "producers", "on: rollouts/s", "off: rollouts/s", "on MB/s", "off MB/s"]
    names += ["writes MB/s", "echo MB/s", "on/writes", "off/echo", "cores: buffer", "load"]
    for name in names:
        shown.add_column(name, justify="right")
    for cell in cells:
        rates = [_spread(cell.spread(name, "groups_per_s")) for name in ("on", "off")]
        kinds = ("on", "off", "writes", "echo")
        speeds = [f"{cell.spread(kind, 'mb_per_s')[1]:,.0f}" for kind in kinds]
        ratios = [f"{cell.ratio(*pair):.2f}" for pair in (("on", "writes"), ("off", "echo"))]
        cores = [f"{cell.spread('on', key)[1]:.2f}" for key in ("buffer_cores", "load_cores")]
        shown.add_row(f"{cell.num_tokens}", f"{cell.producers}", *rates, *speeds, *ratios, *cores)
    return shown


def _spread(groups_per_s: tuple[float, float, float]) -> str:
    least, middle, most = (GROUP_SIZE * rate for rate in groups_per_s)
    return f"{middle:,.0f} ({least:,.0f} - {most:,.0f})"


def _config(run_dir: Path, num_tokens: int, durability: str) -> Config:
    data = run_dir / "train.jsonl"
    write_data(data, num_rows=1000)
    tree = {
        "max_staleness": MAX_STALENESS,
        "prompts_per_step": GROUPS_PER_STEP[num_tokens],
        "group_size": GROUP_SIZE,
        "max_epochs": 100_000,
        "model": {"path": "none"},
        "data": {
            "train_files": [str(data)],
            "shuffle": False,
            "max_response_length": num_tokens,
        },
        "reward": {"path": "none:none"},
        "generator": {"engine": "scripted"},
        "learner": {"max_tokens_per_microbatch": num_tokens + 1024},
        "buffer": {"durability": durability},
        "network": {"heartbeat_s": 60, "buffer": "tcp://127.0.0.1:0"},
    }
    return Config.model_validate(tree)


def _payloads(num_tokens: int) -> list[bytes]:
    """One for each group in flight, so that no cache holds what is to be copied."""
    frames = Frames(num_tokens=num_tokens, group_size=GROUP_SIZE)
    return [frames.of([0, position], 0, WeightId(1, 1)) for position in range(SLOTS)]


def _rates(count: int, took: float, size: int) -> dict[str, float]:
    return {"groups_per_s": count / took, "mb_per_s": count * size / 1e6 / took}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
