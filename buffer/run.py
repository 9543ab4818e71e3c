"""One run without its sockets: what each request does to ledger, evaluations and journal."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncrl.config import Config
from asyncrl.journal import Change, EvalRow, Journal, StepRow
from asyncrl.messages import (
    Commit,
    End,
    Heartbeat,
    Record,
    Refused,
    Register,
    Started,
    Submit,
    Verdict,
)
from asyncrl.types import GroupId, Row
from buffer.evaluation import Evaluations
from buffer.generation import Generation
from buffer.groups import FATES, Group
from buffer.ledger import Ledger
from buffer.members import Member, Members
from buffer.policy import StalenessPolicy
from buffer.prompts import Prompts, pack_rows
from buffer.reports import Tally, status_values, waiting_text
from buffer.training import Training

log = logging.getLogger(__name__)


RETURN_S = 120.0
"""How long a restarted buffer whose steps are all trained waits for the learner to come back."""


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
        self.config = config
        self.began_at = now
        self.journal = journal
        self.end: End | None = None
        for _ in pack_rows(val, "data.val_files"):
            pass  # raises for a row that cannot be sent
        self.prompts = Prompts(
            train, num_epochs=config.max_epochs, seed=config.seed, shuffle=config.data.shuffle
        )
        self.ledger = _new_ledger(config, self.prompts)
        self.members = Members(heartbeat_s=config.network.heartbeat_s)
        self.evaluations = Evaluations(
            val, temperature=config.eval.temperature, timeout_s=config.eval.timeout_s
        )
        self.tally = Tally()
        self.generation = Generation(
            config,
            ledger=self.ledger,
            evaluations=self.evaluations,
            prompts=self.prompts,
            tally=self.tally,
            journal=journal,
        )
        self._meta: dict[str, str] = {}
        self._num_evals_saved = 0
        self._asked_at: dict[int, float] = {}
        self._waited_for = ""
        self._restore(now)

    @property
    def is_changed(self) -> bool:
        """Whether the clock alone (tick) has changed something that is to be saved."""
        new_results = len(self.evaluations.results) > self._num_evals_saved
        return self.ledger.is_changed or new_results

    def started(self, message: Started, *, now: float) -> None:
        self.generation.started(message, newest=self.training.newest_version, now=now)

    def submit(
        self, member: Member, message: Submit, frames: Sequence[bytes], *, now: float
    ) -> Verdict:
        newest = self.training.newest_version
        return self.generation.submit(member, message, frames, newest=newest, now=now)

    def heartbeat(self, member: Member, beat: Heartbeat, *, now: float) -> None:
        self.members.heartbeat(member, beat, now=now)
        held = [(GroupId(*lease[:2]), lease[2]) for lease in beat.held if len(lease) == 3]
        self.ledger.reconcile(member.name, held, now=now)

    def leave(self, member: Member, reason: str) -> None:
        """A member ends: its leases pass on at once."""
        self.members.leave(member)
        passed_on = self.ledger.release_member(member.name, reason=f"{member.name} has left")
        self.evaluations.release_member(member.name)
        log.info("%s has left (%s): %d of its leases pass on", member.name, reason, passed_on)

    def register(self, message: Register, member: Member) -> Refused | None:
        """A learner takes over. One that has to catch up after the end is waited for again."""
        refused = self.training.register(message, member=member.name)
        behind = self.training.position < self.ledger.policy.next_step
        if refused is None and behind and self.end is not None and not self.end.failed:
            self.end = None
        return refused

    def commit(self, message: Commit, *, now: float) -> Refused | None:
        before = self.training.committed
        refused = self.training.commit(message)
        version = self.training.committed
        if refused is None and version > before:
            self.tally.trained(version - 1, self.ledger.batch(version - 1))
            self._asked_at.pop(version - 1, None)
            if self.config.eval.every and version % self.config.eval.every == 0:
                self.evaluations.due(version, now=now)
        return refused

    def why_not(self, step: int) -> Refused | None:
        """The refusal of a batch that is deleted."""
        oldest = self.training.oldest_step
        if step >= oldest:
            return None
        return Refused(code="invalid", reason=f"batches before step {oldest} are deleted")

    def batch(self, step: int, *, now: float) -> AssignedBatch | None:
        """The batch of `step`, which is closed now if it is the next one and complete."""
        self._asked_at.setdefault(step, now)
        policy = self.ledger.policy
        if step == policy.next_step and self.end is None and policy.can_assign():
            self._assign(now)
        found = self.training.step(step)
        if found is None:
            return None
        return AssignedBatch(*found, replayed=step < self.training.committed)

    def waiting_for(self, *, now: float) -> str:
        """What the next batch, or the end of the run, waits for."""
        policy, training = self.ledger.policy, self.training
        evaluating = self.evaluations.describe()
        if policy.exhausted:
            if training.position < policy.next_step:
                return f"step {training.position} of {policy.next_step} is being trained"
            return evaluating or "the end of the run"
        text = waiting_text(self.ledger, self.members, newest=training.newest_version, now=now)
        return f"{text}; {evaluating}" if evaluating else text

    def note_waiting(self, step: int, *, now: float) -> tuple[str, float]:
        """What `step` waits for and since when (seconds); kept for the record of the step."""
        reason = self.waiting_for(now=now)
        if step == self.ledger.policy.next_step:
            self._waited_for = reason
        return reason, now - self._asked_at.get(step, now)

    def tick(self, *, now: float) -> None:
        """Deadlines: dead generators, late leases, late evaluations."""
        for member in self.members.newly_dead(now=now):
            passed_on = self.ledger.release_member(member.name, reason=f"{member.name} is dead")
            self.evaluations.release_member(member.name)
            log.warning(
                "%s (pid %d on %s) sent nothing for %.1f s: %d of its leases pass on",
                *(member.name, member.pid, member.host, self.members.silence_s, passed_on),
            )
        late = self.ledger.expire(now=now)
        if late:
            log.warning("%d leases ran past their deadline", late)
        for _ in range(late):
            self.tally.failed("a lease ran past its deadline")
        self.evaluations.expire(now=now)

    def advance(self, *, now: float) -> None:
        """Whatever follows from a change: leftovers, the last evaluation, the end."""
        if self.end is not None:
            return
        policy = self.ledger.policy
        self.ledger.drop_leftovers()
        if self.tally.num_useless_in_a_row >= self.config.buffer.max_filtered_in_a_row:
            self._finish(self.tally.why_useless(), failed=True)
        elif policy.exhausted and policy.next_step == 0:
            self._finish(f"the data gave no step: {self.tally.why_useless()}", failed=True)
        elif policy.exhausted and self._is_trained(now):
            self.evaluations.due(policy.next_step, now=now)
            if self.evaluations.idle:
                self._finish(self._why_over(), failed=False)

    def save(self) -> Future[None]:
        """Writes what changed; the future completes when that, and all before, is on disk."""
        steps, weights = self.training.take_rows()
        results = self.evaluations.results[self._num_evals_saved :]
        self._num_evals_saved = len(self.evaluations.results)
        meta = self._changed_meta(self.training.meta() | {"staleness": self.tally.staleness_json()})
        return self.journal.write(
            Change(
                groups=self.ledger.take_rows(),
                steps=steps,
                weights=weights,
                evals=tuple(EvalRow(r.step, r.model_dump_json()) for r in results),
                meta=meta,
            )
        )

    def retain(self) -> None:
        """Deletes payloads that no checkpoint can ask for."""
        settled = [state.value for state in FATES]
        self.journal.retain(from_step=self.training.oldest_step, settled=settled)

    def status(self, *, now: float) -> dict[str, Any]:
        """Values of messages.Status."""
        newest = self.training.newest
        values = status_values(self.ledger, self.members, self.tally, now=now)
        return values | {
            "published": newest.version,
            "inc": self.training.inc,
            "learner_version": self.training.position,
            "learner_metrics": self.training.metrics,
            "max_steps": self.config.max_steps,
            "evals": [{"step": r.step, **r.values} for r in self.evaluations.results],
            "waiting_for": "" if self.end else self.waiting_for(now=now),
            "ended": self.end.reason if self.end else "",
            "failed": self.end.failed if self.end else False,
        }

    def _restore(self, now: float) -> None:
        stored = self.journal.stored
        self.is_resumed = bool(stored.groups)
        self._check_same_run(stored.meta)
        self.ledger.restore(
            stored.groups,
            committed=int(stored.meta.get("committed", 0)),
            steps=len(stored.steps),
            now=now,
        )
        self.training = Training(self.ledger, stored)
        self.ledger.forget(before_step=self.training.oldest_step)
        self.tally.restore(stored.meta.get("staleness", "{}"))
        self.evaluations.results += [Record.model_validate_json(e.record) for e in stored.evals]
        self._num_evals_saved = len(stored.evals)
        for group in self.ledger.leased():
            self.members.expect(group.member, now=now)
        version, options = self.training.committed, self.config.eval
        if (version == 0 and options.before_training) or (
            version > 0 and options.every and version % options.every == 0
        ):
            self.evaluations.due(version, now=now)

    def _check_same_run(self, meta: dict[str, str]) -> None:
        """What the arithmetic of a begun run rests on must not change."""
        now = {
            "data.train_files and their order": ("data", self.prompts.fingerprint),
            "prompts_per_step": ("groups_per_step", str(self.config.prompts_per_step)),
            "group_size": ("group_size", str(self.config.group_size)),
        }
        for name, (key, value) in now.items():
            if meta.get(key, value) != value:
                raise ValueError(
                    f"{name} of this run was {meta[key]}, now it is {value}: a run cannot go on "
                    "with another one; set it back, or start a new run"
                )
        self._constants = dict(now.values()) | {"not_issued": "0"}

    def _changed_meta(self, meta: dict[str, str]) -> dict[str, str]:
        meta = self._constants | meta
        changed = {key: value for key, value in meta.items() if self._meta.get(key) != value}
        self._meta = meta
        return changed

    def _assign(self, now: float) -> None:
        step, groups = self.ledger.assign()
        waited_s = now - self._asked_at[step]
        values = self.tally.take_step(step, groups) | {
            "generator_tokens_per_s": round(self.members.tokens_per_s(), 1),
            "num_ready": self.ledger.num_ready,
            "waited_s": round(waited_s, 3),
        }
        record = Record(name="buffer", step=step, values=values)
        self.training.assign(record, waited_for=self._waited_for)
        log.info(
            "step %d: %d groups, staleness %.2f (max %d), reward %.3f, %d filtered, waited %.1f s",
            *(step, len(groups), values["staleness_mean"], values["staleness_max"]),
            *(values.get("reward_mean", math.nan), values["num_filtered"], waited_s),
        )
        self._waited_for = ""

    def _is_trained(self, now: float) -> bool:
        """The current learner has trained every step. After a restart it has to say so first: it
        may come back from an earlier checkpoint."""
        here = self.training.is_present or now - self.began_at > RETURN_S
        return here and self.training.position == self.ledger.policy.next_step

    def _why_over(self) -> str:
        steps, config = self.ledger.policy.next_step, self.config
        if config.max_steps is not None and steps >= config.max_steps:
            return f"all {steps} steps of max_steps are trained"
        return (
            f"data exhausted after {steps} steps: {self.prompts.num_groups} prompts in "
            f"{config.max_epochs} epochs"
        )

    def _finish(self, reason: str, *, failed: bool) -> None:
        self.ledger.cancel_outstanding("the run has ended")
        not_issued = max(0, self.prompts.num_groups - self.ledger.policy.admitted)
        self._constants["not_issued"] = str(not_issued)
        self.end = End(reason=reason, failed=failed, records=[])
        log.log(logging.ERROR if failed else logging.INFO, "the run has ended: %s", reason)


def _new_ledger(config: Config, prompts: Prompts) -> Ledger:
    policy = StalenessPolicy(
        max_staleness=config.max_staleness,
        groups_per_step=config.prompts_per_step,
        num_groups=prompts.num_groups,
        max_steps=config.max_steps,
        last_batch=config.data.last_batch,
    )
    return Ledger(
        policy,
        group_id=prompts.group_id,
        max_attempts=config.buffer.max_attempts,
        lease_timeout_s=config.buffer.lease_timeout_s,
    )
