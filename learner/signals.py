"""SIGTERM and SIGINT end a learner at once, also while torch computes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from asyncrl.disk import remove_whole
from asyncrl.end_now import end_now

_ENDING = (signal.SIGTERM, signal.SIGINT)


class EndOnSignals:
    """As long as this exists SIGTERM ends this process with code 143 and SIGINT with 130.

    A thread does it: Python's own handlers wait for the main thread, which may be in the middle of
    a backward pass. Checkpoints are whole or not there, so nothing is cleaned up but the directory
    of this run's weights.
    """

    def __init__(self, published: Path | None) -> None:
        """`published` is that directory (None: another rank's to remove)."""
        self.say_goodbye: Callable[[str], None] = lambda reason: None
        """Called last, with the reason in words; takes a second, in which the process may be
        killed by whoever has sent the signal."""
        self.stop_publishing: Callable[[], object] = lambda: None
        """Called first: who publishes on would make the directory anew."""
        self._published = published
        self._has_come = threading.Event()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in _ENDING:
            signal.signal(number, lambda number, frame: None)  # without one nothing is written
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._end, args=[reader], name="signals", daemon=True).start()

    def hold(self) -> None:
        """Does not return once a signal has come: then whatever failed has failed by that, as the
        other ranks end too."""
        if self._has_come.is_set():
            threading.Event().wait()

    def _end(self, reader: int) -> None:
        number = os.read(reader, 1)[0]
        while number not in _ENDING:
            number = os.read(reader, 1)[0]
        self._has_come.set()
        try:
            self.stop_publishing()
            if self._published is not None:
                remove_whole(self._published)
            self.say_goodbye(f"ended by {signal.Signals(number).name}")
        finally:
            end_now(128 + number)
