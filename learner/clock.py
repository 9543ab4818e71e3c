"""A stopwatch that is always in exactly one phase, so that phases add up to the wall time."""

from __future__ import annotations

import time


class PhaseClock:
    """Seconds by phase. `enter` ends one phase and begins the next at the same instant."""

    def __init__(self, phase: str = "other") -> None:
        self._phase = phase
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last `take`, and starts anew in the same phase."""
        self.enter(self._phase)
        seconds, self._seconds = self._seconds, {}
        return seconds
