"""Child processes of the launcher: started in groups of their own, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from asyncrl.end_now import remove_openmp_mark
from asyncrl.parent import end_with_parent

GROUP_S = 4.0
"""Time that a resource tracker has to end after its group; then SIGKILL."""
_STOP_S = 6.0
"""Time to end after SIGTERM; then SIGKILL."""


@dataclass(frozen=True, slots=True)
class Program:
    """What is started, and started again: a role of the run."""

    name: str
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(slots=True)
class Child:
    """One life of a program: the leader of its own process group."""

    program: Program
    process: subprocess.Popen[bytes]
    log: Path
    log_begin: int
    """Where this life begins in the log, bytes."""
    started_at: float
    exit_code: int | None = None
    ended_at: float | None = None
    """When its end was first seen; resource trackers of its group may still end by themselves."""
    is_seen: bool = False
    """Its end has been told by Children.newly_ended."""

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        """What this life has written."""
        with self.log.open("rb") as file:
            file.seek(self.log_begin)
            return file.read().decode(errors="replace")

    def has_ended(self) -> bool:
        """Whether it has; then whatever was left of its group has ended, too.

        The others of the group are killed at once, but for Python's resource trackers: those remove
        what the killed have left in /dev/shm, and end by themselves. The leader is reaped last:
        until then its number cannot name processes of somebody else.
        """
        if self.exit_code is not None:
            return True
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        if self.ended_at is None:
            self.ended_at = time.monotonic()
            _kill([other for other in _others(self.pid) if not _is_tracker(other)])
        if time.monotonic() - self.ended_at < GROUP_S and _others(self.pid):
            return False
        os.killpg(self.pid, signal.SIGKILL)
        self.exit_code = self.process.wait()
        remove_openmp_mark(self.pid)
        return True

    def signal_group(self, number: signal.Signals) -> None:
        if not self.has_ended():
            os.killpg(self.pid, number)


@dataclass(slots=True)
class Children:
    """All children. Use as a context manager: nothing that it started is left behind."""

    logs: Path
    by_name: dict[str, Child] = field(default_factory=dict)
    """The present, or last, life of each program."""

    def start(self, program: Program) -> Child:
        """Starts a program, for the first time or again after its end."""
        log = self.logs / f"{program.name}.log"
        with log.open("ab") as output:
            begin = output.tell()
            process = subprocess.Popen(
                program.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **program.environment},
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM, parent=os.getpid()),
            )
        child = Child(program, process, log, begin, time.monotonic())
        self.by_name[program.name] = child
        return child

    def running(self) -> list[Child]:
        return [child for child in self.by_name.values() if not child.has_ended()]

    def unseen(self) -> list[Child]:
        """Those that run, and those whose end `newly_ended` has not told yet."""
        return [child for child in self.by_name.values() if not child.is_seen]

    def newly_ended(self) -> list[Child]:
        """Those that have ended since the last call."""
        ended = [c for c in self.by_name.values() if c.has_ended() and not c.is_seen]
        for child in ended:
            child.is_seen = True
        return ended

    def stop(self) -> None:
        """SIGTERM to every group, SIGKILL to those that stay."""
        for child in self.by_name.values():
            child.signal_group(signal.SIGTERM)
        kill_at = time.monotonic() + _STOP_S
        while running := self.running():
            if time.monotonic() > kill_at:
                for child in running:
                    child.signal_group(signal.SIGKILL)
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _others(group: int) -> list[psutil.Process]:
    """The living members of a process group, besides its leader."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_member = process.pid != group and os.getpgid(process.pid) == group
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("resource_tracker" in argument for argument in process.cmdline())
    return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            remove_openmp_mark(process.pid)


def role_command(role: str, *arguments: str) -> tuple[str, ...]:
    """`python -P -m ROLE`: -P, so that a user's own learner.py does not shadow ours."""
    return (sys.executable, "-P", "-m", role, *arguments)
