"""Transport `collective`: broadcasts a version to the generators that are ready for it.

One broadcast is a group of its own, for one roster: rendezvous, then the snapshot's flat buffer
slice by slice. What the generators say over the buffer decides, not the group: those that have not
got the version say why, and are in the next roster. Groups live in threads that nobody waits for.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from asyncrl.backends import choose_backend
from asyncrl.config.schema import WeightsSection
from asyncrl.manifest import Manifest
from asyncrl.messages import (
    AwaitStaged,
    CloseRoster,
    Message,
    OpenGroup,
    Outcome,
    Published,
    Roster,
)
from asyncrl.process_groups import Disposable, GroupError, Meeting, Seat
from asyncrl.types import WeightId
from asyncrl.wire import Frame, Packet
from learner.snapshots import Snapshot
from learner.transfer import Transfer, slice_bytes
from learner.weights_out import News

log = logging.getLogger(__name__)


class ToBuffer(Protocol):
    """The way to the buffer, from the publisher's thread."""

    def ask(self, message: Message) -> Future[Packet]:
        """Sends a request; the answer comes later."""

    def tell(self, message: Message, frames: tuple[Frame, ...] = ()) -> Packet | None:
        """Sends a request and waits for the answer; None when the run has ended meanwhile."""


LEAVE_S = 2.0
"""After a broadcast that failed here, the others find out within weights.stall_timeout_s; so much
more is allowed for saying so."""


class LostError(RuntimeError):
    """No generator of a roster has got the version."""


@dataclass(slots=True)
class _Times:
    """Seconds of the phases of the last version."""

    describe_s: float = 0.0
    rendezvous_s: float = 0.0
    transfer_s: float = 0.0
    staged_s: float = 0.0
    """From the offer to the last generator of the first roster."""


class CollectiveSender:
    """Offers a version, and broadcasts it to one roster after the other."""

    def __init__(
        self, config: WeightsSection, *, host: str, device: torch.device, buffer: ToBuffer
    ) -> None:
        """Listens at `host`; with NCCL, sends from `device`. Raises ValueError when `host` is not
        an address of this machine, or there is no GPU for NCCL."""
        self.where = f"at {host} (weights.host)"
        self.failing_since: float | None = None
        self._config = config
        self._host = host
        self._device = device
        self._buffer = buffer
        self._times = _Times()
        self._offered_at = 0.0
        self._has_arrived = False
        """Whether some generator has got the version on offer."""
        self._is_refused = False
        """Whether refusals were the last that was heard."""
        self._num_rosters = self._num_lost = 0
        _check_host(host)
        if config.backend == "nccl" and device.type == "cpu":
            raise ValueError("weights.backend: nccl, but the learner has no GPU: use auto or gloo")

    def publish(self, snapshot: Snapshot) -> None:
        assert snapshot.weights is not None
        started = time.monotonic()
        manifest = Manifest.of(snapshot.weights, snapshot.tensors)
        self._times = _Times(describe_s=time.monotonic() - started)
        inc, version = snapshot.weights
        message = Published(
            inc=inc, version=version, transport="collective", digest=manifest.digest
        )
        self._buffer.tell(message, (manifest.model_dump_json().encode(),))
        self._offered_at, self._has_arrived = time.monotonic(), False

    def attend(self, snapshot: Snapshot, news: News) -> None:
        """One roster after the other, of whoever is ready. Raises LostError when all of one were
        lost."""
        assert snapshot.weights is not None
        inc, version = snapshot.weights
        while not news.is_there:
            asked = self._buffer.ask(CloseRoster(inc=inc, version=version))
            if not news.or_done(asked):
                return  # a later offer ends the request
            roster: Roster = asked.result().message
            if roster.is_over:
                self.publish(snapshot)
            for name, reason in roster.refusals.items():
                log.warning("%s does not take weights %s: %s", name, snapshot.weights, reason)
            if roster.members:
                self._send_to(roster, snapshot)
            elif roster.refusals:
                self._is_refused = True
                self._fail("; ".join(roster.refusals.values()))
            elif not self._is_refused:
                self.failing_since = None  # who was lost asks no more: it may be back, or not

    def metrics(self) -> dict[str, float]:
        return {
            **asdict(self._times),
            "num_rosters": float(self._num_rosters),
            "num_lost": float(self._num_lost),
        }

    def close(self) -> None:
        """A broadcast under way ends by itself."""

    def _send_to(self, roster: Roster, snapshot: Snapshot) -> None:
        """One broadcast, from rendezvous to what became of it."""
        self._num_rosters += 1
        deadline = time.monotonic() + self._config.timeout_s
        error = self._broadcast(roster, snapshot, deadline=deadline)
        if error:
            deadline = time.monotonic() + self._config.stall_timeout_s + LEAVE_S
        assert snapshot.weights is not None
        outcome = self._outcome(snapshot.weights, roster, deadline=deadline)
        self._times.staged_s = self._times.staged_s or time.monotonic() - self._offered_at
        failed = outcome.failed | dict.fromkeys(outcome.missing, "nothing was heard from it")
        self._num_lost += len(failed)
        for name, reason in failed.items():
            log.warning("%s has not got weights %s: %s", name, snapshot.weights, reason)
        if outcome.staged:
            self.failing_since, self._has_arrived, self._is_refused = None, True, False
        elif failed or error:
            self._fail(error or "; ".join(f"{name}: {why}" for name, why in failed.items()))

    def _broadcast(self, roster: Roster, snapshot: Snapshot, *, deadline: float) -> str:
        """Returns what went wrong here; empty: nothing."""
        weights, flat = snapshot.weights, snapshot.flat
        assert weights is not None and flat is not None
        devices = {member.name: member.devices for member in roster.members}
        backend, refused = choose_backend(self._config.backend, _device_id(self._device), devices)
        for name, why in refused.items():
            log.warning("%s cannot be sent weights %s: %s", name, weights, why)
        seated = [devices[name] for name in devices if name not in refused]
        meeting = Meeting(self._host, timeout_s=self._config.stall_timeout_s)
        seat = Seat(
            host=meeting.host,
            port=meeting.port,
            prefix=f"weights-{weights}-{roster.roster}",
            rank=0,
            size=1 + sum(map(len, seated)),
            backend=backend,
        )
        try:
            self._open(roster, weights, seat, refused)
        except BaseException:
            meeting.close()
            raise
        if not seated:
            self._is_refused = True
            meeting.close()
            return "; ".join(refused.values())
        device = self._device if backend == "nccl" else torch.device("cpu")
        transfer = Transfer(self._config, meeting, seat, device=device, deadline=deadline)
        work = Disposable(lambda: transfer.send(flat), name="broadcast")
        try:
            work.result(timeout_s=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return transfer.too_long()
        except GroupError as error:
            return str(error)
        finally:
            self._times.rendezvous_s = transfer.rendezvous_s
            self._times.transfer_s = transfer.transfer_s
        return ""

    def _open(self, roster: Roster, weights: WeightId, seat: Seat, refused: dict[str, str]) -> None:
        """Tells those of the roster that are not refused where to come."""
        self._buffer.tell(
            OpenGroup(
                inc=weights.inc,
                version=weights.version,
                roster=roster.roster,
                host=seat.host,
                port=seat.port,
                backend=seat.backend,
                bucket_bytes=slice_bytes(self._config),
                refused=refused,
            )
        )

    def _outcome(self, weights: WeightId, roster: Roster, *, deadline: float) -> Outcome:
        """When everybody has left the group, or at `deadline`."""
        while True:
            message = AwaitStaged(
                inc=weights.inc,
                version=weights.version,
                roster=roster.roster,
                wait_s=max(0.0, deadline - time.monotonic()),
            )
            packet = self._buffer.tell(message)
            outcome: Outcome = packet.message if packet is not None else Outcome()
            if not outcome.missing or time.monotonic() > deadline:
                return outcome

    def _fail(self, reason: str) -> None:
        if not self._has_arrived:
            self.failing_since = self.failing_since or time.monotonic()
        raise LostError(reason)


def _device_id(device: torch.device) -> str:
    """As in messages.Ready."""
    return "cpu" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _check_host(host: str) -> None:
    try:
        Meeting(host, timeout_s=1.0).close()
    except OSError as error:
        raise ValueError(
            f"weights.host: cannot listen at {host}: {error.strerror}: name an address of the "
            "learner's machine, or use weights.transport=disk"
        ) from None
