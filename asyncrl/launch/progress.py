"""What a person sees while a run goes on: one line per step, and what is waited for between them.

Training numbers come from metrics.jsonl, everything else from the buffer's Status.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncrl.report.reading import read_run
from asyncrl.report.summary import outcome
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
        self._said_at = self._started
        self._buffer_record: dict[str, Any] = {}
        self._live = Live(Text(), console=console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def update(self, status: dict[str, Any] | None, *, phase: str) -> None:
        """Prints the records that are new. `status` is None while the buffer does not answer."""
        for record in self._metrics.new_records():
            if "buffer/num_arrived" in record:
                self._buffer_record = record
            elif "time/step_s" in record:
                self._step({**self._buffer_record, **record})
            elif "eval/accuracy" in record:
                self._say(eval_line(record))
        waiting = (status or {}).get("waiting_for") or phase
        if self._console.is_terminal:
            self._live.update(Text(f"{self._elapsed()}  {waiting}", style="dim"), refresh=True)
        elif waiting and time.monotonic() - self._said_at > _EVENT_S:
            self._say(waiting)

    def _step(self, record: dict[str, Any]) -> None:
        self._steps_done = int(record["step"]) + 1
        if self._first_step is None:
            self._first_step = (self._steps_done, time.monotonic())
            self._console.print(f"{_HEADER}\n{_UNITS}", style="bold", highlight=False)
        self._say(f"{step_line(record, self._max_steps)}  {self._time_left():>5}")

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._console.print(f"{self._elapsed()}  {text}", highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return minutes(time.monotonic() - self._started)

    def _time_left(self) -> str:
        if self._max_steps is None or self._first_step is None:
            return ""
        first, since = self._first_step
        if self._steps_done == first:
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
    """The result of a run in one table."""
    records = _Tail(run_dir.metrics).new_records()
    steps = [record for record in records if "time/step_s" in record]
    rewards = [record for record in records if "buffer/reward_mean" in record]
    evals = [record for record in records if "eval/accuracy" in record]
    table = Table(title=f"run {run_dir.path.name}", title_justify="left", show_header=False)
    for record in evals:
        table.add_row(
            f"held-out accuracy, version {record['eval/version']}",
            f"{_number(record, 'eval/accuracy', '.3f')}"
            f"  ({record.get('eval/count')} samples, temperature {record.get('eval/temperature')})",
        )
    if steps:
        table.add_row("training reward, first to last step", _first_to_last(rewards))
        mean = sum(record.get("staleness/mean") or 0 for record in steps) / len(steps)
        highest = max(record.get("staleness/max") or 0 for record in steps)
        table.add_row("staleness of trained tokens", f"mean {mean:.2f}, max {highest:.0f}")
        seconds = sorted(record.get("time/step_s") or 0 for record in steps)
        table.add_row("steps", f"{len(steps)}, median {seconds[len(seconds) // 2]:.1f} s")
    run = read_run(run_dir.path)
    table.add_row("prompts", ", ".join(f"{n} {state}" for state, n in run.fates.items() if n))
    table.add_row("ended", outcome(run))
    table.add_row("files", str(run_dir.path))
    console.print(table)


def _first_to_last(records: list[dict[str, Any]]) -> str:
    first, last = (_number(records[i], "buffer/reward_mean", ".3f") for i in (0, -1))
    return f"{first} to {last}"


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
