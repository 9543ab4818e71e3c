"""Generators that live but finish nothing: after some leases that ran out they get no more.

Only as long as another generator does better: this rule never leaves a run without anybody who
may have a lease. Time is passed in, in seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from buffer.deadlines import Late
from buffer.members import Member, Members

log = logging.getLogger(__name__)

LATE_IN_A_ROW = 3
"""Leases of one generator that run past their time, with no group of its own between them."""


class Suspension:
    """Who may have leases. One that nobody else has taken for `lease_timeout_s` is given to a
    suspended generator after all."""

    def __init__(self, members: Members, *, lease_timeout_s: float) -> None:
        self._members = members
        self._lease_timeout_s = lease_timeout_s
        self._withheld_since: float | None = None

    def is_suspended(self, member: Member) -> bool:
        return member.num_late >= LATE_IN_A_ROW

    def ran_out(self, late: Sequence[Late]) -> None:
        """Counts leases that ran past their time, and says whose they were."""
        for name in sorted({each.member for each in late}):
            groups = [f"{each.group}" for each in late if each.member == name]
            for member in self._members.named(name):
                self._count(member, groups)

    def worked(self, member: Member) -> None:
        """It has submitted a group."""
        if self.is_suspended(member):
            log.info("%s has submitted a group and gets leases again", member)
        member.num_late = 0

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
        before, member.num_late = member.num_late, member.num_late + len(groups)
        shown = ", ".join(groups[:4]) + (", ..." if len(groups) > 4 else "")
        log.warning(
            "%s did not finish %d leases in their time (%g s), of groups %s: they pass on",
            *(member, len(groups), self._lease_timeout_s, shown),
        )
        if before < LATE_IN_A_ROW <= member.num_late:
            log.warning(
                "%s is suspended: %d leases in a row ran past their time. It gets no more until it "
                "has submitted a group, unless there is no other generator. Its log may say why; "
                "SIGUSR1 makes it dump its stacks",
                *(member, member.num_late),
            )
