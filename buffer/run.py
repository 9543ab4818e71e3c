"""One run without its sockets: what each request does to ledger, evaluations and journal."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.journal_tables import StepRow, Stored
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
from buffer.ending import Ending
from buffer.evaluation import Evaluations
from buffer.generation import Generation
from buffer.groups import FATES, Group
from buffer.ledger import Ledger
from buffer.members import Member
from buffer.policy import StalenessPolicy
from buffer.prompts import Prompts, pack_rows
from buffer.saving import Saving, check_same_run, constants
from buffer.tally import Tally
from buffer.training import Training
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
        journal: Journal,
        now: float,
    ) -> None:
        """Goes on where the journal ends. ValueError when data or B differ from the journal's, and
        for a row that cannot be sent."""
        for _ in pack_rows(val, "data.val_files"):
            pass  # raises for a row that cannot be sent
        stored = journal.stored
        self.config = config
        self.journal = journal
        self.began_at = now
        self.is_resumed = bool(stored.groups)
        self.engine = stored.meta.get("engine", "")
        """What all generators run, as the first one said; empty: none has joined yet."""
        self.prompts = Prompts(
            train, num_epochs=config.max_epochs, seed=config.seed, shuffle=config.data.shuffle
        )
        self._constants = constants(config, self.prompts)
        check_same_run(stored.meta, self._constants)
        self._wall_offset = time.time() - now
        self._waited_for = ""
        self._set_up_books(stored, val, now)
        self._set_up_watch(now)
        self._set_up_ending(now)
        first = [0] if config.eval.before_training else []
        for version in json.loads(stored.meta.get("evaluating", str(first))):
            self.evaluations.due(version, now=now)

    @property
    def end(self) -> End | None:
        """None as long as the run goes on."""
        return self.ending.end

    def started(self, message: Started, *, now: float) -> None:
        self.generation.started(message, newest=self._newest(), now=now)

    def submit(
        self, member: Member, message: Submit, frames: Sequence[bytes], *, now: float
    ) -> Verdict:
        newest = self._newest()
        verdict = self.generation.submit(member, message, frames, newest=newest, now=now)
        if verdict.verdict in ("accepted", "filtered"):
            self.watch.watchdog.got_on(now=now)
        return verdict

    def register(self, message: Register, member: Member, *, now: float) -> Refused | None:
        """A learner takes over. One that has to catch up after the end is waited for again."""
        before, committed = self.training.owner, self.training.committed
        refused = self.training.register(message, member=member.name)
        if refused is None:
            self.members.replace(before, member, now=now)
            self.watch.watchdog.got_on(now=now)
            self.watch.waiting.moved(now=now)
            self._note_trained(committed, now=now)
            self.ending.reopen()
        return refused

    def commit(self, message: Commit, *, now: float) -> Refused | None:
        before, position = self.training.committed, self.training.position
        refused = self.training.commit(message)
        if self.training.position != position:
            self.watch.watchdog.got_on(now=now)
            self.watch.waiting.moved(now=now)
        self._note_trained(before, now=now)
        return refused

    def why_not(self, step: int) -> Refused | None:
        """The refusal of a batch that is deleted."""
        oldest = self.training.oldest_step
        if step >= oldest:
            return None
        return Refused(code="invalid", reason=f"batches before step {oldest} are deleted")

    def batch(self, step: int, *, now: float) -> AssignedBatch | None:
        """The batch of `step`, which is closed now if it is the next one and complete. A run that
        is being stopped hands out none."""
        if self.end is not None and self.end.stopped:
            return None
        self.watch.waiting.asked(step, now=now)
        policy = self.ledger.policy
        if step == policy.next_step and self.end is None and policy.can_assign():
            self._assign(now)
        found = self.training.step(step)
        if found is None:
            return None
        return AssignedBatch(*found, replayed=step < self.training.committed)

    def note_waiting(self, step: int, *, now: float) -> tuple[str, float]:
        """What `step` waits for and since when (seconds); kept for the record of the step."""
        reason = self.watch.waiting.text(now=now)
        if step == self.ledger.policy.next_step:
            self._waited_for = reason
        return reason, self.watch.waiting.asked_s(step, now=now)

    def tick(self, *, now: float) -> None:
        """Whatever time alone brings: dead members, late leases and evaluations, a stall."""
        self.watch.look_for_members(now=now)
        self.generation.expire(now=now)
        reason = self.watch.why_stalled(now=now) if self.end is None else None
        if reason is not None:
            self.ending.give_up(reason)

    def advance(self, *, now: float) -> None:
        """What follows from a change, the end among it."""
        self.ending.advance(now=now)

    def is_due(self, *, now: float) -> bool:
        """Whether there is something to save although nobody has asked for anything."""
        return self._saving.is_due(now=now)

    def save(self, *, now: float) -> Future[None]:
        """Writes what changed; the future completes when that, and all before, is on disk."""
        return self._saving.save(now=now)

    def retain(self) -> None:
        """Deletes payloads that no checkpoint can ask for."""
        settled = [state.value for state in FATES]
        self.journal.retain(from_step=self.training.oldest_step, settled=settled)

    def _set_up_books(self, stored: Stored, val: Sequence[Row], now: float) -> None:
        config, meta = self.config, stored.meta
        self.ledger = _new_ledger(config, self.prompts)
        self.ledger.restore(
            stored.groups, committed=int(meta.get("committed", 0)), steps=len(stored.steps), now=now
        )
        self.training = Training(self.ledger, stored)
        self.ledger.forget(before_step=self.training.oldest_step)
        self.evaluations = Evaluations(
            val, temperature=config.eval.temperature, timeout_s=config.eval.timeout_s
        )
        self.evaluations.results += [Record.model_validate_json(e.record) for e in stored.evals]
        self.evaluations.num_told = int(meta.get("records_told", 0))
        self.tally = Tally()
        self.tally.restore(meta.get("staleness", "{}"))

    def _set_up_watch(self, now: float) -> None:
        self.watch = Watch(
            self.config,
            ledger=self.ledger,
            training=self.training,
            evaluations=self.evaluations,
            now=now,
            wall_offset=self._wall_offset,
        )
        self.members = self.watch.members
        self.generation = Generation(
            self.config,
            ledger=self.ledger,
            deadlines=self.watch.deadlines,
            suspension=self.watch.suspension,
            evaluations=self.evaluations,
            prompts=self.prompts,
            tally=self.tally,
            journal=self.journal,
        )

    def _set_up_ending(self, now: float) -> None:
        self.ending = Ending(
            self.config,
            ledger=self.ledger,
            training=self.training,
            evaluations=self.evaluations,
            tally=self.tally,
            num_groups=self.prompts.num_groups,
            now=now,
        )
        self._saving = Saving(
            self.journal,
            ledger=self.ledger,
            training=self.training,
            evaluations=self.evaluations,
            history=self.watch.history,
            meta=self._meta,
            wall_offset=self._wall_offset,
        )

    def _note_trained(self, before: int, *, now: float) -> None:
        """Versions after `before` are committed: one by a commit, or those whose commits never
        arrived by a registration."""
        for version in range(before + 1, self.training.committed + 1):
            self.tally.trained(version - 1, self.ledger.batch(version - 1))
            if self.config.eval.every and version % self.config.eval.every == 0:
                self.evaluations.due(version, now=now)

    def _newest(self) -> WeightId:
        """The current life of the learner, and the highest version ever published."""
        return WeightId(self.training.inc, self.training.newest_version)

    def _meta(self) -> dict[str, str]:
        not_issued = max(0, self.prompts.num_groups - self.ledger.policy.admitted)
        return {
            **self._constants,
            **self.training.meta(),
            "staleness": self.tally.staleness_json(),
            "not_issued": str(not_issued),
            "engine": self.engine,
            "evaluating": json.dumps(self.evaluations.versions_due),
            "records_told": str(self.evaluations.num_told),
            "end": self.end.model_dump_json() if self.end else "",
        }

    def _assign(self, now: float) -> None:
        step, groups = self.ledger.assign()
        waited_s = self.watch.waiting.asked_s(step, now=now)
        values = self.tally.take_step(step, groups) | {
            "generator_tokens_per_s": round(self.members.tokens_per_s(), 1),
            "num_ready": self.ledger.num_ready,
            "waited_s": round(waited_s, 3),
        }
        record = Record(name="buffer", step=step, values=values)
        self.training.assign(record, waited_for=self._waited_for, at=now + self._wall_offset)
        self.watch.watchdog.got_on(now=now)
        log.info(
            "step %d: %d groups, staleness %.2f (max %d), reward %.3f, %d filtered, waited %.1f s",
            *(step, len(groups), values["staleness_mean"], values["staleness_max"]),
            *(values.get("reward_mean", math.nan), values["num_filtered"], waited_s),
        )
        self._waited_for = ""


def _new_ledger(config: Config, prompts: Prompts) -> Ledger:
    policy = StalenessPolicy(
        max_staleness=config.max_staleness,
        groups_per_step=config.prompts_per_step,
        num_groups=prompts.num_groups,
        max_steps=config.max_steps,
        last_batch=config.data.last_batch,
    )
    return Ledger(policy, group_id=prompts.group_id, max_attempts=config.buffer.max_attempts)
