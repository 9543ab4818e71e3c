"""The buffer's status, asked for again and again without ever waiting for the answer."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from asyncrl.client import RefusedError, Unreachable
from asyncrl.messages import Hello, StatusRequest
from asyncrl.thread_client import ThreadClient
from asyncrl.wire import Packet

_DEADLINE_S = 3.0


class Monitor:
    """`look` takes in what has come; `status` is the newest answer, `asked_at` when it was asked
    for (time.monotonic)."""

    def __init__(self, address: str, *, run_id: str | None) -> None:
        hello = Hello.here("monitor", name="launcher", run_id=run_id)
        self._client = ThreadClient(address, hello=hello)
        self._pending: Future[Packet] | None = None
        self._pending_since = 0.0
        self.status: dict[str, Any] | None = None
        self.asked_at = 0.0

    def look(self) -> None:
        if self._pending is not None:
            if not self._pending.done():
                return
            self._take(self._pending)
        self._pending_since = time.monotonic()
        self._pending = self._client.call_soon(StatusRequest(), deadline_s=_DEADLINE_S)

    def _take(self, answer: Future[Packet]) -> None:
        try:
            self.status = answer.result().message.values
            self.asked_at = self._pending_since
        except (Unreachable, RefusedError):
            pass  # it is busy, gone or leaving: its process tells

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self._client.close()
