"""When a lease passes on (its generator died, left, never had it, or ran overdue), and who may have
none: generators that live but finish nothing.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.types import GroupId
from buffer.groups import Group
from buffer.ledger import Ledger
from buffer.members import Member, Members

log = logging.getLogger(__name__)

OVERDUE_SHARE = 0.9
"""A lease given back after this share of its time is overdue: generators give up at 0.95 of it."""
LOST_LEASE_S = 10.0
"""A lease that its living generator does not report for this long never arrived there."""
OVERDUE_IN_A_ROW = 3
"""Leases of one generator that run past their time, with no group of its own between them."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A lease that ran past its time."""

    member: str
    group: GroupId
    attempt: int


class LeaseClocks:
    """The clocks of all leases of a ledger."""

    def __init__(self, ledger: Ledger, *, lease_timeout_s: float) -> None:
        self.lease_timeout_s = lease_timeout_s
        self._ledger = ledger

    def age_s(self, group: Group, *, now: float) -> float:
        """Seconds since generation began, or since the lease was granted where it has not."""
        return now - (group.granted_at if group.started_at is None else group.started_at)

    def is_overdue(self, group: Group, *, now: float) -> bool:
        """Whether a begun lease that its generator gives back now has used up its time."""
        if group.started_at is None:
            return False
        return self.age_s(group, now=now) >= OVERDUE_SHARE * self.lease_timeout_s

    def release_member(self, member: str, *, reason: str) -> int:
        """Passes all leases of a generator that is not there on; returns how many."""
        held = [group for group in self._ledger.groups.leased() if group.member == member]
        for group in held:
            self._ledger.reissue(group, reason)
        return len(held)

    def reconcile(self, member: str, held: Iterable[tuple[GroupId, int]], *, now: float) -> None:
        """Compares with what the generator says that it holds: a lease whose message was lost on
        the way is leased again after LOST_LEASE_S."""
        reported = set(held)
        for group in self._ledger.groups.leased():
            if group.member != member:
                continue
            if (group.id, group.attempt) in reported:
                group.missing_since = None
            elif group.missing_since is None:
                group.missing_since = now
            elif now - group.missing_since > LOST_LEASE_S:
                self._ledger.reissue(group, f"{member} did not have it")

    def expire(self, *, now: float) -> list[Overdue]:
        """Passes on the leases that ran past their time. One that had begun counts against the
        prompt: it may be what hangs every generator."""
        expired = []
        for group in self._ledger.groups.leased():
            if self.age_s(group, now=now) <= self.lease_timeout_s:
                continue
            expired.append(Overdue(group.member, group.id, group.attempt))
            reason = f"{group.member} ran past {self.lease_timeout_s:g} s"
            if group.started_at is None:
                self._ledger.reissue(group, reason)
            else:
                self._ledger.strike(group, reason)
        return expired

    def forget_void(self, there: Iterable[Member]) -> None:
        """Generators that are not `there` are told of nothing that was taken from them."""
        self._ledger.void.forget_others({member.name for member in there})

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long: no lease has used that time."""
        for group in self._ledger.groups.leased():
            group.granted_at += seconds
            group.started_at = None if group.started_at is None else group.started_at + seconds
            group.missing_since = None


class Suspension:
    """Who may have leases.

    A suspended generator has none as long as another one does better: this rule never leaves a run
    without anybody who may have one. A lease that nobody else has taken for `lease_timeout_s` is
    given to a suspended generator after all.
    """

    def __init__(self, members: Members, *, lease_timeout_s: float) -> None:
        self._members = members
        self._lease_timeout_s = lease_timeout_s
        self._withheld_since: float | None = None

    def is_suspended(self, member: Member) -> bool:
        return member.num_overdue >= OVERDUE_IN_A_ROW

    def ran_out(self, overdue: Sequence[Overdue]) -> None:
        """Counts leases that ran past their time, and says whose they were."""
        for name in sorted({each.member for each in overdue}):
            groups = [f"{each.group}" for each in overdue if each.member == name]
            for member in self._members.named(name):
                self._count(member, groups)

    def worked(self, member: Member) -> None:
        """It has submitted a group."""
        if self.is_suspended(member):
            log.info("%s has submitted a group and gets leases again", member)
        member.num_overdue = 0

    def may_lease(self, member: Member, *, now: float) -> bool:
        """Whether `member`, who asks for a lease that there is, may have it."""
        if not self.is_suspended(member):
            self._withheld_since = None
            return True
        if not any(not self.is_suspended(other) for other in self._members.alive()):
            return True
        if self._withheld_since is None:
            self._withheld_since = now
        if now - self._withheld_since <= self._lease_timeout_s:
            return False
        self._withheld_since = None
        return True

    def _count(self, member: Member, groups: list[str]) -> None:
        before, member.num_overdue = member.num_overdue, member.num_overdue + len(groups)
        shown = ", ".join(groups[:4]) + (", ..." if len(groups) > 4 else "")
        log.warning(
            "%s did not finish %d leases in their time (%g s), of groups %s: they pass on",
            *(member, len(groups), self._lease_timeout_s, shown),
        )
        if before < OVERDUE_IN_A_ROW <= member.num_overdue:
            log.warning(
                "%s is suspended: %d leases in a row ran past their time. It gets no more until it "
                "has submitted a group, unless there is no other generator. Its log may say why; "
                "SIGUSR1 makes it dump its stacks",
                *(member, member.num_overdue),
            )
