"""Watches over the programs of one run: starts, restarts, drains, and knows when it is over.

| what happens                                     | what follows                               |
|--------------------------------------------------|--------------------------------------------|
| a program is killed by a signal                  | it is started again (local.max_restarts)   |
| a generator fails after it has worked            | it is started again (local.max_restarts)   |
| a program fails in any other way                 | the run ends: the first failure is told    |
| SIGINT                                           | passed on to the buffer, which drains      |
| SIGINT again, or before anybody works; SIGTERM   | all are ended                              |
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console

from asyncrl.launch.children import Child, Children, Program
from asyncrl.launch.failures import DRAINED, Ending, how_it_ended, judge, telling_lines
from asyncrl.launch.monitor import Monitor
from asyncrl.launch.progress import Progress
from asyncrl.launch.signals import Signals
from asyncrl.report.reading import why_failed
from asyncrl.run_dir import RunDir

TICK_S = 0.5
LEAVE_S = 30.0
"""How long generators may take to end after buffer and learner have."""
SAVE_S = 60.0
"""How long the learner may take to write its last checkpoint once the run has failed."""
GRACE_S = 2.0
"""How long the others may take to end by themselves after the first failure."""
DRAIN_S = 600.0
"""How long the run may take to stop after one SIGINT: a step and a checkpoint."""


class _Failure(NamedTuple):
    """The first failure: the others follow from it."""

    child: Child
    how: str
    reason: str
    """Why the run has failed, as the buffer declared it; empty: this program alone has."""


class Supervisor:
    """One run from the start of its buffer to the end of all its programs."""

    def __init__(
        self,
        run_dir: RunDir,
        children: Children,
        *,
        buffer: Program,
        others: Callable[[str], list[Program]],
        max_restarts: int,
        progress: Progress,
        errors: Console,
    ) -> None:
        """`others` makes the programs that connect to the buffer's address."""
        self._run_dir = run_dir
        self._children = children
        self._buffer = buffer
        self._others = others
        self._max_restarts = max_restarts
        self._progress = progress
        self._errors = errors
        self._monitor: Monitor | None = None
        self._deadline = math.inf
        self._code: int | None = None
        self._failed: _Failure | None = None
        self._is_draining = False
        self._is_drain_told = False
        self._num_restarts = 0
        self._workers: set[int] = set()
        """Pids of generators that have sampled tokens."""

    @property
    def status(self) -> dict[str, Any]:
        """The last that the buffer said."""
        return (self._monitor and self._monitor.status) or {}

    @property
    def was_cut_short(self) -> bool:
        """Whether the user wanted everything stopped at once."""
        return self._code is not None

    def run(self, signals: Signals) -> int:
        """Returns the exit code once there is nothing left to wait for. Children may still run when
        the user wants them stopped, or after a failure."""
        self._children.start(self._buffer)
        try:
            with self._progress:
                while self._code is None and self._is_worth_waiting():
                    self._turn(signals)
        finally:
            if self._monitor is not None:
                self._monitor.close()
        return self._outcome() if self._code is None else self._code

    def _turn(self, signals: Signals) -> None:
        for number in signals.wait(TICK_S if self._monitor else 0.05):
            self._on_signal(number)
        for child in self._children.newly_ended():
            self._on_end(child)
        self._meet_buffer()
        self._look()

    def _is_worth_waiting(self) -> bool:
        there = self._children.unseen()
        if there and all(child.program.role == "generator" for child in there):
            self._end_within(LEAVE_S)
        return bool(there) and time.monotonic() < self._deadline

    def _meet_buffer(self) -> None:
        """Once the buffer listens, the others are started."""
        if self._monitor is not None or not self._run_dir.buffer_address.exists():
            return
        address = self._run_dir.buffer_address.read_text().strip()
        self._monitor = Monitor(address, run_id=self._run_dir.read_run_id())
        for program in self._others(address):
            self._children.start(program)

    def _look(self) -> None:
        if self._monitor is not None:
            self._monitor.look()
            members = self.status.get("members") or []
            self._workers.update(m["pid"] for m in members if m.get("tokens"))
        if self._is_draining and not self._is_drain_told and self._buffer_answers():
            self._tell_buffer_to_drain()
        self._progress.update(self.status, phase=_phase(self.status))

    def _buffer_answers(self) -> bool:
        """Whether this life of the buffer has answered: it does not die of a SIGINT any more."""
        buffer = self._children.by_name[self._buffer.name]
        return self._monitor is not None and self._monitor.asked_at > buffer.started_at

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and self._monitor is not None and not self._is_draining:
            self._is_draining = True
            self._end_within(DRAIN_S)
            self._tell(
                "stopping: the learner ends its step and writes a checkpoint; Ctrl-C again stops "
                "now"
            )
            return
        self._code = 128 + number
        self._tell(f"stopped by {signal.Signals(number).name}")

    def _tell_buffer_to_drain(self) -> None:
        buffer = self._children.by_name[self._buffer.name]
        if not buffer.has_ended():
            os.kill(buffer.pid, signal.SIGINT)
            self._is_drain_told = True

    def _on_end(self, child: Child) -> None:
        if self._failed is not None:
            return
        ending = self._ending(child)
        verdict = judge(ending)
        if verdict == "again" and self._num_restarts < self._max_restarts:
            self._start_again(child, how_it_ended(ending))
        elif verdict != "well":
            spent = "; local.max_restarts is used up" if verdict == "again" else ""
            reason = why_failed(self._run_dir.path) if self._may_tell_the_runs_end(child) else ""
            self._failed = _Failure(child, how_it_ended(ending) + spent, reason)
            is_saving = bool(reason) and child.program.role == "buffer"
            self._end_within(SAVE_S if is_saving else GRACE_S)
        elif ending.code not in (0, DRAINED):
            self._tell(f"{child.name} {how_it_ended(ending)}, but is not needed now: {child.log}")

    def _ending(self, child: Child) -> Ending:
        assert child.exit_code is not None
        is_trained = self._has_ended_well("learner")
        is_over = self._is_draining or is_trained or self._has_ended_well("buffer")
        needed = {"generator": not is_over, "buffer": not is_trained, "learner": True}
        return Ending(
            role=child.program.role,
            code=child.exit_code,
            has_worked=child.pid in self._workers,
            run_is_over=is_over,
            is_needed=needed[child.program.role],
        )

    def _has_ended_well(self, role: str) -> bool:
        codes = (0, DRAINED) if role == "buffer" else (0,)
        children = self._children.by_name.values()
        return any(child.program.role == role and child.exit_code in codes for child in children)

    def _start_again(self, child: Child, how: str) -> None:
        self._num_restarts += 1
        self._tell(
            f"{child.name} {how}: started again (restart {self._num_restarts} of "
            f"{self._max_restarts})"
        )
        self._children.start(child.program)

    def _may_tell_the_runs_end(self, child: Child) -> bool:
        """Whether this exit code is that of a run that has failed. Before the buffer listens, its
        journal tells the end of an earlier try."""
        of_run = child.program.role in ("buffer", "learner") and child.exit_code == 1
        return of_run and self._monitor is not None

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _outcome(self) -> int:
        """The exit code, after what there is to say on stderr."""
        if self._failed is not None:
            self._report(self._failed)
            return 2 if self._failed.child.exit_code == 2 else 1
        if late := [child.name for child in self._children.running()]:
            self._tell(f"{', '.join(late)} did not end in time: ended now")
        buffer = self._children.by_name[self._buffer.name].exit_code
        was_drained = self._is_draining and buffer != 0  # an interrupt may come after the end
        return DRAINED if was_drained or buffer == DRAINED else 0

    def _report(self, failure: _Failure) -> None:
        child = failure.child
        if failure.reason:
            self._tell(f"the run failed: {failure.reason} (logs: {child.log.parent})")
            return
        lines = telling_lines(child.log_text())
        if not lines:
            self._tell(f"{child.name} {failure.how}, without a word ({child.log})")
            return
        self._tell(f"{child.name} {failure.how}. What it said last ({child.log}):")
        for line in lines:
            self._errors.print(f"    {line}", soft_wrap=True)

    def _tell(self, text: str) -> None:
        self._errors.print(text, soft_wrap=True)


def _phase(status: dict[str, Any]) -> str:
    if not status:
        return "starting the buffer"
    roles = [member.get("role") for member in status.get("members") or []]
    missing = [role for role in ("learner", "generator") if role not in roles]
    return f"starting: no {' and no '.join(missing)} has joined yet" if missing else "running"
