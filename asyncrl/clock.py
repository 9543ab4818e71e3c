"""A stopwatch that is always in exactly one phase, so that phases add up to the wall time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict


class PhaseClock:
    """Seconds by phase. `enter` ends one phase and begins the next at the same instant.

    Phases are entered by one thread; any thread may look, and say with `instead` what one is.
    """

    def __init__(self, phase: str) -> None:
        self._lock = threading.Lock()
        self._phase = phase
        self._since = self._began = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str) -> None:
        with self._lock:
            self._enter(phase)

    def instead(self, of: str, phase: str) -> None:
        """Enters `phase` if the present one is `of`."""
        with self._lock:
            if self._phase == of:
                self._enter(phase)

    def phase_s(self) -> float:
        """How long the present phase has lasted."""
        return time.monotonic() - self._began

    def total(self) -> dict[str, float]:
        """Seconds of each phase since the clock was made; they add up to its age."""
        with self._lock:
            now = time.monotonic()
            before = self._seconds.get(self._phase, 0.0)
            return {**self._seconds, self._phase: before + now - self._since}

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last `take`; phases that took none are left out."""
        self.enter(self._phase)
        before, self._taken = self._taken, dict(self._seconds)
        return {
            phase: seconds - before.get(phase, 0.0)
            for phase, seconds in self._taken.items()
            if seconds > before.get(phase, 0.0)
        }

    def _enter(self, phase: str) -> None:
        now = time.monotonic()
        self._seconds[self._phase] += now - self._since
        if phase != self._phase:
            self._began = now
        self._phase, self._since = phase, now
