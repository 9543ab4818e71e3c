"""Signs of life, from a thread of their own: a busy or loading process is not a dead one."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from asyncrl.client import RefusedError, Unreachable
from asyncrl.messages import Beat, Heartbeat, Hello, Message
from asyncrl.thread_client import ThreadClient

log = logging.getLogger(__name__)

LAST_S = 0.4
"""How long the answer to the last heartbeat is waited for."""


class HeartbeatThread:
    """Sends what `look` returns every `interval_s` seconds, and at once after `beat_now`."""

    def __init__(
        self,
        address: str,
        *,
        hello: Hello,
        interval_s: float,
        look: Callable[[], Heartbeat],
        on_done: Callable[[], None],
    ) -> None:
        """`look` and `on_done` (the buffer says that the run has ended) run in the thread."""
        self.look = look
        """May be replaced by one that knows more."""
        self.on_void: Callable[[list[list[int]]], None] = lambda void: None
        """Called in the thread with Beat.void, when there is any; may be replaced."""
        self.is_done = False
        """The buffer has said that the run has ended, or is being stopped."""
        self._client = ThreadClient(address, hello=hello)
        self._interval_s = interval_s
        self._on_done = on_done
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """The next heartbeat goes out without delay: something worth telling has changed."""
        self._wake.set()

    def close(self) -> None:
        """A last heartbeat accounts for the time up to now; none is sent any more after this, also
        when the buffer does not answer."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=0.5)
        self._client.close()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        while not self._stopped:
            try:
                # Several beats may be lost before anybody is thought dead: this one may wait.
                packet = self._client.call(self.look(), deadline_s=self._interval_s)
            except Unreachable:
                continue
            except RefusedError as error:
                log.warning("a heartbeat was refused: %s", error)
            else:
                self._heed(packet.message)
            self._wake.wait(self._interval_s)
            self._wake.clear()
        with contextlib.suppress(Unreachable, RefusedError):
            self._client.call(self.look(), deadline_s=LAST_S)

    def _heed(self, beat: Message) -> None:
        if not isinstance(beat, Beat):
            return
        if beat.void:
            self.on_void(beat.void)
        if beat.done:
            self.is_done = True
            self._on_done()
