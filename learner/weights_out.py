"""Publishing weights without waiting for anybody: a snapshot here, the rest in a thread.

Two snapshots in host memory are used in turn: one is being published, the other holds the newest
version that waits. A newer version overwrites the waiting one, so the latest wins, and as what
failed is tried again until a newer version supersedes it, the newest is always published in the
end. How a version gets to the generators is a Sender's: disk_sender.py, collective_sender.py.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from asyncrl.config.schema import WeightsSection
from asyncrl.types import WeightId
from learner.policy import Policy
from learner.snapshots import Snapshot

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause before what failed is tried again, but for the first time."""
GIVE_UP_AFTER = 3
"""Times weights.timeout_s without a publication, while one waits, that end the run."""


class Sender(Protocol):
    """Takes versions to the generators; used from the publisher's thread alone."""

    where: str
    """Where generators find them, in words."""
    failing_since: float | None
    """Since when no generator that asked was sent what it asked for (monotonic seconds)."""

    def publish(self, snapshot: Snapshot) -> None:
        """Makes it known, and possible, that generators take it. Any error means: again later."""

    def attend(self, snapshot: Snapshot, news: News) -> None:
        """Does what generators ask for from then on; returns soon after there is news."""

    def metrics(self) -> dict[str, float]:
        """Seconds of the phases of the last version."""

    def close(self) -> None:
        """Nothing is sent any more."""


class News:
    """Whether something newer waits, or nothing is to be published any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_there = False

    def set(self, is_there: bool) -> None:
        with self._changed:
            self._is_there = is_there
            self._changed.notify_all()

    @property
    def is_there(self) -> bool:
        return self._is_there

    def or_done(self, future: Future[Any]) -> bool:
        """Waits for news or the end of `future`, whichever is first; whether `future` has ended."""
        future.add_done_callback(lambda _: self._wake())
        with self._changed:
            self._changed.wait_for(lambda: self._is_there or future.done())
        return future.done()

    def within(self, seconds: float) -> bool:
        """Waits for news; whether there is any."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_there, timeout=seconds)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Publisher:
    """Takes snapshots on the training thread and has them sent from a thread of its own.

    Every rank has one and calls `snapshot` alike; only the lead's has a sender.
    """

    def __init__(
        self, config: WeightsSection, sender: Sender | None, *, dtype: torch.dtype
    ) -> None:
        """`sender` is None on all ranks but the lead."""
        self._config = config
        self._dtype = dtype
        self._sender = sender
        self._slots = [Snapshot(), Snapshot()] if sender is not None else []
        self._state = threading.Condition()
        self._current: Snapshot | None = None
        """What is being published, or was last."""
        self._pending: Snapshot | None = None
        self._is_published = True
        """Whether `_current` is."""
        self._closed = False
        self._news = News()
        self.snapshot_s = 0.0
        """How long the last snapshot held up training."""
        self.gather_s = 0.0
        """How much of it went into the shards of other ranks."""
        self.blocked_s = 0.0
        """How long all of them did."""
        self.num_published = 0
        self.num_failed = 0
        """Tries that failed; each is made again, or superseded by a newer version."""
        self._error = ""
        self._waiting_since: float | None = None
        """When the oldest snapshot was taken after which nothing was published."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        if sender is not None:
            self._thread.start()

    def snapshot(self, policy: Policy, weights: WeightId) -> None:
        """Copies the policy's weights, to be published as `weights`. A collective of all ranks.

        Waits for no generator, no disk and no earlier version.
        """
        started = time.monotonic()
        slot = self._take_slot()
        if slot is not None:
            slot.allocate(policy, self._dtype)
        self.gather_s = policy.copy_into(slot.tensors if slot is not None else {}, self._dtype)
        if slot is not None:
            slot.weights = weights
            with self._state:
                self._pending = slot
                self._waiting_since = self._waiting_since or time.monotonic()
                self._tell()
        self.snapshot_s = time.monotonic() - started
        self.blocked_s += self.snapshot_s

    def trouble(self) -> str:
        """What keeps weights from being published, and since when; empty when nothing does."""
        with self._state:
            since = self._since()
            if not self._error or since is None:
                return ""
            waited_s = time.monotonic() - since
            return f"weights are not published since {waited_s:.0f} s: {self._error}"

    def why_give_up(self) -> str:
        """Why training on makes no sense, as no generator gets new weights; empty when it does."""
        limit_s = GIVE_UP_AFTER * self._config.timeout_s
        with self._state:
            since = self._since()
            if since is None or time.monotonic() - since < limit_s:
                return ""
            cause = self._error or "it has not ended"
        where = self._sender.where if self._sender else ""
        return (
            f"no weights could be published {where} for {limit_s:g} s ({GIVE_UP_AFTER} times "
            f"weights.timeout_s): {cause}"
        )

    def metrics(self) -> dict[str, float]:
        """Seconds of the last snapshot and of the phases of the last publication, and counts."""
        values = {
            "snapshot_s": self.snapshot_s,
            "gather_s": self.gather_s,
            "blocked_s": self.blocked_s,
            "num_published": float(self.num_published),
            "num_failed": float(self.num_failed),
            **(self._sender.metrics() if self._sender else {}),
        }
        return {f"publish/{name}": value for name, value in values.items()}

    def close(self, *, drain_s: float) -> bool:
        """Waits until the newest snapshot is published, at most `drain_s`; True if it is. Else it
        is given up: nothing is begun any more."""
        with self._state:
            drained = self._state.wait_for(
                lambda: self._pending is None and self._is_published, timeout=drain_s
            )
            self._closed, self._pending = True, None
            self._tell()
        if not drained and drain_s:
            log.warning("the newest weights were not published within %.0f s", drain_s)
        if self._sender is not None:
            self._sender.close()
        return drained

    def _since(self) -> float | None:
        """When publishing began to fail, or to take long."""
        return self._waiting_since or (self._sender.failing_since if self._sender else None)

    def _take_slot(self) -> Snapshot | None:
        """The snapshot that is not being sent; what waited in it is superseded."""
        with self._state:
            self._pending = None
            self._tell()
            return next((slot for slot in self._slots if slot is not self._current), None)

    def _tell(self) -> None:
        """The state has changed."""
        self._news.set(self._pending is not None or self._closed)
        self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._pending is not None or self._closed)
                if self._pending is None:
                    return
                self._current, self._pending = self._pending, None
                self._is_published = False
                self._tell()
            self._until_superseded(self._current)

    def _until_superseded(self, snapshot: Snapshot) -> None:
        """Publishes and attends; again after a failure, until something newer waits."""
        assert self._sender is not None
        pause_s = 0.0
        while not self._news.is_there:
            try:
                if not self._is_published:
                    self._sender.publish(snapshot)
                    self._published()
                self._sender.attend(snapshot, self._news)
                return
            except Exception as error:  # whatever it is: training goes on, and the cause is said
                if self._closed:
                    return
                self._failed(snapshot, error)
            self._news.within(pause_s)
            pause_s = RETRY_S

    def _published(self) -> None:
        self.num_published += 1
        with self._state:
            self._is_published, self._error = True, ""
            self._waiting_since = time.monotonic() if self._pending is not None else None
            self._state.notify_all()

    def _failed(self, snapshot: Snapshot, error: Exception) -> None:
        log.warning("weights %s have not reached the generators: %s", snapshot.weights, error)
        self.num_failed += 1
        with self._state:
            self._error = f"{type(error).__name__}: {error}"
