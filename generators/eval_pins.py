"""An evaluation is of one version: while it is in hand, no other one begins to serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PIN_GRACE_S = 0.5
"""An evaluation counts as over when no lease of it has been in hand for this long."""
PIN_LOOK_S = 0.05


class EvalPins:
    """Keeps the served version while evaluation leases are in hand, until their deadlines."""

    def __init__(self) -> None:
        self._deadlines: dict[object, float] = {}
        self._quiet_since = float("-inf")
        self._open = asyncio.Event()
        self._open.set()

    @asynccontextmanager
    async def hold(self, timeout_s: float) -> AsyncIterator[None]:
        """Pins the served version during the `with`, for at most `timeout_s` seconds; it begins
        when nobody has barred pins."""
        await self._open.wait()
        key = object()
        self._deadlines[key] = time.monotonic() + timeout_s
        try:
            yield
        finally:
            del self._deadlines[key]
            self._quiet_since = time.monotonic()

    @property
    def held(self) -> bool:
        now = time.monotonic()
        running = any(deadline > now for deadline in self._deadlines.values())
        return running or now - self._quiet_since < PIN_GRACE_S

    async def released(self) -> float:
        """Returns when no evaluation pins the version any more: the seconds that it took."""
        began = time.monotonic()
        while self.held:
            await asyncio.sleep(PIN_LOOK_S)
        return time.monotonic() - began

    @asynccontextmanager
    async def barred(self) -> AsyncIterator[None]:
        """No evaluation begins during the `with`: the version is about to change, and no one can
        say when."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()
