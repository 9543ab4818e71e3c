"""The sender's part in one broadcast: meets the others, then sends a flat buffer slice by slice."""

from __future__ import annotations

import time

import torch

from asyncrl.config.schema import WeightsSection
from asyncrl.process_groups import Group, GroupError, Meeting, Seat


def slice_bytes(config: WeightsSection) -> int:
    """Of one slice. A slow sender makes them smaller, so that none seems to stall."""
    if config.max_bytes_per_s is None:
        return config.bucket_bytes
    return max(
        1, min(config.bucket_bytes, int(config.max_bytes_per_s * config.stall_timeout_s / 4))
    )


class Transfer:
    """Blocks: for a thread that nobody has to wait for. Use it once."""

    def __init__(
        self,
        config: WeightsSection,
        meeting: Meeting,
        seat: Seat,
        *,
        device: torch.device,
        deadline: float,
    ) -> None:
        """`device` is that of the group; `deadline` is in monotonic seconds."""
        self.rendezvous_s = self.transfer_s = 0.0
        self._config = config
        self._meeting = meeting
        self._seat = seat
        self._device = device
        self._deadline = deadline

    def send(self, flat: torch.Tensor) -> None:
        """Ends at the deadline or one stall later, and closes the meeting. Raises GroupError."""
        started, stall_s = time.monotonic(), self._config.stall_timeout_s
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread would use the first GPU
            group = Group(
                self._seat,
                device=self._device,
                join_s=stall_s,
                stall_s=stall_s,
                store=self._meeting.store,
            )
            self.rendezvous_s = time.monotonic() - started
            try:
                self._send_slices(group, flat)
            except BaseException:
                group.abort()
                raise
            finally:
                group.close()
        finally:
            self._meeting.close()

    def too_long(self) -> str:
        """Why it ends at its deadline."""
        return f"the transfer took longer than weights.timeout_s = {self._config.timeout_s:g}"

    def _send_slices(self, group: Group, flat: torch.Tensor) -> None:
        started, step = time.monotonic(), slice_bytes(self._config)
        for start in range(0, len(flat), step):
            if time.monotonic() > self._deadline:
                raise GroupError(self.too_long())
            part = flat[start : start + step]
            group.broadcast(part)
            if self._config.max_bytes_per_s is not None:
                due = started + (start + len(part)) / self._config.max_bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
        self.transfer_s = time.monotonic() - started
