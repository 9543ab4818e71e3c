"""Publishing weights without waiting for anybody: a snapshot here, the rest in a thread.

Two snapshots in host memory are used in turn: one is being written, the other holds the newest
version that waits. A newer version overwrites the waiting one, so the latest wins, and as a failed
write is tried again until a newer version supersedes it, the newest is always published in the end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config.schema import WeightsSection
from asyncrl.types import WeightId
from asyncrl.weights_dir import Written, prune, write_version
from learner.policy import Policy

log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause before a failed publication is tried again."""
GIVE_UP_AFTER = 3
"""Times weights.timeout_s without a publication, while one waits, that end the run."""

Announce = Callable[[WeightId, Path, str], None]
"""Called in the writer's thread with weights, directory and digest, once they can be read."""


@dataclass(slots=True)
class _Snapshot:
    """One of the two sets of host tensors, in wire dtype, allocated at first use."""

    weights: WeightId | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def copy_in(self, name: str, tensor: Tensor) -> None:
        if name not in self.tensors:
            self.tensors[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        self.tensors[name].copy_(tensor)


class Publisher:
    """Takes snapshots on the training thread and writes them from a thread of its own.

    Every rank has one and calls `snapshot` alike; only the lead's writes.
    """

    def __init__(
        self,
        config: WeightsSection,
        root: Path,
        *,
        dtype: torch.dtype,
        is_lead: bool,
        announce: Announce,
    ) -> None:
        """ValueError where the lead cannot write under `root`."""
        self._config = config
        self._root = root
        self._dtype = dtype
        self._announce = announce
        self._slots = [_Snapshot(), _Snapshot()] if is_lead else []
        self._state = threading.Condition()
        self._sending: _Snapshot | None = None
        self._pending: _Snapshot | None = None
        self._closed = False
        self.snapshot_s = 0.0
        """How long the last snapshot held up training."""
        self.write_s = 0.0
        """How long the last publication took, from first byte to announcement."""
        self.num_published = 0
        self.num_failed = 0
        """Tries that failed; each is made again, or superseded by a newer version."""
        self._error = ""
        self._waiting_since: float | None = None
        """When the oldest snapshot was taken after which nothing was published."""
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        if is_lead:
            _check_writable(root)
            self._thread.start()

    def snapshot(self, policy: Policy, weights: WeightId) -> None:
        """Copies the policy's weights, to be published as `weights`. A collective of all ranks.

        Waits for no reader, no disk and no earlier version. RuntimeError, naming the tensor, when a
        weight is not finite: then nothing is published.
        """
        started = time.monotonic()
        slot = self._take_slot()
        for name, tensor in policy.gather(self._dtype):
            if slot is not None:
                slot.copy_in(name, tensor)
        if slot is not None:
            slot.weights = weights
            with self._state:
                self._pending = slot
                self._waiting_since = self._waiting_since or time.monotonic()
                self._state.notify_all()
        self.snapshot_s = time.monotonic() - started

    def trouble(self) -> str:
        """What keeps weights from being published, and since when; empty when nothing does."""
        with self._state:
            if not self._error or self._waiting_since is None:
                return ""
            waited_s = time.monotonic() - self._waiting_since
            return f"weights are not published since {waited_s:.0f} s: {self._error}"

    def why_give_up(self) -> str:
        """Why training on makes no sense, as no generator gets new weights; empty when it does."""
        limit_s = GIVE_UP_AFTER * self._config.timeout_s
        with self._state:
            if self._waiting_since is None or time.monotonic() - self._waiting_since < limit_s:
                return ""
            cause = self._error or "writing them has not ended"
        return (
            f"no weights could be published in {self._root} for {limit_s:g} s ({GIVE_UP_AFTER} "
            f"times weights.timeout_s): {cause}"
        )

    def metrics(self) -> dict[str, float]:
        """Seconds of the last snapshot and of the last publication, and counts of publications."""
        return {
            "publish/snapshot_s": self.snapshot_s,
            "publish/write_s": self.write_s,
            "publish/num_published": float(self.num_published),
            "publish/num_failed": float(self.num_failed),
        }

    def close(self, *, drain_s: float) -> bool:
        """Waits until the newest snapshot is published, at most `drain_s`; True if it is. Else it
        is given up: nothing is begun any more."""
        with self._state:
            drained = self._state.wait_for(
                lambda: self._pending is None and self._sending is None, timeout=drain_s
            )
            self._closed, self._pending = True, None
            self._state.notify_all()
        if not drained and drain_s:
            log.warning("the newest weights were not published within %.0f s", drain_s)
        return drained

    def _take_slot(self) -> _Snapshot | None:
        """The snapshot that is not being sent; what waited in it is superseded."""
        with self._state:
            self._pending = None
            return next((slot for slot in self._slots if slot is not self._sending), None)

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._pending is not None or self._closed)
                if self._pending is None:
                    return
                self._sending, self._pending = self._pending, None
            is_published = self._send(self._sending)
            with self._state:
                self._sending = None
                if is_published:
                    self._error = ""
                    self._waiting_since = time.monotonic() if self._pending is not None else None
                self._state.notify_all()

    def _send(self, snapshot: _Snapshot) -> bool:
        """Writes, announces and prunes; again after a failure, until something newer waits."""
        assert snapshot.weights is not None
        started = time.monotonic()
        written: Written | None = None
        while True:
            try:
                written = written or self._write(snapshot)
                self._announce(snapshot.weights, written.location, written.digest)
                break
            except Exception as error:  # whatever it is: training goes on, and the cause is said
                if self._closed:
                    return False
                log.warning("weights %s are not published yet: %s", snapshot.weights, error)
                self.num_failed += 1
                self._error = f"{type(error).__name__}: {error}"
            with self._state:
                if self._state.wait_for(self._is_superseded, timeout=RETRY_S):
                    return False
        self.write_s = time.monotonic() - started
        self.num_published += 1
        prune(self._root, keep=self._config.keep)
        return True

    def _write(self, snapshot: _Snapshot) -> Written:
        assert snapshot.weights is not None
        return write_version(
            self._root,
            snapshot.weights,
            snapshot.tensors,
            bucket_bytes=self._config.bucket_bytes,
            max_bytes_per_s=self._config.max_bytes_per_s,
        )

    def _is_superseded(self) -> bool:
        return self._pending is not None or self._closed


def _check_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".writable").touch()
    except OSError as error:
        raise ValueError(
            f"weights cannot be published in {root}: {error}: set weights.dir"
        ) from None
