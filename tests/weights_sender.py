"""The sending side of a broadcast in tests: a version in memory, a meeting, slices one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl import messages, process_groups
from asyncrl.manifest import Layout, Manifest, describe
from asyncrl.process_groups import Disposable, Group, Meeting
from asyncrl.types import WeightId

BUCKET_BYTES = 1 << 12
ROSTER = 7


@dataclass
class Version:
    """What is sent: a flat buffer and its manifest."""

    manifest: Manifest
    flat: torch.Tensor

    @classmethod
    def of(cls, weights: WeightId, tensors: Mapping[str, torch.Tensor]) -> Version:
        manifest = Manifest.of(weights, tensors)
        layout = Layout.of((n, (describe(t)["dtype"], tuple(t.shape))) for n, t in tensors.items())
        flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for name, view in layout.tensors(flat).items():
            view.copy_(tensors[name])
        return cls(manifest, flat)

    @property
    def json(self) -> str:
        return self.manifest.model_dump_json()


class Sender:
    """Broadcasts one version to `size` - 1 receivers, in a thread."""

    def __init__(
        self, version: Version, *, size: int = 2, roster: int = ROSTER, stall_s: float = 5.0
    ) -> None:
        self.version = version
        self.num_sent = 0
        self.before_slice: Callable[[int], object] = lambda number: None
        """Called with the number of each slice before it is sent."""
        self.error: BaseException | None = None
        self._size, self._roster, self._stall_s = size, roster, stall_s
        self._meeting = Meeting("127.0.0.1", timeout_s=stall_s)
        self._sending: Disposable[None] | None = None

    def seat(self, rank: int = 1, *, bucket_bytes: int = BUCKET_BYTES) -> messages.Seat:
        """That of a receiver, as the buffer tells it."""
        return messages.Seat(
            roster=self._roster,
            host="127.0.0.1",
            port=self._meeting.port,
            bucket_bytes=bucket_bytes,
            rank=rank,
            size=self._size,
        )

    def start(self, *, bucket_bytes: int = BUCKET_BYTES) -> Sender:
        self._sending = Disposable(lambda: self._send(bucket_bytes), name="test-sender")
        return self

    def wait(self, timeout_s: float = 20) -> None:
        """Until it has sent everything; raises what it could not."""
        assert self._sending is not None
        self._sending.result(timeout_s=timeout_s)

    def _send(self, bucket_bytes: int) -> None:
        prefix = f"weights-{self.version.manifest.weights}-{self._roster}"
        place = process_groups.Seat("127.0.0.1", self._meeting.port, prefix, 0, self._size, "gloo")
        group = Group(
            place,
            device=torch.device("cpu"),
            join_s=self._stall_s,
            stall_s=self._stall_s,
            store=self._meeting.store,
        )
        try:
            for start in range(0, len(self.version.flat), bucket_bytes):
                self.before_slice(self.num_sent)
                group.broadcast(self.version.flat[start : start + bucket_bytes])
                self.num_sent += 1
        finally:
            group.close()


def receiving_threads() -> list[str]:
    """Names of those that live now."""
    names = ("receive-weights", "stage-weights", "leave-weights", "test-sender")
    return [thread.name for thread in threading.enumerate() if thread.name in names]
