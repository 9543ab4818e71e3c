"""Transport `disk`: versions as directories that generators read when they like."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.schema import WeightsSection
from asyncrl.types import WeightId
from asyncrl.weights_dir import Written, prune, write_version
from learner.snapshots import Snapshot
from learner.weights_out import News

Announce = Callable[[WeightId, Path, str], None]
"""Called in the publisher's thread with weights, directory and digest, once they can be read."""


class DiskSender:
    """Writes, announces and prunes."""

    def __init__(self, config: WeightsSection, root: Path, *, announce: Announce) -> None:
        """ValueError where `root` cannot be written to."""
        self.where = f"in {root}"
        self._config = config
        self._root = root
        self._announce = announce
        self.failing_since: float | None = None
        self._written: tuple[WeightId, Written] | None = None
        """The last version that is whole on the disk."""
        self._write_s = 0.0
        _check_writable(root)

    def publish(self, snapshot: Snapshot) -> None:
        assert snapshot.weights is not None
        started = time.monotonic()
        if self._written is None or self._written[0] != snapshot.weights:
            self._written = snapshot.weights, self._write(snapshot.weights, snapshot)
        written = self._written[1]
        self._announce(snapshot.weights, written.location, written.digest)
        self._write_s = time.monotonic() - started
        prune(self._root, keep=self._config.keep)

    def _write(self, weights: WeightId, snapshot: Snapshot) -> Written:
        return write_version(
            self._root,
            weights,
            snapshot.tensors,
            bucket_bytes=self._config.bucket_bytes,
            max_bytes_per_s=self._config.max_bytes_per_s,
        )

    def attend(self, snapshot: Snapshot, news: News) -> None:
        """Readers need nobody."""

    def metrics(self) -> dict[str, float]:
        return {"write_s": self._write_s}

    def close(self) -> None:
        """Nothing is held."""


def _check_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / ".writable").touch()
    except OSError as error:
        raise ValueError(
            f"weights cannot be published in {root}: {error}: set weights.dir"
        ) from None
