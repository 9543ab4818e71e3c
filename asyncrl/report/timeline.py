"""Who worked and who waited: the time of each process by kind of activity."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.journal_tables import BeatRow
from asyncrl.report.reading import Record, RunRecords
from asyncrl.report.series import RunClock, is_replay

KINDS = {
    "work": "generates or trains",
    "wait": "waits: for prompts, a batch or weights",
    "score": "scores, nothing in the engine",
    "weights": "weights out or in",
    "replay": "trains again after a restart",
    "save": "saves",
    "start": "starts",
    "other": "other",
}
"""Kinds of activity with what they are called in the legend."""

_KIND_OF_PHASE = {
    "prepare": "work",
    "forward_backward": "work",
    "optimizer": "work",
    "wait_batch": "wait",
    "commit": "wait",
    "snapshot": "weights",
    "drain": "weights",
    "checkpoint": "save",
    "export": "save",
    "start": "start",
    "starting": "start",
    "generating": "work",
    "scoring": "score",
    "swapping": "weights",
    "waiting for leases": "wait",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the run's clock and the seconds that each kind took of it."""

    begin_s: float
    end_s: float
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Lane:
    """One process, all of its lives one after the other."""

    name: str
    spans: list[Span]

    def seconds(self, *, since_s: float = 0.0) -> dict[str, float]:
        """Seconds of each kind, in the spans that lie, for the most part, after `since_s`."""
        total: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            if (span.begin_s + span.end_s) / 2 >= since_s:
                for kind, seconds in span.seconds.items():
                    total[kind] += seconds
        return dict(total)


def lanes(run: RunRecords, clock: RunClock) -> list[Lane]:
    """The learner from its step records, and from its heartbeats where there are none (at the end,
    and before it was killed); generators from their heartbeats."""
    learner = [span for record in run.metrics for span in _step_spans(record, clock)]
    by_member: defaultdict[str, list[BeatRow]] = defaultdict(list)
    for beat in run.beats:
        by_member[beat.member].append(beat)
    recorded = tuple(learner)
    generators: dict[str, list[Span]] = {}
    for member, beats in by_member.items():
        spans = list(_beat_spans(beats, clock))
        if beats[0].role == "learner":
            learner += _outside(recorded, spans)
        elif spans:
            generators.setdefault(_lane_name(member, spans, generators), []).extend(spans)
    found = [Lane(name, generators[name]) for name in sorted(generators)]
    return [Lane("learner", learner), *found] if learner else found


def shares(lane: Lane, edges: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """The share of each bin between `edges` (seconds) that went to each kind.

    They add up to 1 where the process was there all the time, to 0 where it was not.
    """
    widths = np.diff(edges)
    result = {kind: np.zeros(len(widths)) for kind in KINDS}
    for span in lane.spans:
        first = int(np.clip(np.searchsorted(edges, span.begin_s, "right") - 1, 0, len(widths) - 1))
        last = int(np.clip(np.searchsorted(edges, span.end_s, "left"), first + 1, len(widths)))
        low, high = edges[first:last], edges[first + 1 : last + 1]
        overlap = np.minimum(high, span.end_s) - np.maximum(low, span.begin_s)
        covered = np.clip(overlap, 0, None) / widths[first:last]
        total = max(sum(span.seconds.values()), 1e-9)
        for kind, seconds in span.seconds.items():
            result[kind][first:last] += covered * seconds / total
    return result


def kind_of(phase: str) -> str:
    """The kind of activity that a phase of a process's clock is."""
    return _KIND_OF_PHASE.get(phase, "other")


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
        kind = kind_of(phase)
        if kind == "work" and is_replay(record):
            kind = "replay"
        yield Span(begin, begin + seconds, {kind: seconds})
        begin += seconds


def _beat_spans(beats: list[BeatRow], clock: RunClock) -> Iterator[Span]:
    """From each heartbeat of one process to the next; the first from the process's start on."""
    before: dict[str, float] = {}
    last_at: float | None = None
    for beat in beats:
        phases: dict[str, float] = json.loads(beat.seconds)
        spent: defaultdict[str, float] = defaultdict(float)
        for phase, seconds in phases.items():
            spent[kind_of(phase)] += max(0.0, seconds - before.get(phase, 0.0))
        since = beat.at - sum(spent.values()) if last_at is None else last_at
        if sum(spent.values()) > 0:
            yield Span(clock.seconds(since), clock.seconds(beat.at), dict(spent))
        before, last_at = phases, beat.at


def _outside(known: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Those of `spans` whose middle lies in none of `known`."""
    begins = np.sort([span.begin_s for span in known])
    ends = np.sort([span.end_s for span in known])
    middles = [(span.begin_s + span.end_s) / 2 for span in spans]
    is_inside = np.searchsorted(begins, middles, "right") > np.searchsorted(ends, middles, "right")
    return [span for span, inside in zip(spans, is_inside, strict=True) if not inside]


def _lane_name(member: str, spans: list[Span], there: dict[str, list[Span]]) -> str:
    """`generator-0` for all lives of it (members are named generator-0-8f3a), unless two lives
    of that name overlap: then they are two processes."""
    name = member.rpartition("-")[0] or member
    is_free = name not in there or there[name][-1].end_s <= spans[0].begin_s + 1.0
    return name if is_free else member
