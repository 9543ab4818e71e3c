"""Processes that end with the one that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals, *, parent: int | None = None) -> None:
    """Asks the kernel to send `number` to this process when its parent dies. Linux only; elsewhere
    it does nothing.

    With the parent's pid the signal is sent as well when that one has died before it could be
    asked for.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)
