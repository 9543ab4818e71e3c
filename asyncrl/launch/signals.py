"""SIGINT, SIGTERM and the end of a child process as something to wait for."""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from typing import Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While entered, the two stopping signals do nothing but wake `wait`, which returns them."""

    def __enter__(self) -> Self:
        self._arrived: deque[int] = deque()
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, self._note) for number in (*_STOPPING, signal.SIGCHLD)
        }
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> list[int]:
        """Returns the stopping signals that have come, as soon as there is one, a child has ended,
        or after `timeout_s`."""
        if not self._arrived:
            select.select([self._read], [], [], timeout_s)
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def _note(self, number: int, frame: object) -> None:
        if number in _STOPPING:
            self._arrived.append(number)
