"""What others say goes into logs and journals not too often, and not at any length."""

from __future__ import annotations

import logging
import time

MAX_TEXT = 2000
"""Characters of a reason or a name that another program gave."""
EVERY_S = 10.0


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """The text, or its first and last characters and how many there were: `limit` at most."""
    if len(text) <= limit:
        return text
    mark = f" ... ({len(text)} characters) ... "
    end = (limit - len(mark)) // 4
    return text[: limit - len(mark) - end] + mark + text[-end:]


class Seldom:
    """Warnings of one kind that may come by the thousand: the first is logged at once, then one
    every EVERY_S with the number of those between."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said_at: float | None = None
        self._num_unsaid = 0

    def warning(self, text: str) -> None:
        now = time.monotonic()
        if self._said_at is not None and now - self._said_at < EVERY_S:
            self._num_unsaid += 1
            return
        more = f" ({self._num_unsaid} more like it before)" if self._num_unsaid else ""
        self._log.warning("%s%s", cut(text), more)
        self._said_at, self._num_unsaid = now, 0
