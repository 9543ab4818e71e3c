"""Child processes of the launcher: started in groups of their own, ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from asyncrl.parent import end_with_parent

_STOP_S = 8.0
"""Time to end after SIGTERM; then SIGKILL."""


@dataclass(slots=True)
class Child:
    """One program of the run: the leader of its own process group, with a log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def last_lines(self, count: int = 15) -> str:
        """The end of its log, for an error message."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-count:])


@dataclass(slots=True)
class Children:
    """All children. Use as a context manager: nothing that it started is left behind."""

    logs: Path
    all: list[Child] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )
        child = Child(name, process, log)
        self.all.append(child)
        return child

    def first_failure(self) -> Child | None:
        """The child that ended badly, if one did."""
        return next((child for child in self.all if child.exit_code not in (None, 0)), None)

    def stop(self) -> None:
        """SIGTERM to every group, SIGKILL to those that stay. Ended groups are swept as well."""
        for child in self.all:
            _signal_group(child, signal.SIGTERM)
        ends = time.monotonic() + _STOP_S
        while time.monotonic() < ends and any(child.exit_code is None for child in self.all):
            time.sleep(0.05)
        for child in self.all:
            _signal_group(child, signal.SIGKILL)
            child.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def role_command(role: str, *arguments: str) -> list[str]:
    """`python -P -m ROLE`: -P, so that a user's own learner.py does not shadow ours."""
    return [sys.executable, "-P", "-m", role, *arguments]


def learner_command(ranks: int, *arguments: str) -> list[str]:
    """The learner: one rank is started plainly; torch's launcher starts several, and ends all
    when one fails (its own exit code is 1 then, whatever theirs is)."""
    if ranks == 1:
        return role_command("learner", *arguments)
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run"]
    placement = ["--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    return [*launcher, *placement, *role_command("learner", *arguments)]


def _signal_group(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        pass
