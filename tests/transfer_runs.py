"""Runs whose weights go by broadcast, slowly, with generators that break the broadcasts."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from chaos_runs import read_rows
from local_runs import REPOSITORY, write_scripted_config
from role_runs import Program, Shells

from asyncrl.run_dir import RunDir

STALL_S = 2.0
BUCKET_BYTES = 65536
"""A version of the tiny model is some fifty of them."""


def write_transfer_config(directory: Path, task: Path, **changes: Any) -> Path:
    """Transfers of about a second. Steps are shorter, and hardly ever wait for fresh groups."""
    weights = {
        "transport": "collective",
        "bucket_bytes": BUCKET_BYTES,
        "max_bytes_per_s": 4_000_000,
        "stall_timeout_s": STALL_S,
        "timeout_s": 8.0,
        **changes.pop("weights", {}),
    }
    defaults: dict[str, Any] = {
        "max_staleness": 16,
        "max_steps": 60,
        "max_epochs": 50,
        "weights": weights,
        "generator": {
            "engine": "scripted",
            "max_concurrent_rollouts": 8,
            "scripted": {"mode": "fixed", "tokens_per_s": 8},
        },
        "checkpoint": {"every": 0, "export_hf": False},
        "network": {"heartbeat_s": 0.5, "wait_for_buffer_s": 60},
    }
    return write_scripted_config(directory / "config.yaml", task, **{**defaults, **changes})


def start_faulty(run: Shells, fault: str, *, name: str) -> Program:
    """tests/faulty_generator.py, once the buffer is there. `fault`: FAULT@VERSION."""
    config = RunDir(run.run_dir).config_of("buffer")
    run.wait_for(config.exists, "the buffer's configuration")
    log = run.directory / f"shell-{len(run.programs)}-{name}.log"
    arguments = ("--connect", run.address, "--name", name)
    script = str(REPOSITORY / "tests" / "faulty_generator.py")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", script, fault, str(config), *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    program = Program(name, process, log)
    run.programs.append(program)
    return program


def applied(run: Shells, name: str) -> list[tuple[int, int]]:
    """(incarnation, version) that this generator served, in the order in which it said so."""
    query = "SELECT inc, version, member FROM served ORDER BY at"
    rows = read_rows(run.run_dir, query)
    return [(row["inc"], row["version"]) for row in rows if row["member"].startswith(f"{name}-")]


def newest_applied(run: Shells, name: str) -> int:
    """Version; 0 before the first."""
    return max((version for _, version in applied(run, name)), default=0)


def versions_of_tokens(run: Shells, name: str) -> list[int]:
    """Every version that tokens in groups of this generator have."""
    rows = read_rows(run.run_dir, "SELECT member, token_versions FROM groups")
    return sorted(
        int(version)
        for row in rows
        if row["member"].startswith(f"{name}-")
        for version in json.loads(row["token_versions"])
    )


def check_increasing(versions: list[tuple[int, int]]) -> None:
    assert all(a < b for a, b in pairwise(versions)), versions


def working_s(record: dict[str, Any]) -> float:
    """What a step of the learner took, apart from its wait for a batch."""
    waited: float = record["time/wait_batch_s"]
    return float(record["time/step_s"]) - waited


def median_working_s(records: list[dict[str, Any]]) -> float:
    return statistics.median(map(working_s, records))


def least_open(program: Program, *, seconds: float = 3.0) -> dict[str, int]:
    """Threads, files and listening ports of a program: of each the fewest that there were within so
    long, as a broadcast under way has some of its own."""
    process = psutil.Process(program.pid)
    least: dict[str, int] = {}
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        connections = process.net_connections("tcp")
        now = {
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "ports": sum(c.status == psutil.CONN_LISTEN for c in connections),
        }
        least = {name: min(count, least.get(name, count)) for name, count in now.items()}
        time.sleep(0.02)
    return least


def drain(run: Shells, buffer: Program, *others: Program) -> None:
    """Stops the run, as SIGINT to its buffer does; everybody else ends with 0."""
    buffer.send(signal.SIGINT)
    assert run.codes(buffer, *others) == [130, *[0] * len(others)], run.logs()


def is_stopped(program: Program) -> bool:
    """By SIGSTOP."""
    return psutil.Process(program.pid).status() == psutil.STATUS_STOPPED
