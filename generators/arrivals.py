"""Tensors as they arrive, through two buckets: for an engine without room for a second model."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from asyncrl.process_groups import Disposable, GroupError
from generators.receiver import Receiver


class Arrivals:
    """The tensors of one version, once, in the order of its manifest.

    A thread receives into one bucket while the reader takes tensors out of the other. Tensors that
    lie across buckets are put together; each is verified, and in memory of its own.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._free: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._full: queue.Queue[torch.Tensor | BaseException] = queue.Queue()
        self._bucket: torch.Tensor | None = None
        self._start = self._stop = 0
        """What the bucket in hand holds of the version's flat buffer."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises GroupError when the group breaks, WeightsError for a damaged tensor; the group is
        left by then, as it is by a reader that stops."""
        receiver = self._receiver
        for _ in range(2):
            self._free.put(self._empty(receiver.bucket_bytes))
        filling = Disposable(self._fill, name="receive-weights")
        try:
            for place in receiver.layout.places:
                data = self._empty(place.num_bytes)
                self._read(place.start, data)
                receiver.verify(place.name, data)
                yield place.name, data.view(place.dtype).view(place.shape)
        finally:
            self._free.put(None)
            with suppress(TimeoutError):
                filling.result(timeout_s=2 * receiver.limits.stall_s)

    def _empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._receiver.device)

    def _fill(self) -> None:
        """Runs in the thread: receives into free buckets until nobody takes any more."""
        try:
            if self._receiver.device.type == "cuda":
                torch.cuda.set_device(self._receiver.device)
            with self._receiver.joined() as group:
                for start, stop in self._receiver.slices():
                    bucket = self._free.get()
                    if bucket is None:
                        return
                    group.broadcast(bucket[: stop - start])
                    self._full.put(bucket)
        except BaseException as error:
            self._full.put(error)

    def _read(self, start: int, data: torch.Tensor) -> None:
        """The next bytes that are wanted, from byte `start` of the flat buffer on."""
        done = 0
        while done < len(data):
            bucket = self._bucket_with(start + done)
            offset = start + done - self._start
            count = min(len(data) - done, self._stop - self._start - offset)
            data[done : done + count].copy_(bucket[offset : offset + count])
            done += count

    def _bucket_with(self, byte: int) -> torch.Tensor:
        """The bucket that holds this byte; the one before it is free again."""
        while self._bucket is None or byte >= self._stop:
            if self._bucket is not None:
                if self._bucket.is_cuda:
                    torch.cuda.current_stream(self._bucket.device).synchronize()
                self._free.put(self._bucket)
            self._bucket = self._next_full()
            self._start = self._stop
            self._stop = min(
                self._start + self._receiver.bucket_bytes, self._receiver.layout.num_bytes
            )
        return self._bucket

    def _next_full(self) -> torch.Tensor:
        began = time.monotonic()
        rendezvous_s = self._receiver.rendezvous_s
        try:
            item = self._full.get(timeout=self._receiver.limits.timeout_s)
        except queue.Empty:
            raise GroupError("no bytes came for weights.timeout_s") from None
        finally:
            joining_s = self._receiver.rendezvous_s - rendezvous_s
            self._receiver.transfer_s += time.monotonic() - began - joining_s
        if isinstance(item, BaseException):
            raise item
        return item
