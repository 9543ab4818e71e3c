"""One run without its sockets: what each request does to ledger, evaluations and journal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from asyncrl.config import Config
from asyncrl.journal import Change, EvalRow, Journal, StepRow
from asyncrl.messages import (
    Commit,
    End,
    Failed,
    Heartbeat,
    Lease,
    LeaseRequest,
    Record,
    Refused,
    Started,
    Submit,
    Verdict,
)
from asyncrl.types import GroupId, Row
from asyncrl.wire import WireError, decode_group
from buffer.arrivals import Arrival, fault, summarize
from buffer.evaluation import Evaluations
from buffer.groups import FATES, Group
from buffer.ledger import Ledger
from buffer.members import Member, Members
from buffer.policy import StalenessPolicy
from buffer.prompts import Prompts
from buffer.reports import Tally, status_values, waiting_text
from buffer.training import Training

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
        """Goes on where the journal ends. ValueError when data or B differ from the journal's."""
        self.config = config
        self.journal = journal
        self.end: End | None = None
        self.prompts = Prompts(
            train, num_epochs=config.max_epochs, seed=config.seed, shuffle=config.data.shuffle
        )
        self.ledger = Ledger(
            StalenessPolicy(
                max_staleness=config.max_staleness,
                groups_per_step=config.prompts_per_step,
                num_groups=self.prompts.num_groups,
                max_steps=config.max_steps,
                last_batch=config.data.last_batch,
            ),
            group_id=self.prompts.group_id,
            max_attempts=config.buffer.max_attempts,
            lease_timeout_s=config.buffer.lease_timeout_s,
        )
        self.members = Members(heartbeat_s=config.network.heartbeat_s)
        self.evaluations = Evaluations(
            val, temperature=config.eval.temperature, timeout_s=config.eval.timeout_s
        )
        self.tally = Tally()
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

    def lease(self, member: Member, request: LeaseRequest, *, now: float) -> list[Lease]:
        """Up to request.slots leases for a generator: evaluations first, then training."""
        leases: list[Lease] = []
        serving = request.weights.version
        while len(leases) < request.slots:
            lease = self._eval_lease(member, serving, now) or self._train_lease(
                member, serving, now
            )
            if lease is None:
                break
            leases.append(lease)
        return leases

    def started(self, message: Started, *, now: float) -> None:
        id = GroupId(*message.group)
        if message.kind == "train" and message.version <= self.training.newest_version:
            self.ledger.started(id, message.attempt, message.version, now=now)

    def submit(
        self, member: Member, message: Submit, frames: Sequence[bytes], *, now: float
    ) -> Verdict:
        """Takes a finished group, if it is valid, the first, and young enough."""
        is_eval = message.kind == "eval"
        config = self.config
        try:
            if len(frames) != 1:
                raise WireError(f"{len(frames)} frames with one group")
            group = decode_group(frames[0])
        except WireError as error:
            return self._invalid(message, str(error), now)
        problem = fault(
            group,
            message,
            max_rollouts=config.eval.samples if is_eval else config.group_size,
            max_length=config.data.max_response_length,
            newest=self.training.newest_version,
        )
        if problem is not None:
            return self._invalid(message, problem, now)
        if is_eval:
            return self._submit_eval(message, summarize(group), now)
        return self._submit_train(member, message, summarize(group), frames[0], now)

    def failed(self, message: Failed, *, now: float) -> Verdict:
        """A generator gives a lease back."""
        return Verdict(
            verdict=self._fail(message, message.reason, content=message.content, now=now)
        )

    def heartbeat(self, member: Member, beat: Heartbeat, *, now: float) -> None:
        self.members.heartbeat(member, beat, now=now)
        held = [(GroupId(*lease[:2]), lease[2]) for lease in beat.held if len(lease) == 3]
        self.ledger.reconcile(member.name, held, now=now)

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
        elif policy.exhausted and self.training.position == policy.next_step:
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

    def _eval_lease(self, member: Member, serving: int, now: float) -> Lease | None:
        granted = self.evaluations.lease(member.name, serving_version=serving, now=now)
        if granted is None:
            return None
        return Lease(
            kind="eval",
            group=[granted.version, granted.index],
            attempt=granted.attempt,
            seed_k=granted.failures,
            row=self.evaluations.rows[granted.index],
            num_rollouts=self.config.eval.samples,
            temperature=self.config.eval.temperature,
            min_version=granted.version,
            timeout_s=granted.timeout_s,
        )

    def _train_lease(self, member: Member, serving: int, now: float) -> Lease | None:
        group = self.ledger.lease(member.name, serving_version=serving, now=now)
        if group is None or group.version is None:
            return None
        return Lease(
            kind="train",
            group=list(group.id),
            attempt=group.attempt,
            seed_k=group.seed_k,
            row=self.prompts.row(group.id),
            num_rollouts=self.config.group_size,
            temperature=self.config.sampling.temperature,
            min_version=group.version,
            timeout_s=self.config.buffer.lease_timeout_s,
        )

    def _submit_train(
        self, member: Member, message: Submit, arrival: Arrival, frame: bytes, now: float
    ) -> Verdict:
        id, attempt = GroupId(*message.group), message.attempt
        judgement = self.ledger.judge(id, attempt, arrival.oldest_version)
        if judgement == "stale":
            self._fail(message, "its oldest token is too old", content=False, now=now)
        if judgement != "accepted":
            return Verdict(verdict=judgement)
        reason = arrival.useless_because if self.config.buffer.zero_variance == "refill" else None
        self.ledger.accept(
            id,
            attempt,
            member=member.name,
            oldest_version=arrival.oldest_version,
            token_versions=arrival.token_versions,
            payload=self.journal.append(frame),
            filtered_because=reason,
        )
        self.tally.arrived(arrival, filtered=reason is not None)
        if reason is not None:
            return Verdict(verdict="filtered", reason=reason)
        return Verdict(verdict="accepted")

    def _submit_eval(self, message: Submit, arrival: Arrival, now: float) -> Verdict:
        version, index = message.group
        outcome = self.evaluations.judge(version, index, message.attempt, arrival.oldest_version)
        if outcome == "stale":
            self.evaluations.fail(version, index, message.attempt, now=now)
        if outcome == "accepted":
            self.evaluations.accept(index, arrival, now=now)
        return Verdict(verdict=outcome)

    def _invalid(self, message: Submit, problem: str, now: float) -> Verdict:
        log.warning("%s group %s is invalid: %s", message.kind, message.group, problem)
        self._fail(message, problem, content=True, now=now)
        return Verdict(verdict="invalid", reason=problem)

    def _fail(self, message: Submit | Failed, reason: str, *, content: bool, now: float) -> Any:
        if message.kind == "eval":
            version, index = message.group
            return self.evaluations.fail(version, index, message.attempt, now=now)
        id = GroupId(*message.group)
        judgement = self.ledger.fail(id, message.attempt, content=content, reason=reason)
        if judgement == "accepted":
            self.tally.failed(f"group {id}: {reason}")
        return judgement

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
            *(values["reward_mean"], values["num_filtered"], waited_s),
        )
        self._waited_for = ""

    def _why_over(self) -> str:
        steps, config = self.ledger.policy.next_step, self.config
        if steps == config.max_steps:
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
