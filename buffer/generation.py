"""The generators' side of the buffer: leases out, finished groups in."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.messages import (
    Failed,
    Heartbeat,
    Lease,
    LeaseRequest,
    Started,
    Submit,
    Verdict,
)
from asyncrl.types import GroupId, WeightId
from asyncrl.wire import Frame, WireError, decode_columns
from buffer.arrivals import Arrival, fault, summarize
from buffer.books import Books
from buffer.leases import Overdue
from buffer.ledger import Judgement
from buffer.members import Member
from buffer.prompts import pack_row
from buffer.void import LeaseId
from buffer.watch import Watch

log = logging.getLogger(__name__)

REPLY_BYTES = 4 << 20
"""A reply gets no further lease once its rows have this size. With one more of MAX_ROW_BYTES it
is still below wire.MAX_HEADER_BYTES."""


class Generation:
    """Leases and submissions of both kinds. Methods take the time of a monotonic clock.

    `newest` has the current life of the learner and the newest published version: nothing that a
    generator sends can be newer.
    """

    def __init__(self, config: Config, books: Books, watch: Watch) -> None:
        self._config = config
        self._ledger = books.ledger
        self._evaluations = books.evaluations
        self._prompts = books.prompts
        self._tally = books.tally
        self._room = books.room
        self._leases = watch.leases
        self._suspension = watch.suspension

    def lease(self, member: Member, request: LeaseRequest, *, now: float) -> list[Lease]:
        """Up to request.slots leases for a generator: evaluations first, then training.

        It may have said, since it asked, that it serves newer weights. One reply carries no more
        rows than fit into it.
        """
        leases: list[Lease] = []
        num_bytes = 0
        serving = max(request.weights, member.serving).version
        if not (self._is_any(serving) and self._suspension.may_lease(member, now=now)):
            return []
        while len(leases) < request.slots and num_bytes < REPLY_BYTES:
            lease = self._eval_lease(member, serving, now) or self._train_lease(
                member, serving, now
            )
            if lease is None:
                break
            leases.append(lease)
            num_bytes += len(pack_row(lease.row))
        return leases

    def started(self, member: Member, message: Started, *, newest: WeightId, now: float) -> None:
        """Only the holder of a lease can start its clock."""
        id = GroupId(*message.group)
        held = self._ledger.held(id, message.attempt, by=member.name)
        if message.kind == "train" and held and message.version <= newest.version:
            self._ledger.started(id, message.attempt, message.version, now=now)

    def submit(
        self,
        member: Member,
        message: Submit,
        frames: Sequence[Frame],
        *,
        newest: WeightId,
        now: float,
    ) -> Verdict:
        """Takes a finished group, if it is valid, the first, and young enough."""
        try:
            arrival = self._arrival(message, frames, newest)
        except WireError as error:
            return self._invalid(member, message, str(error), now)
        self._suspension.worked(member)
        if message.kind == "eval":
            return self._submit_eval(message, arrival, now)
        return self._submit_train(member, message, arrival, frames[0], now)

    def failed(self, member: Member, message: Failed, *, now: float) -> Verdict:
        """A generator gives a lease back."""
        return Verdict(verdict=self._fail(member, message, message.reason, now=now))

    def expire(self, *, now: float) -> None:
        """Passes on the leases that ran past their time, and ends a late evaluation."""
        overdue = self._leases.expire(now=now)
        self._suspension.ran_out(overdue)
        for each in overdue:
            self._tally.failed(f"group {each.group}: {each.member} ran past its time")
        self._evaluations.expire(now=now)

    def let_go_late(self) -> None:
        """With on_late drop or reissue: groups at their deadline are waited for no longer."""
        on_late = self._config.buffer.on_late
        if on_late == "wait":
            return
        for group, lease in self._ledger.let_go_late(reissue=on_late == "reissue"):
            self._tally.let_go(lease)
            log.info("group %s is let go: %s (%s)", group.id, group.reason, group.state)

    def void(self, member: Member, beat: Heartbeat) -> list[list[int]]:
        """Leases that the generator says it holds and does not hold any more."""
        held = [lease for lease in beat.held if len(lease) == 3]
        return [
            lease
            for lease in held
            if self._ledger.held(GroupId(*lease[:2]), lease[2], by=member.name) is None
        ]

    def take_void(self, member: Member) -> list[list[int]]:
        """Leases that were taken from this generator and that it has not been told of."""
        return [[*lease.group, lease.attempt] for lease in self._ledger.void.take(member.name)]

    def _given_up(self, member: Member, failed: Failed) -> None:
        """How far a generator had come with a lease that was not its own any more."""
        limit = self._config.data.max_response_length
        if (
            len(failed.lengths) <= self._config.group_size
            and max(failed.lengths, default=0) <= limit
        ):
            lease = LeaseId(GroupId(*failed.group), failed.attempt, member.name)
            self._tally.given_up(lease, failed.lengths)

    def _is_any(self, serving: int) -> bool:
        """Whether there is a lease for a generator that serves this version."""
        needed = self._ledger.next_min_version()
        return self._evaluations.has_row(serving) or (needed is not None and needed <= serving)

    def _arrival(self, message: Submit, frames: Sequence[Frame], newest: WeightId) -> Arrival:
        """What is in the one frame. Raises WireError for one that must not be accepted."""
        if len(frames) != 1:
            raise WireError(f"{len(frames)} frames with one group")
        group = decode_columns(frames[0])
        arrival = summarize(group)
        config, is_eval = self._config, message.kind == "eval"
        problem = fault(
            group,
            arrival,
            message,
            max_rollouts=config.eval.samples if is_eval else config.group_size,
            max_length=config.data.max_response_length,
            temperature=config.eval.temperature if is_eval else config.sampling.temperature,
            newest=newest,
        )
        if problem is not None:
            raise WireError(problem)
        return arrival

    def _eval_lease(self, member: Member, serving: int, now: float) -> Lease | None:
        granted = self._evaluations.lease(member.name, serving_version=serving, now=now)
        if granted is None:
            return None
        return Lease(
            kind="eval",
            group=[granted.version, granted.index],
            attempt=granted.attempt,
            seed_k=granted.failures,
            row=self._evaluations.rows[granted.index],
            num_rollouts=self._config.eval.samples,
            temperature=self._config.eval.temperature,
            min_version=granted.version,
            timeout_s=granted.timeout_s,
        )

    def _train_lease(self, member: Member, serving: int, now: float) -> Lease | None:
        if not self._room.may_lease():
            return None
        group = self._ledger.lease(member.name, serving_version=serving, now=now)
        if group is None or group.version is None:
            return None
        return Lease(
            kind="train",
            group=list(group.id),
            attempt=group.attempt,
            seed_k=group.seed_k,
            row=self._prompts.row(group.id),
            num_rollouts=self._config.group_size,
            temperature=self._config.sampling.temperature,
            min_version=group.version,
            timeout_s=self._config.buffer.lease_timeout_s,
        )

    def _submit_train(
        self, member: Member, message: Submit, arrival: Arrival, frame: Frame, now: float
    ) -> Verdict:
        id, attempt = GroupId(*message.group), message.attempt
        judgement = self._ledger.judge(id, attempt, arrival.oldest_version)
        if judgement == "stale":
            self._fail(member, message, "its oldest token is too old", now=now)
        if judgement != "accepted":
            return Verdict(verdict=judgement)
        useless = self._config.buffer.zero_variance
        reason = arrival.useless_because if useless != "train" else None
        self._ledger.accept(
            id,
            attempt,
            member=member.name,
            oldest_version=arrival.oldest_version,
            token_versions=arrival.token_versions,
            reward=arrival.reward_mean,
            payload=self._room.store(frame, is_filtered=reason is not None),
            filtered_because=reason,
            keeps_place=useless == "drop",
        )
        num_lost = self._config.group_size - len(arrival.lengths)
        self._tally.arrived(arrival, filtered=reason is not None, num_lost=num_lost)
        if reason is not None:
            return Verdict(verdict="filtered", reason=reason)
        return Verdict(verdict="accepted")

    def _submit_eval(self, message: Submit, arrival: Arrival, now: float) -> Verdict:
        version, index = message.group
        outcome = self._evaluations.judge(version, index, message.attempt, arrival.oldest_version)
        if outcome == "stale":
            self._evaluations.fail(version, index, message.attempt, now=now)
        if outcome == "accepted":
            self._evaluations.accept(index, arrival, now=now)
        return Verdict(verdict=outcome)

    def _invalid(self, member: Member, message: Submit, problem: str, now: float) -> Verdict:
        log.warning("%s group %s is invalid: %s", message.kind, message.group, problem)
        self._fail(member, message, problem, content=True, now=now)
        return Verdict(verdict="invalid", reason=problem)

    def _fail(
        self,
        member: Member,
        message: Submit | Failed,
        reason: str,
        *,
        content: bool = False,
        now: float,
    ) -> Judgement:
        """Nobody but its holder can give a lease back."""
        hopeless = isinstance(message, Failed) and message.hopeless
        content = content or (isinstance(message, Failed) and message.content)
        if message.kind == "eval":
            version, index = message.group
            return self._evaluations.fail(
                version, index, message.attempt, now=now, hopeless=hopeless
            )
        id = GroupId(*message.group)
        group = self._ledger.held(id, message.attempt, by=member.name)
        if group is None:
            if isinstance(message, Failed):
                self._given_up(member, message)
            return "superseded"
        if hopeless:
            self._ledger.drop(group, reason)
            self._tally.dropped(f"group {id}: {reason}")
            return "accepted"
        is_overdue = self._leases.is_overdue(group, now=now)
        if is_overdue:
            self._suspension.ran_out([Overdue(member.name, id, message.attempt)])
        self._ledger.fail(group, content=content, overdue=is_overdue, reason=reason)
        self._tally.failed(f"group {id}: {reason}")
        return "accepted"
