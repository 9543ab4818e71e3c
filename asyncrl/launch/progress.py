"""What a person sees while a run goes on: one line per step, and what is waited for between them.

Training numbers come from metrics.jsonl, everything else from the buffer's Status.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.launch.time_table import short, time_table
from asyncrl.report.reading import read_run
from asyncrl.report.series import EvalPoint, is_replay
from asyncrl.report.summary import RunFacts, gather, headline, outcome, prompts_text
from asyncrl.run_dir import RunDir

_EVENT_S = 30.0
"""Off a terminal: seconds without a step after which a line says what is waited for."""
_HEADER = " time    step  reward   staleness    learner  generators    step  waited   left"
_UNITS = "                     mean     max      tok/s       tok/s       s       s       "


class Progress:
    """Prints as a run goes on. On a terminal a live line below says what is waited for."""

    def __init__(self, console: Console, run_dir: RunDir, *, max_steps: int | None) -> None:
        self._console = console
        self._metrics = _Tail(run_dir.metrics)
        self._metrics.new_records()  # those of an earlier life of the run
        self._max_steps = max_steps
        self._started = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._steps_done = 0
        self._has_header = False
        self._said_at = self._started
        self._buffer_record: dict[str, Any] = {}
        self._live = Live(Text(), console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, status: dict[str, Any], *, phase: str) -> None:
        """Prints the records that are new, and what `status` says is waited for: the last one that
        the buffer gave, empty before it has given any; then `phase` is said."""
        for record in self._metrics.new_records():
            if "buffer/num_arrived" in record:
                self._buffer_record = record
            elif "time/step_s" in record:
                is_same = self._buffer_record.get("step") == record["step"]
                self._step({**self._buffer_record, **record} if is_same else record)
            elif "eval/accuracy" in record:
                self._say(eval_line(record))
        waiting = status.get("waiting_for") or phase
        if self._console.is_terminal:
            self._live.update(Text(f"{self._elapsed()}  {waiting}", style="dim"), refresh=True)
        elif waiting and time.monotonic() - self._said_at > _EVENT_S:
            self._say(waiting)

    def _step(self, record: dict[str, Any]) -> None:
        if not self._has_header:
            self._has_header = True
            self._console.print(f"{_HEADER}\n{_UNITS}", style="bold")
        line = step_line(record, self._max_steps)
        if is_replay(record):
            self._say(f"{line}  again")
            return
        self._steps_done = int(record["step"]) + 1
        self._first_step = self._first_step or (self._steps_done, time.monotonic())
        self._say(f"{line}  {self._time_left():>5}")

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._console.print(f"{self._elapsed()}  {text}", soft_wrap=True)

    def _elapsed(self) -> str:
        return minutes(time.monotonic() - self._started)

    def _time_left(self) -> str:
        if self._max_steps is None or self._first_step is None:
            return ""
        first, since = self._first_step
        if self._steps_done <= first:
            return ""
        per_step = (time.monotonic() - since) / (self._steps_done - first)
        return minutes(max(0, self._max_steps - self._steps_done) * per_step).strip()


def step_line(record: dict[str, Any], max_steps: int | None) -> str:
    """One training step in one line, in the columns of the header."""
    step = f"{int(record['step']) + 1}/{max_steps}" if max_steps else f"{int(record['step']) + 1}"
    return (
        f"{step:>6}  {_number(record, 'buffer/reward_mean', '.3f'):>6}"
        f"  {_number(record, 'staleness/mean', '.1f'):>4}"
        f"  {_number(record, 'staleness/max', '.0f'):>6}"
        f"  {_number(record, 'train/tokens_per_s', '.0f'):>9}"
        f"  {_number(record, 'buffer/generator_tokens_per_s', '.0f'):>10}"
        f"  {_number(record, 'time/step_s', '.1f'):>6}"
        f"  {_number(record, 'time/wait_batch_s', '.1f'):>6}"
    )


def eval_line(record: dict[str, Any]) -> str:
    return (
        f"evaluation of version {record.get('eval/version')}: "
        f"accuracy {_number(record, 'eval/accuracy', '.3f')} on {record.get('eval/count')} samples"
    )


def minutes(seconds: float) -> str:
    """As ` 3:07`."""
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"


def print_summary(console: Console, run_dir: RunDir) -> None:
    """The result of a run in one table: numbers of its report."""
    facts = gather(read_run(run_dir.path))
    table = Table(title=f"run {run_dir.path.name}", title_justify="left", show_header=False)
    for point in facts.evals:
        table.add_row(f"held-out accuracy, version {point.version}", _accuracy(facts, point))
    for line in headline(facts):
        if line.name != "held-out accuracy":
            table.add_row(line.name, line.value)
    table.add_row("prompts", prompts_text(facts.run))
    table.add_row("ended", outcome(facts.run))
    table.add_row("files", str(run_dir.path))
    console.print(table)
    if facts.shares:
        rows = [asdict(each) for each in facts.shares]
        title = f"where the time went, whole run of {short(facts.clock.total_s)}"
        console.print(time_table(rows, "seconds", title, width=console.width))


def _accuracy(facts: RunFacts, point: EvalPoint) -> str:
    evals = [record for record in facts.run.metrics if "eval/accuracy" in record]
    record = next(record for record in evals if record["step"] == point.version)
    samples = f"{record.get('eval/count')} samples, temperature {record.get('eval/temperature')}"
    return f"{point.accuracy:.3f}  ({samples})"


def _number(record: dict[str, Any], name: str, form: str) -> str:
    value = record.get(name)
    return format(value, form) if isinstance(value, int | float) else "-"


class _Tail:
    """Reads the whole lines that a growing JSONL file gained since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, _, _ = data.rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [record for line in whole.splitlines() if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line that a killed learner left torn."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record
