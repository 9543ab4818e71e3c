"""The two sides of a learner that trains a recorded run once more: its journal has the batches, and
the digests of the versions that it published. No buffer, no generator, nothing is published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from asyncrl.journal.recorded import RecordedRun
from asyncrl.manifest import weights_digest
from asyncrl.messages import Batch, End, Heartbeat, Record, Registered
from asyncrl.types import WeightId
from asyncrl.wire import Packet
from learner.buffer_line import failed_end, share
from learner.policy import Policy
from learner.ranks import Ranks

log = logging.getLogger(__name__)


class JournalLine:
    """The batches that a recorded run has trained, in their order, up to its last commit or
    `max_steps`. The lead reads, and passes on to the other ranks."""

    is_recorded = True

    def __init__(self, recorded: RecordedRun, *, ranks: Ranks, max_steps: int | None) -> None:
        self._recorded = recorded
        self._ranks = ranks
        self._max_steps = max_steps
        self._reader = ThreadPoolExecutor(1, "journal") if ranks.is_lead else None
        self._next: Future[Packet] | None = None

    def give_signs_of_life(self, look: Callable[[], Heartbeat]) -> None:
        """Nobody looks."""

    def register(self, *, checkpoint_version: int, config_digest: str) -> Registered:
        """ValueError when the batches from that version on are not all there."""
        if self._ranks.is_lead:
            self._check_batches(since=checkpoint_version)
        return Registered(inc=1, committed=checkpoint_version)

    def fetch(self, step: int) -> None:
        if self._reader is not None:
            self._next = self._reader.submit(self._read, step)

    def next_reply(self, *, give_up: str = "") -> Packet:
        """A Batch, or the End where the recorded run has trained no further; it has failed when a
        batch has been deleted meanwhile."""
        return share(self._next.result() if self._next is not None else None, self._ranks)

    def commit(self, version: int, metrics: dict[str, float]) -> bool:
        return False

    def checkpointed(self, versions: list[int]) -> None:
        """The record is only read."""

    def close(self, reason: str) -> None:
        if self._reader is not None:
            self._reader.shutdown()

    def _check_batches(self, *, since: int) -> None:
        end = self._recorded.committed()
        if since > end:
            raise ValueError(
                f"the checkpoint is of version {since}, but {self._recorded.path} has committed "
                f"{end} steps only: the checkpoint is of another run"
            )
        missing = self._recorded.missing_steps(since=since, before=self._last(end))
        if missing:
            raise ValueError(
                f"the checkpoint is of version {since}, but in {self._recorded.path} the batches "
                f"of {len(missing)} later steps are deleted, up to step {missing[-1]}"
            )

    def _read(self, step: int) -> Packet:
        committed = self._recorded.committed()
        if step >= self._last(committed):
            reason = f"{step} of the {committed} steps that {self._recorded.path} has trained"
            return Packet(0, End(reason=reason, records=[]))
        try:
            batch = self._recorded.batch(step)
        except ValueError as error:
            return failed_end(str(error))
        message = Batch(
            step=step,
            max_staleness=batch.row.max_staleness,
            replayed=False,  # in this run directory it is the first time
            records=[Record.model_validate_json(batch.row.record)],
        )
        return Packet(0, message, batch.frames)

    def _last(self, committed: int) -> int:
        return committed if self._max_steps is None else min(committed, self._max_steps)


class DigestCheck:
    """Compares every version with the one that the recorded run published, if it did."""

    def __init__(self, recorded: RecordedRun, *, dtype: torch.dtype, is_lead: bool) -> None:
        """`dtype`: the type in which weights are published."""
        self._recorded = recorded
        self._dtype = dtype
        self._is_lead = is_lead
        self._is_same: dict[int, bool] = {}
        """Of the versions that were compared."""
        self._newest: bool | None = None

    def snapshot(self, policy: Policy, weights: WeightId) -> None:
        """Compares the policy's weights. The first difference is a warning."""
        named = ((name, tensor.cpu()) for name, tensor in policy.gather(self._dtype))
        if not self._is_lead:
            for _ in named:  # all ranks gather
                pass
            return
        found, expected = weights_digest(named), self._recorded.digest(weights.version)
        self._newest = None if expected is None else found == expected
        if expected is None:
            return
        if found != expected and all(self._is_same.values()):
            log.warning(
                "fork: version %d has digest %.12s, the recorded run published %.12s: from here on "
                "the parameters are others",
                *(weights.version, found, expected),
            )
        self._is_same[weights.version] = found == expected

    def trouble(self) -> str:
        return ""

    def why_give_up(self) -> str:
        return ""

    def metrics(self) -> dict[str, float]:
        """Whether the newest version has the recorded digest; empty where there is none."""
        return {} if self._newest is None else {"replay/same_digest": float(self._newest)}

    def close(self, *, drain_s: float) -> bool:
        """Says how many versions were the same."""
        if not self._is_same:
            log.info("no version was compared: the recorded run published none of these")
            return True
        num_same, first, last = sum(self._is_same.values()), min(self._is_same), max(self._is_same)
        level = logging.INFO if num_same == len(self._is_same) else logging.WARNING
        log.log(
            level,
            "%d of %d published versions (%d to %d) have the digest of the recorded run",
            *(num_same, len(self._is_same), first, last),
        )
        return True
