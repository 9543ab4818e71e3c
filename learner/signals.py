"""SIGTERM and SIGINT end a learner at once, also while torch computes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from asyncrl.disk import remove_whole

_ENDING = (signal.SIGTERM, signal.SIGINT)


def end_on_signals(published: Path | None) -> None:
    """From now on SIGTERM ends this process with code 143 and SIGINT with 130, within moments.

    A thread does it: Python's own handlers wait for the main thread, which may be in the middle of
    a backward pass. Checkpoints are whole or not there, so nothing is cleaned up but `published`,
    the directory of this run's weights (None: another rank's to remove).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in _ENDING:
        signal.signal(number, lambda number, frame: None)  # without one nothing is written
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end, args=[reader, published], name="signals", daemon=True).start()


def _end(reader: int, published: Path | None) -> None:
    number = os.read(reader, 1)[0]
    while number not in _ENDING:
        number = os.read(reader, 1)[0]
    if published is not None:
        remove_whole(published)
    os._exit(128 + number)
