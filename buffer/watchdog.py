"""Whether the run gets on. Pure: time is passed in, in seconds."""

from __future__ import annotations

from typing import Literal

WARN_SHARE = 0.1
"""A stall is told in the log after this share of the time that ends the run..."""
MIN_WARN_S = 30.0
"""...but not sooner than this."""


class Watchdog:
    """Notices when nothing has got on for too long.

    The run gets on when a group or evaluation row comes in, a batch is assigned, a version is
    committed (a replayed one too), or a learner registers.
    """

    def __init__(self, timeout_s: float, *, now: float) -> None:
        self.timeout_s = timeout_s
        self._warn_s = max(MIN_WARN_S, WARN_SHARE * timeout_s)
        self._last = now
        self._has_warned = False

    def got_on(self, *, now: float) -> None:
        self._last, self._has_warned = now, False

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long."""
        self._last += seconds

    def still_s(self, *, now: float) -> float:
        """For how long nothing has got on."""
        return now - self._last

    def look(self, *, now: float) -> Literal["fine", "warn", "stalled"]:
        """`warn` once for each stall; `stalled` when the run is to end."""
        still_s = self.still_s(now=now)
        if still_s > self.timeout_s:
            return "stalled"
        if still_s > self._warn_s and not self._has_warned:
            self._has_warned = True
            return "warn"
        return "fine"
