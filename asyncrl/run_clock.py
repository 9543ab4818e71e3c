"""The clock of a run: wall time without the pauses in which none of its processes was there."""

from __future__ import annotations

from collections.abc import Iterable

PAUSE_S = 120.0
"""A longer stretch in which no process was heard of is cut out of the clock of the run."""


class RunClock:
    """Seconds since a run began, without the pauses in which none of its processes was there."""

    def __init__(self, spans: Iterable[tuple[float, float]]) -> None:
        """`spans`: (from, to) in seconds since the epoch, in which a process was at work."""
        self._pieces: list[tuple[float, float, float]] = []  # from, to, seconds of the run at from
        self.resumed_at: list[float] = []
        """Seconds of the run at which a pause was cut out."""
        position = 0.0
        for begin, end in _merged(spans):
            if self._pieces:
                self.resumed_at.append(position)
            self._pieces.append((begin, end, position))
            position += end - begin
        self.total_s = position

    def seconds(self, at: float) -> float:
        """The clock of the run at a time of day; during a pause it stands still."""
        seconds = 0.0
        for begin, end, position in self._pieces:
            if at >= begin:
                seconds = position + min(at, end) - begin
        return seconds


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap or lie within PAUSE_S of each other as one."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] <= PAUSE_S:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
