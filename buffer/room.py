"""How much the journal holds and may hold (buffer.max_journal_gb): whether there is room for one
more prompt, when a checkpoint is needed to let older groups go, and when nothing can help."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.journal.cap import (
    cap_bytes,
    check_cap,
    in_gb,
    largest_group_bytes,
    segment_bytes,
)
from asyncrl.journal.memory import MemoryJournal
from asyncrl.journal.segments import CHECKSUM_BYTES
from asyncrl.journal.tables import PayloadRef
from asyncrl.wire import Frame
from buffer.groups import FATES, OPEN
from buffer.ledger import Ledger
from buffer.training import Training

log = logging.getLogger(__name__)

AnyJournal = Journal | MemoryJournal


def open_journal(directory: Path, config: Config) -> AnyJournal:
    """The journal of a run directory, as buffer.durability says. Raises ValueError as its class
    does, and when payloads are to be kept that are not."""
    durability = config.buffer.durability
    if durability == "none" and config.buffer.keep_payloads == "always":
        raise ValueError(
            "buffer.keep_payloads: always, but buffer.durability=none keeps nothing that a later "
            "program could read: use durability=process, or keep_payloads=until_checkpoint"
        )
    if durability == "none":
        return MemoryJournal(directory)
    return Journal(directory, durability=durability, segment_bytes=segment_bytes(config))


class JournalRoom:
    """The space of one journal. Each group that is handed out has the space of the largest one
    reserved until it comes in, so the payloads never take more than the cap.

    From `low_bytes` on, space is saved: the texts of filtered groups are not stored, and each
    commit asks for a checkpoint. What is left above it is enough for the run to go on until the
    checkpoints have let the older steps go: those of keep_last checkpoints in a row, of the
    max_staleness + 1 steps that may be outstanding, and of max_staleness more that may lie in
    between them in the segments.
    """

    def __init__(
        self, config: Config, *, journal: AnyJournal, ledger: Ledger, training: Training
    ) -> None:
        """ValueError, with the numbers, for a cap that the run would be stuck at."""
        self._journal = journal
        self._ledger = ledger
        self._training = training
        self._options = config.buffer
        self._group_bytes = largest_group_bytes(config)
        self.cap_bytes = cap_bytes(config)
        self.low_bytes = min(self.cap_bytes // 2, self.cap_bytes - check_cap(config))
        self._retained = self.retain()
        self._has_warned = False

    @property
    def used_bytes(self) -> int:
        """Stored, and reserved for groups that are handed out."""
        counts = self._ledger.groups.counts
        num_open = sum(counts[state] for state in OPEN)
        return self._journal.num_bytes + num_open * self._group_bytes

    def may_lease(self) -> bool:
        """Whether there is room for the next lease. A group that was handed out before has its
        space."""
        if self._ledger.groups.first_waiting() is not None:
            return True
        return self.used_bytes + self._group_bytes <= self.cap_bytes

    def store(self, frame: Frame, *, is_filtered: bool) -> PayloadRef | None:
        """Where the group lies, from the next save on; None for a filtered one without space."""
        if is_filtered and (self._is_low or isinstance(self._journal, MemoryJournal)):
            return None
        self._group_bytes = max(self._group_bytes, len(frame) + CHECKSUM_BYTES)
        return self._journal.append(frame, is_read_soon=not is_filtered)

    def retain(self) -> Future[None]:
        """Deletes payloads that no checkpoint can ask for. The future completes when they are
        gone."""
        if self._options.keep_payloads == "always":
            self._retained = Future()
            self._retained.set_result(None)
        else:
            self._retained = self._journal.retain(
                from_step=self._training.oldest_step, settled=[state.value for state in FATES]
            )
        return self._retained

    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint of the learner's version, now, would help."""
        if not (self._is_low and self._is_freeable):
            return False
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the journal has %s of %s in use (buffer.max_journal_gb): from now on each step "
                "ends with a checkpoint as long as there is more than %s, and filtered groups are "
                "kept without their text",
                *(in_gb(self.used_bytes), in_gb(self.cap_bytes), in_gb(self.low_bytes)),
            )
        return True

    def needs_checkpoint(self) -> bool:
        """Whether the run cannot go on without one: the learner waits for groups that there is no
        room for."""
        return self._is_blocked and self._is_freeable

    def why_stuck(self) -> str | None:
        """Why the run cannot go on at all, with the numbers; or None."""
        if not self._is_blocked or self._is_freeable:
            return None
        options, position = self._options, self._training.position
        reason = f"the learner waits at version {position}, that of its oldest checkpoint, so none"
        if options.keep_payloads == "always":
            reason = "buffer.keep_payloads=always lets none go, and no checkpoint"
        return (
            f"the journal is full: {in_gb(self._journal.num_bytes)} of finished groups are stored, "
            f"buffer.max_journal_gb={options.max_journal_gb:g} allows {in_gb(self.cap_bytes)}, and "
            f"one more group may take {in_gb(self._group_bytes)}; {reason} can make room. Raise "
            "buffer.max_journal_gb and go on with checkpoint.resume=auto"
        )

    def full_text(self) -> str:
        """What there is no room for, and what will make some."""
        return (
            f"the journal has no room for another group of up to {in_gb(self._group_bytes)}: "
            f"{in_gb(self.used_bytes)} of {in_gb(self.cap_bytes)} (buffer.max_journal_gb) are in "
            "use; the learner's next checkpoint makes some"
        )

    def values(self) -> dict[str, str | int]:
        """For status."""
        return {
            "durability": self._options.durability,
            "num_bytes": self._journal.num_bytes,
            "cap_bytes": self.cap_bytes,
        }

    @property
    def _is_low(self) -> bool:
        return self.used_bytes > self.low_bytes

    @property
    def _is_freeable(self) -> bool:
        """Whether checkpoints can still let steps go, or are doing so."""
        if self._options.keep_payloads == "always":
            return False
        return self._training.oldest_step < self._training.position or not self._retained.done()

    @property
    def _is_blocked(self) -> bool:
        """The learner has trained all there is, nothing is in flight, and there is no room."""
        policy, counts = self._ledger.policy, self._ledger.groups.counts
        if self.may_lease() or any(counts[state] for state in OPEN):
            return False
        is_waiting = self._training.position == policy.next_step and not policy.can_assign()
        return is_waiting and policy.can_admit()
