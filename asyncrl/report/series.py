"""A run as series of numbers: one point for each step, however often it was trained again."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.journal.tables import BeatRow
from asyncrl.report.reading import Record, RunRecords
from asyncrl.run_clock import RunClock
from asyncrl.shares import lanes


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step: what the learner and the buffer recorded of it."""

    step: int
    at: float
    """When it had been trained, seconds since the epoch."""
    values: Record
    """Names and values as in metrics.jsonl."""

    def number(self, name: str) -> float | None:
        """None where the record lacks it, or where it was not finite."""
        value = self.values.get(name)
        return float(value) if isinstance(value, int | float) else None

    @property
    def staleness(self) -> dict[int, float]:
        """Trained tokens by staleness."""
        prefix = "staleness/tokens_"
        return {
            int(name.removeprefix(prefix)): float(count)
            for name, count in self.values.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation of one version."""

    version: int
    at: float
    accuracy: float


def trained_steps(run: RunRecords) -> list[TrainedStep]:
    """The steps of metrics.jsonl in order, each once.

    Of a step that was trained several times it is the last one that was not a replay: a replay
    gives the same numbers later.
    """
    buffer = {step.step: _values(step.record, "buffer") for step in run.steps}
    for record in run.metrics:
        if "buffer/num_arrived" in record:
            buffer.setdefault(record["step"], record)
    chosen: dict[int, Record] = {}
    for record in run.metrics:
        if "time/step_s" in record and not (record["step"] in chosen and is_replay(record)):
            chosen[record["step"]] = record
    return [
        TrainedStep(step, chosen[step]["time"], {**buffer.get(step, {}), **chosen[step]})
        for step in sorted(chosen)
    ]


def evaluations(run: RunRecords) -> list[EvalPoint]:
    """Evaluations that gave an accuracy, by version. Each counts once, as it was first recorded."""
    found: dict[int, EvalPoint] = {}
    for record in run.metrics:
        accuracy = record.get("eval/accuracy")
        if isinstance(accuracy, int | float):
            version = int(record["step"])
            found.setdefault(version, EvalPoint(version, record["time"], accuracy))
    return [found[version] for version in sorted(found)]


def is_replay(record: Record) -> bool:
    """Whether a step's record is of a learner that was catching up after a restart."""
    return bool(record.get("train/replayed"))


def run_clock(run: RunRecords) -> RunClock:
    """The clock of a run, from the times in its metrics and of its beats."""
    spans = [(span.begin_s, span.end_s) for lane in lanes(run.beats) for span in lane.spans]
    for record in run.metrics:
        took = record.get("time/step_s") or record.get("eval/duration_s") or 0.0
        spans.append((record["time"] - took, record["time"]))
    return RunClock(spans)


def sampling_speed(run: RunRecords, clock: RunClock) -> list[tuple[float, float]]:
    """Tokens per second of all generators together, at seconds of the run's clock.

    From what their heartbeats counted; without any, from the buffer's records of the steps.
    """
    spans = list(_sampled(run, clock))
    if not spans:
        points = [
            (step.at, step.number("buffer/generator_tokens_per_s")) for step in trained_steps(run)
        ]
        return [(clock.seconds(at), speed) for at, speed in points if speed is not None]
    first, last = min(begin for begin, _, _ in spans), max(end for _, end, _ in spans)
    usual = statistics.median(end - begin for begin, end, _ in spans)
    edges = np.linspace(first, last, 1 + min(100, max(1, int((last - first) / usual))))
    tokens = np.zeros(len(edges) - 1)
    for begin, end, count in spans:
        overlap = np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin)
        tokens += count * np.clip(overlap, 0, None) / (end - begin)
    middles, speeds = (edges[:-1] + edges[1:]) / 2, tokens / np.diff(edges)
    return list(zip(middles.tolist(), speeds.tolist(), strict=True))


def tokens_in(run: RunRecords) -> int:
    """Tokens of the responses of all groups that came in, whatever became of them."""
    return sum(sum(json.loads(group.token_versions).values()) for group in run.groups)


def smoothed(values: Sequence[float], *, window: int) -> list[float]:
    """The mean of the last `window` values at each point, of fewer at the first ones."""
    near = [values[max(0, i - window + 1) : i + 1] for i in range(len(values))]
    return [sum(last) / len(last) for last in near]


def tokens_by_staleness(steps: Iterable[TrainedStep]) -> dict[int, float]:
    """Trained tokens of all steps together."""
    total: defaultdict[int, float] = defaultdict(float)
    for step in steps:
        for age, count in step.staleness.items():
            total[age] += count
    return dict(sorted(total.items()))


def staleness_shares(steps: Sequence[TrainedStep]) -> NDArray[np.float64]:
    """[ages, steps]: the share of each step's tokens at each staleness, from the first step to the
    last; nan for a step that is missing between them. Every one of `steps` has tokens."""
    first, last = steps[0].step, steps[-1].step
    highest = max(max(step.staleness, default=0) for step in steps)
    grid = np.full((highest + 1, last - first + 1), np.nan)
    for step in steps:
        total = sum(step.staleness.values())
        column = [step.staleness.get(age, 0.0) / total for age in range(highest + 1)]
        grid[:, step.step - first] = column
    return grid


def averaged(
    grid: NDArray[np.float64], *, at_most: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """`grid` in `at_most` columns: where each begins, and its mean; columns of nan do not count."""
    num_columns = grid.shape[1]
    starts = np.arange(0, num_columns, -(-num_columns // at_most))
    counts = np.add.reduceat(~np.isnan(grid), starts, axis=1, dtype=float)
    counts[counts == 0] = np.nan
    return starts, np.add.reduceat(np.nan_to_num(grid), starts, axis=1) / counts


def _sampled(run: RunRecords, clock: RunClock) -> Iterator[tuple[float, float, int]]:
    """(from, to, tokens) between the heartbeats of each generator."""
    before: dict[str, BeatRow] = {}
    for beat in run.beats:
        last = before.get(beat.member)
        if last is not None and beat.role == "generator":
            begin, end = clock.seconds(last.at), clock.seconds(beat.at)
            if end > begin:
                yield begin, end, beat.tokens - last.tokens
        before[beat.member] = beat


def _values(record: str, name: str) -> Record:
    """Values of a record of the buffer, named as the learner writes them to metrics.jsonl."""
    return {f"{name}/{key}": value for key, value in json.loads(record)["values"].items()}
