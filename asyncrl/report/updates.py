"""What the weight updates of a run cost, version by version."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.journal.tables import ServedRow
from asyncrl.report.reading import RunRecords
from asyncrl.report.series import TrainedStep

STAGED = ("rendezvous", "transfer", "verify")
SWAPPED = ("pause", "load", "reset", "resume")
PREPARED = ("publish/write_s", "publish/describe_s")
"""What the learner's publisher does before a version can be taken, by transport."""


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """One published version; seconds, None where they are not known."""

    version: int
    blocked_s: float | None
    """What the snapshot cost the learner."""
    num_generators: int
    """Generators that serve it."""
    seconds: dict[str, float]
    """Of each phase and of their sums `stage` and `paused`, mean over generators."""
    propagation_s: float | None
    """Mean over generators."""
    longest_s: float | None
    """The longest propagation."""

    @property
    def on_the_way_s(self) -> float | None:
        """The part of the propagation in which a generator had yet to hear of it, or waited for a
        seat."""
        if self.propagation_s is None:
            return None
        known = sum(self.seconds.get(phase, 0.0) for phase in (*STAGED, "wait", *SWAPPED))
        return max(0.0, self.propagation_s - known)


def update_costs(run: RunRecords, steps: Sequence[TrainedStep]) -> list[UpdateCost]:
    """Of all versions that a generator served, in order; of one that several lives of the learner
    published, the last one's. From metrics.jsonl where the journal has none."""
    blocked = {step.step + 1: step.number("time/snapshot_s") for step in steps}
    rows: defaultdict[int, list[ServedRow]] = defaultdict(list)
    for row in run.served:
        before = rows[row.version]
        if before and before[0].inc < row.inc:
            before.clear()
        before.append(row)
    if not rows:
        return _recorded(run, blocked)
    return [_cost(version, rows[version], blocked.get(version)) for version in sorted(rows)]


def stagings(run: RunRecords) -> list[tuple[str, float, float]]:
    """(generator, from, to) of every version that was staged, seconds since 1970."""
    found = []
    for row in run.served:
        seconds = json.loads(row.seconds)
        end = row.at - sum(seconds.get(phase, 0.0) for phase in ("wait", *SWAPPED))
        found.append((row.member, end - seconds.get("stage", 0.0), end))
    return [(name, begin, end) for name, begin, end in found if end > begin]


def prepared_s(steps: Iterable[TrainedStep]) -> float | None:
    """Median seconds of the publisher's own work before a version can be taken."""
    known = [number for step in steps for name in PREPARED if (number := step.number(name))]
    return statistics.median(known) if known else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def brief(seconds: float) -> str:
    """As `0.4 ms`, `34 ms`, `1.2 s` or `42 s`."""
    if seconds < 1:
        return f"{1000 * seconds:.{0 if seconds >= 0.002 or not seconds else 1}f} ms"
    return f"{seconds:.{1 if seconds < 10 else 0}f} s"


def _recorded(run: RunRecords, blocked: Mapping[int, float | None]) -> list[UpdateCost]:
    """As the learner wrote it down for the buffer."""
    records = {int(r["step"]): r for r in run.metrics if r.get("weights/num_served")}
    phases = (*STAGED, "wait", *SWAPPED, "stage", "paused")
    return [
        UpdateCost(
            version=version,
            blocked_s=blocked.get(version) or None,
            num_generators=int(record["weights/num_served"]),
            seconds={p: float(record.get(f"weights/{p}_mean_s") or 0.0) for p in phases},
            propagation_s=record.get("weights/propagation_mean_s"),
            longest_s=record.get("weights/propagation_max_s"),
        )
        for version, record in sorted(records.items())
    ]


def _cost(version: int, rows: Sequence[ServedRow], blocked_s: float | None) -> UpdateCost:
    by_generator = [json.loads(row.seconds) for row in rows]
    phases = list(dict.fromkeys(phase for each in by_generator for phase in each))
    arrived = [row.propagation_s for row in rows if row.propagation_s is not None]
    return UpdateCost(
        version=version,
        blocked_s=blocked_s or None,
        num_generators=len(rows),
        seconds={p: statistics.fmean(each.get(p, 0.0) for each in by_generator) for p in phases},
        propagation_s=statistics.fmean(arrived) if arrived else None,
        longest_s=max(arrived, default=None),
    )
