"""Leases for generators: who gets which, and when they end without a group."""

from __future__ import annotations

import logging

from asyncrl.config import Config
from asyncrl.messages import Heartbeat, Lease, LeaseRequest, Started
from asyncrl.types import GroupId, WeightId
from buffer.books import Books
from buffer.members import Member
from buffer.prompts import pack_row
from buffer.watch import Watch

log = logging.getLogger(__name__)

REPLY_BYTES = 4 << 20
"""A reply gets no further lease once its rows have this size. With one more of MAX_ROW_BYTES it
is still below wire.MAX_HEADER_BYTES."""


class Generation:
    """Leases of both kinds. Methods take the time of a monotonic clock.

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

    def _is_any(self, serving: int) -> bool:
        """Whether there is a lease for a generator that serves this version."""
        needed = self._ledger.next_min_version()
        return self._evaluations.has_row(serving) or (needed is not None and needed <= serving)

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
