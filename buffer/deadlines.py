"""When a lease passes on: its generator died, left, never had it, or ran late.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.types import GroupId
from buffer.groups import Group
from buffer.ledger import Ledger

LATE_SHARE = 0.99
"""A lease given back after this share of its time is late: clocks of two machines differ a bit."""
LOST_LEASE_S = 10.0
"""A lease that its living generator does not report for this long never arrived there."""


@dataclass(frozen=True, slots=True)
class Late:
    """A lease that ran past its time."""

    member: str
    group: GroupId
    attempt: int


class Deadlines:
    """The clocks of all leases of a ledger."""

    def __init__(self, ledger: Ledger, *, lease_timeout_s: float) -> None:
        self.lease_timeout_s = lease_timeout_s
        self._ledger = ledger

    def age_s(self, group: Group, *, now: float) -> float:
        """Seconds since generation began, or since the lease was granted where it has not."""
        return now - (group.granted_at if group.started_at is None else group.started_at)

    def is_late(self, group: Group, *, now: float) -> bool:
        """Whether a begun lease that its generator gives back now has used up its time."""
        used_s = now - group.granted_at
        return group.started_at is not None and used_s >= LATE_SHARE * self.lease_timeout_s

    def release_member(self, member: str, *, reason: str) -> int:
        """Passes all leases of a generator on; returns how many."""
        held = [group for group in self._ledger.leased() if group.member == member]
        for group in held:
            self._ledger.reissue(group, reason)
        return len(held)

    def reconcile(self, member: str, held: Iterable[tuple[GroupId, int]], *, now: float) -> None:
        """Compares with what the generator says that it holds: a lease whose message was lost on
        the way is leased again after LOST_LEASE_S."""
        reported = set(held)
        for group in self._ledger.leased():
            if group.member != member:
                continue
            if (group.id, group.attempt) in reported:
                group.missing_since = None
            elif group.missing_since is None:
                group.missing_since = now
            elif now - group.missing_since > LOST_LEASE_S:
                self._ledger.reissue(group, f"{member} did not have it")

    def expire(self, *, now: float) -> list[Late]:
        """Passes on the leases that ran past their time. One that had begun counts against the
        prompt: it may be what hangs every generator."""
        expired = []
        for group in self._ledger.leased():
            if self.age_s(group, now=now) <= self.lease_timeout_s:
                continue
            expired.append(Late(group.member, group.id, group.attempt))
            reason = f"{group.member} ran past {self.lease_timeout_s:g} s"
            if group.started_at is None:
                self._ledger.reissue(group, reason)
            else:
                self._ledger.strike(group, reason)
        return expired

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long: no lease has used that time."""
        for group in self._ledger.leased():
            group.granted_at += seconds
            group.started_at = None if group.started_at is None else group.started_at + seconds
            group.missing_since = None
