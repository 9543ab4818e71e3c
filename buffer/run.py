"""One run without its sockets: what each request does to ledger, evaluations and journal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.journal.tables import StepRow
from asyncrl.messages import (
    Commit,
    End,
    Record,
    Refused,
    Register,
    Started,
    Submit,
    Verdict,
)
from asyncrl.types import Row, WeightId
from asyncrl.wire import Frame
from buffer.books import Books
from buffer.ending import Ending
from buffer.generation import Generation
from buffer.groups import Group, State
from buffer.members import Member
from buffer.room import AnyJournal
from buffer.submissions import Submissions
from buffer.transfers import Transfers
from buffer.watch import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AssignedBatch:
    """The batch of a step, ready to be sent."""

    step: StepRow
    groups: list[Group]
    replayed: bool


class Run:
    """All state of a run. Methods take the time of a monotonic clock; none waits.

    After every change: `advance`, then `save`, whose future completes when it is on disk.
    """

    def __init__(
        self,
        config: Config,
        *,
        train: Sequence[Row],
        val: Sequence[Row],
        journal: AnyJournal,
        now: float,
    ) -> None:
        """ValueError as of Books."""
        self.config = config
        self.began_at = now
        self.books = Books(config, train=train, val=val, journal=journal, now=now)
        self.watch = Watch(config, self.books, now=now)
        self.members = self.watch.members
        self.transfers = Transfers(self.members)
        self.generation = Generation(config, self.books, self.watch)
        self.submissions = Submissions(config, self.books, self.watch)
        self.ending = Ending(config, self.books, self.members, now=now)
        self._waited_for = ""

    @property
    def end(self) -> End | None:
        """None as long as the run goes on."""
        return self.ending.end

    def started(self, member: Member, message: Started, *, now: float) -> None:
        self.generation.started(member, message, newest=self._newest(), now=now)

    def submit(
        self, member: Member, message: Submit, frames: Sequence[Frame], *, now: float
    ) -> Verdict:
        newest = self._newest()
        verdict = self.submissions.submit(member, message, frames, newest=newest, now=now)
        if verdict.verdict in ("accepted", "filtered"):
            self.watch.watchdog.got_on(now=now)
        return verdict

    def register(self, message: Register, member: Member, *, now: float) -> Refused | None:
        """A learner takes over. One that has to catch up after the end is waited for again."""
        before, committed = self.books.training.owner, self.books.training.committed
        refused = self.books.training.register(message, member=member.name)
        if refused is None:
            self.members.replace(before, member, now=now)
            self.transfers.withdraw()
            self.watch.watchdog.got_on(now=now)
            self.watch.waiting.moved(now=now)
            self._note_trained(committed, now=now)
            self.ending.reopen()
        return refused

    def commit(self, message: Commit, *, now: float) -> Refused | None:
        before, position = self.books.training.committed, self.books.training.position
        refused = self.books.training.commit(message)
        if self.books.training.position != position:
            self.watch.watchdog.got_on(now=now)
            self.watch.waiting.moved(now=now)
        self._note_trained(before, now=now)
        return refused

    def why_not(self, step: int) -> Refused | None:
        """The refusal of a batch that is deleted."""
        oldest = self.books.training.oldest_step
        if step >= oldest:
            return None
        return Refused(code="invalid", reason=f"batches before step {oldest} are deleted")

    def batch(self, step: int, *, now: float) -> AssignedBatch | None:
        """The batch of `step`, which is closed now if it is the next one and complete. A run that
        is being stopped hands out none."""
        if self.end is not None and self.end.stopped:
            return None
        self.watch.waiting.asked(step, now=now)
        policy = self.books.ledger.policy
        if step == policy.next_step and self.end is None:
            if self.books.training.position == step:
                self.generation.let_go_late()
            self.books.ledger.drop_leftovers()
            if policy.can_assign():
                self._assign(now)
        found = self.books.training.step(step)
        if found is None:
            return None
        return AssignedBatch(*found, replayed=step < self.books.training.committed)

    def note_waiting(self, step: int, *, now: float) -> tuple[str, float]:
        """What `step` waits for and since when (seconds); kept for the record of the step."""
        reason = self.watch.waiting.text(now=now)
        if step == self.books.ledger.policy.next_step:
            self._waited_for = reason
        return reason, self.watch.waiting.asked_s(step, now=now)

    def tick(self, *, now: float) -> None:
        """Whatever time alone brings: dead members, late leases and evaluations, a stall."""
        self.watch.look_for_members(now=now)
        self.generation.expire(now=now)
        self.books.updates.settle(self.members.alive())
        reason = None
        if self.end is None:
            reason = self.books.room.why_stuck() or self.watch.why_stalled(now=now)
        if reason is not None:
            self.ending.give_up(reason)

    def advance(self, *, now: float) -> None:
        """What follows from a change, the end among it."""
        self.ending.advance(now=now)

    def is_due(self, *, now: float) -> bool:
        """Whether there is something to save although nobody has asked for anything."""
        return self.books.is_changed or self.watch.history.is_due(now=now)

    def save(self, *, now: float) -> Future[None]:
        """Writes what changed; the future completes when that, and all before, is on disk."""
        beats = self.watch.history.take_rows()
        return self.books.save(beats=beats, end=self.end, now=now)

    def _note_trained(self, before: int, *, now: float) -> None:
        """Versions after `before` are committed: one by a commit, or those whose commits never
        arrived by a registration."""
        for version in range(before + 1, self.books.training.committed + 1):
            self.books.tally.trained(version - 1, self.books.ledger.batches.of(version - 1))
            if self.config.eval.every and version % self.config.eval.every == 0:
                self.books.evaluations.due(version, now=now)

    def _newest(self) -> WeightId:
        """The current life of the learner, and the highest version ever published."""
        return WeightId(self.books.training.inc, self.books.training.newest_version)

    def _assign(self, now: float) -> None:
        step, groups = self.books.ledger.batches.assign()
        waited_s = self.watch.waiting.asked_s(step, now=now)
        values = (
            self.books.tally.take_step(step, groups)
            | self.watch.take_lag()
            | {
                "generator_tokens_per_s": round(self.members.tokens_per_s(), 1),
                "num_ready": self.books.ledger.groups.counts[State.READY],
                "waited_s": round(waited_s, 3),
            }
        )
        record = Record(name="buffer", step=step, values=values)
        self.books.training.assign(
            record, waited_for=self._waited_for, at=now + self.books.wall_offset
        )
        self.watch.watchdog.got_on(now=now)
        reward = f"reward {values['reward_mean']:.3f}, " if "reward_mean" in values else ""
        log.info(
            "step %d: %d groups, staleness %.2f (max %d), %s%d filtered, waited %.1f s",
            *(step, len(groups), values["staleness_mean"], values["staleness_max"]),
            *(reward, values["num_filtered"], waited_s),
        )
        self._waited_for = ""
