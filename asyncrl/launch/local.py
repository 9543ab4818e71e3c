"""`asyncrl-launch local`: one buffer, one learner and some generators on this machine."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from asyncrl.config import Config
from asyncrl.config.load import save_resolved
from asyncrl.launch.children import Children, learner_command, role_command
from asyncrl.launch.placement import (
    SHARED_GPU_UTILIZATION,
    Placement,
    count_cores,
    place,
    visible_gpus,
)
from asyncrl.launch.progress import Progress, print_summary
from asyncrl.messages import Hello, StatusRequest
from asyncrl.run_dir import RunDir, open_run_dir
from asyncrl.transport import RefusedError, ThreadClient, Unreachable

_LEAVE_S = 30.0
"""How long generators may take to end after buffer and learner have."""
_SAVE_S = 60.0
"""How long the learner may take to write its last checkpoint after the buffer has failed."""


@dataclass(slots=True)
class _Stopped(Exception):
    """A signal asked the launcher to stop."""

    number: int


def run_local(config: Config, *, config_name: str, console: Console) -> int:
    """Starts everything, shows progress, and returns the exit code.

    The first child that fails ends the run: its last log lines are shown and its code is returned.
    Raises ValueError for what the user can mend before anything was started.
    """
    placement = place(config, gpus=visible_gpus(), num_cores=count_cores())
    if placement.shares_gpu:
        config = _with_room_for_learner(config)
    with open_run_dir(config, config_name=config_name) as run_dir:
        save_resolved(config, run_dir.config)
        console.print(f"run directory {run_dir.path}", highlight=False, soft_wrap=True)
        console.print(placement.describe(), highlight=False)
        try:
            with _signals(), Children(run_dir.logs) as children:
                return _supervise(config, run_dir, placement, children, console)
        except _Stopped as stopped:
            console.print(f"stopped by {signal.Signals(stopped.number).name}")
            return 128 + stopped.number
        finally:
            shutil.rmtree(run_dir.weights(config), ignore_errors=True)


def _supervise(
    config: Config, run_dir: RunDir, placement: Placement, children: Children, console: Console
) -> int:
    address = _start_buffer(run_dir, children)
    if address is None:
        return _report_failure(children, console)
    _start_others(run_dir, placement, children, address)
    monitor = _Monitor(address, run_id=run_dir.read_run_id())
    try:
        with Progress(console, run_dir, max_steps=config.max_steps) as progress:
            status = _watch(children, monitor, progress)
    finally:
        monitor.close()
    if children.first_failure() is not None:
        return _report_failure(children, console)
    print_summary(console, run_dir, status)
    return 0


def _watch(children: Children, monitor: _Monitor, progress: Progress) -> dict[str, Any] | None:
    """Shows progress until all have ended, or nothing is worth waiting for any more.

    Returns the last status that the buffer gave.
    """
    status: dict[str, Any] | None = None
    deadline = math.inf
    while any(child.exit_code is None for child in children.all):
        deadline = min(deadline, time.monotonic() + _patience_s(children))
        if time.monotonic() >= deadline:
            break
        status = monitor.status() or status
        progress.update(status, phase=_phase(status))
        time.sleep(0.5)
    progress.update(status, phase="")
    return status


def _patience_s(children: Children) -> float:
    """How long to wait for those that still run, seen from now."""
    buffer, learner, *_ = children.all
    failed = children.first_failure()
    if failed is buffer and buffer.exit_code == 1 and learner.exit_code is None:
        return _SAVE_S
    if failed is not None:
        return 0.0
    has_ended = buffer.exit_code is not None and learner.exit_code is not None
    return _LEAVE_S if has_ended else math.inf


def _with_room_for_learner(config: Config) -> Config:
    """vLLM takes less of a GPU that it shares, whatever the configuration says."""
    generator = config.generator
    share = min(generator.vllm.gpu_memory_utilization, SHARED_GPU_UTILIZATION)
    vllm = generator.vllm.model_copy(update={"gpu_memory_utilization": share})
    return config.model_copy(update={"generator": generator.model_copy(update={"vllm": vllm})})


def _start_buffer(run_dir: RunDir, children: Children) -> str | None:
    """Returns the buffer's address, or None when it ended before it listened.

    It reads all data first: as long as it lives it is waited for.
    """
    child = children.start("buffer", role_command("buffer", str(run_dir.config)), env={})
    while child.exit_code is None:
        if run_dir.buffer_address.exists():
            return run_dir.buffer_address.read_text()
        time.sleep(0.05)
    return None


def _start_others(run_dir: RunDir, placement: Placement, children: Children, address: str) -> None:
    common = [str(run_dir.config), "--connect", address]
    children.start(
        "learner",
        learner_command(placement.learner_ranks, *common),
        env=placement.learner_environment(),
    )
    for i in range(placement.num_generators):
        name = f"generator-{i}"
        command = role_command("generators", *common, "--name", name)
        children.start(name, command, env=placement.generator_environment(i))


def _report_failure(children: Children, console: Console) -> int:
    """Shows the first failure with the end of its log; returns its exit code."""
    failed = children.first_failure()
    if failed is None:
        console.print("[red]the buffer ended before it listened[/red]")
        return 1
    code = failed.exit_code or 1
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    console.print(f"[red]{failed.name} {how}[/red]; the end of {failed.log}:", soft_wrap=True)
    console.print(failed.last_lines(), highlight=False, markup=False, soft_wrap=True)
    return code if code in (1, 2) else 1


def _phase(status: dict[str, Any] | None) -> str:
    if status is None:
        return "starting the buffer"
    members = status.get("members") or []
    roles = [member.get("role") for member in members]
    missing = [role for role in ("learner", "generator") if role not in roles]
    return f"starting: {' and '.join(missing)} load the model" if missing else "running"


class _Monitor:
    """Asks the buffer for its status, and does not mind when it does not answer."""

    def __init__(self, address: str, *, run_id: str | None) -> None:
        hello = Hello.here("monitor", name="launcher", run_id=run_id)
        self._client = ThreadClient(address, hello=hello)

    def status(self) -> dict[str, Any] | None:
        try:
            return self._client.call(StatusRequest(), deadline_s=2.0).message.values
        except (Unreachable, RefusedError):
            return None

    def close(self) -> None:
        self._client.close()


@contextmanager
def _signals() -> Iterator[None]:
    """Turns SIGINT and SIGTERM into _Stopped, so that children are ended on the way out."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Stopped(number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
