"""Where the buffer's own time goes: its event loop serves, or waits for others to ask something."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any

from asyncrl.clock import PhaseClock


class LoopClock(selectors.DefaultSelector):
    """The selector of an event loop that knows its time: in `select` the loop waits, else it
    serves. What is waited for is asked when there has been a change since it was last asked.

    Its phases: starting; serving; waiting for ...: what `waits_for` returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases = PhaseClock("starting")
        self._waits_for: Callable[[], str] | None = None
        self._waiting = ""
        """What is waited for, as far as is known; empty after a change."""
        self._looked_at = time.monotonic()
        self._lag_s = 0.0

    def take_lag_s(self) -> float:
        """The longest time since the last call in which the loop did not look for what has come:
        so long may a request have waited for its turn."""
        lag_s, self._lag_s = self._lag_s, 0.0
        return lag_s

    def serve(self, waits_for: Callable[[], str]) -> None:
        """From now on the loop serves; `waits_for` names the phase when it has nothing to do."""
        self._waits_for = waits_for
        self._looked_at, self._lag_s = time.monotonic(), 0.0  # nobody could ask before
        self.phases.enter("serving")

    def changed(self) -> None:
        """Something has changed that others may wait for."""
        self._waiting = ""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        self._lag_s = max(self._lag_s, time.monotonic() - self._looked_at)
        found = self._select(timeout)
        self._looked_at = time.monotonic()
        return found

    def _select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, Any]]:
        if self._waits_for is None or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        self._waiting = self._waiting or self._waits_for()
        self.phases.enter(self._waiting)
        try:
            return super().select(timeout)
        finally:
            self.phases.enter("serving")
