"""Finished groups and leases given back: what each is worth, and what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.config import Config
from asyncrl.messages import Failed, Submit, Verdict
from asyncrl.types import GroupId, WeightId
from asyncrl.wire import Frame, WireError, decode_columns
from buffer.arrivals import Arrival, fault, summarize
from buffer.books import Books
from buffer.leases import Overdue
from buffer.ledger import Judgement
from buffer.members import Member
from buffer.void import LeaseId
from buffer.watch import Watch

log = logging.getLogger(__name__)


class Submissions:
    """Submissions of both kinds. Methods take the time of a monotonic clock.

    `newest` has the current life of the learner and the newest published version: nothing that a
    generator sends can be newer.
    """

    def __init__(self, config: Config, books: Books, watch: Watch) -> None:
        self._config = config
        self._ledger = books.ledger
        self._evaluations = books.evaluations
        self._tally = books.tally
        self._room = books.room
        self._leases = watch.leases
        self._suspension = watch.suspension

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

    def _given_up(self, member: Member, failed: Failed) -> None:
        """How far a generator had come with a lease that was not its own any more."""
        limit = self._config.data.max_response_length
        if (
            len(failed.lengths) <= self._config.group_size
            and max(failed.lengths, default=0) <= limit
        ):
            lease = LeaseId(GroupId(*failed.group), failed.attempt, member.name)
            self._tally.given_up(lease, failed.lengths)
