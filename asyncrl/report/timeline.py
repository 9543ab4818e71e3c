"""Who worked and who waited: the states of each process along the clock of the run."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.report.reading import Record, RunRecords
from asyncrl.report.series import is_replay
from asyncrl.run_clock import RunClock
from asyncrl.shares import Lane, Span, lanes
from asyncrl.states import AWAY, STATES, state_of


def known_lanes(run: RunRecords, clock: RunClock) -> list[Lane]:
    """The lanes of the heartbeats; the learner's from its step records where it has none."""
    known = lanes(run.beats, at=clock.seconds)
    return known if _learners(known) else _with_learner(known, _recorded(run, clock))


def drawn_lanes(run: RunRecords, known: Sequence[Lane], clock: RunClock) -> list[Lane]:
    """The lanes of the timeline: `known`, the learner's in more detail where it has written step
    records."""
    recorded = _recorded(run, clock)
    others = [span for lane in _learners(known) for span in lane.spans]
    return _with_learner(known, [*recorded, *_outside(recorded, others)])


def binned(lane: Lane, edges: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """The share of each bin between `edges` (seconds) that went to each state: they add up to 1,
    with AWAY where the process was not there."""
    widths = np.diff(edges)
    result = {state: np.zeros(len(widths)) for state in STATES}
    for span in lane.spans:
        first = int(np.clip(np.searchsorted(edges, span.begin_s, "right") - 1, 0, len(widths) - 1))
        last = int(np.clip(np.searchsorted(edges, span.end_s, "left"), first + 1, len(widths)))
        low, high = edges[first:last], edges[first + 1 : last + 1]
        overlap = np.minimum(high, span.end_s) - np.maximum(low, span.begin_s)
        covered = np.clip(overlap, 0, None) / widths[first:last]
        total = max(sum(span.seconds.values()), 1e-9)
        for state, seconds in span.seconds.items():
            result[state][first:last] += covered * seconds / total
    there = np.sum(list(result.values()), axis=0)
    result[AWAY] = np.clip(1 - there, 0, None)
    return result


def _learners(known: Sequence[Lane]) -> list[Lane]:
    return [lane for lane in known if lane.role == "learner"]


def _with_learner(known: Sequence[Lane], spans: list[Span]) -> list[Lane]:
    """With one learner that did this, behind the buffer and before the generators."""
    spans = sorted(spans, key=lambda span: span.begin_s)
    buffers = [lane for lane in known if lane.role == "buffer"]
    generators = [lane for lane in known if lane.role == "generator"]
    return [*buffers, *([Lane("learner", "learner", spans)] if spans else []), *generators]


def _recorded(run: RunRecords, clock: RunClock) -> list[Span]:
    """What the learner did, by its step records."""
    return [span for record in run.metrics for span in _step_spans(record, clock)]


def _step_spans(record: Record, clock: RunClock) -> Iterator[Span]:
    """The phases of one step, one after the other, the last ending when the record was made."""
    if "time/step_s" not in record:
        return
    phases = {
        name.removeprefix("time/").removesuffix("_s"): float(value or 0.0)
        for name, value in record.items()
        if name.startswith("time/") and name != "time/step_s"
    }
    begin = clock.seconds(record["time"] - sum(phases.values()))
    for phase, seconds in phases.items():
        state = state_of(phase)
        if state == "training" and is_replay(record):
            state = "training again"
        yield Span(begin, begin + seconds, {state: seconds})
        begin += seconds


def _outside(known: Sequence[Span], spans: Sequence[Span]) -> Iterator[Span]:
    """The parts of `spans` that none of `known` covers, with those of their seconds that `known`
    does not tell of."""
    known = sorted(known, key=lambda span: span.begin_s)
    begins, ends = [span.begin_s for span in known], [span.end_s for span in known]
    for span in spans:
        near = known[bisect_right(ends, span.begin_s) : bisect_left(begins, span.end_s)]
        told = [part for each in near if (part := each.within(span.begin_s, span.end_s))]
        yield from _gaps(span, told)


def _gaps(span: Span, told: Sequence[Span]) -> Iterator[Span]:
    """What lies between those of `told`, which are in order and within `span`."""
    left = dict(span.seconds)
    for part in told:
        for state, seconds in part.seconds.items():
            left[state] = max(0.0, left.get(state, 0.0) - seconds)
    rest = left if any(left.values()) else span.seconds
    scale = (span.end_s - span.begin_s) / sum(rest.values())
    whole = Span(span.begin_s, span.end_s, {s: scale * t for s, t in rest.items() if t > 0})
    at = span.begin_s
    for begin_s, end_s in [*((part.begin_s, part.end_s) for part in told), (span.end_s, 0.0)]:
        if gap := whole.within(at, begin_s):
            yield gap
        at = end_s
