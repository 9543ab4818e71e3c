"""What became of every prompt group: one state each, and the counts always add up.

    WAITING -> LEASED -> READY -> ASSIGNED(step) -> TRAINED
       ^          |        or a fate: FILTERED, QUARANTINED, STALE, DROPPED, CANCELLED
       +----------+  attempt + 1: its generator died, ran late or failed

The ledger keeps the books, policy.py decides, leases.py watches the clock of each lease. Time is
passed in (seconds of a monotonic clock).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from asyncrl.journal.tables import GroupRow, PayloadRef
from asyncrl.types import GroupId
from buffer.batches import Batches
from buffer.groups import OPEN, OUTSTANDING, Group, Groups, State
from buffer.policy import StalenessPolicy
from buffer.void import LeaseId, VoidLeases

Judgement = Literal["accepted", "duplicate", "superseded", "stale", "unknown"]


class Ledger:
    """All groups that were admitted."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        group_id: Callable[[int], GroupId],
        max_attempts: int,
    ) -> None:
        """`group_id(number)` names the number-th prompt of the run; after `max_attempts` strikes it
        is quarantined."""
        self.policy = policy
        self._group_id = group_id
        self._max_attempts = max_attempts
        self.groups = Groups()
        """Their counts by state add up to what was admitted."""
        self.batches = Batches(policy, self.groups)
        self.void = VoidLeases()

    def restore(
        self,
        rows: Sequence[GroupRow],
        *,
        committed: int,
        steps: int,
        closed: bool,
        now: float,
    ) -> None:
        """Takes over the books of a buffer that has ended; `steps` batches were assigned, and
        `closed` says whether the last of them was a smaller one at the end of the data.

        Leases go on with all their time, in the name of the generator that held them.
        """
        groups = [Group.from_row(row) for row in rows]
        for group in groups:
            self.groups.add(group)
        self.batches.restore(groups)
        self.policy.restore(
            admitted=len(groups),
            committed=committed,
            next_step=steps,
            closed=closed,
            queue=[group.number for group in groups if group.state in OUTSTANDING],
        )
        for group in groups:
            if group.state in (State.LEASED, State.READY):
                self._resume(group, now)

    def next_min_version(self) -> int | None:
        """The version a generator must serve to get the next lease; None when there is none."""
        if (first := self.groups.first_waiting()) is not None:
            return self.policy.min_version(first)
        return self.policy.next_min_version() if self.policy.can_admit() else None

    def lease(self, member: str, *, serving_version: int, now: float) -> Group | None:
        """Gives `member` the first group that `serving_version` may generate, if there is one."""
        needed = self.next_min_version()
        if needed is None or needed > min(serving_version, self.policy.committed):
            return None
        first = self.groups.first_waiting()
        group = self._admit() if first is None else self.groups.by_number[first]
        group.version = self.policy.lease(group.number, serving_version)
        group.member, group.granted_at = member, now
        group.started_at = group.missing_since = None
        self.groups.move(group, State.LEASED)
        return group

    def started(self, id: GroupId, attempt: int, version: int, *, now: float) -> bool:
        """Starts the lease's clock. False: not a current lease, or a version it may not use."""
        group = self.groups.by_id.get(id)
        if group is None or group.state != State.LEASED or group.attempt != attempt:
            return False
        if group.started_at is not None or not self.policy.accepts(group.number, version):
            return False
        self.policy.started(group.number, version)
        group.started_at, group.version = now, version
        self.groups.change(group)
        return True

    def judge(self, id: GroupId, attempt: int, oldest_version: int | None) -> Judgement:
        """What a submitted group is worth; changes nothing. `oldest_version` is None for a group
        without tokens, which is as old as its lease."""
        group = self.groups.by_id.get(id)
        if group is None or attempt > group.attempt:
            return "unknown"
        if attempt < group.valid_attempt:
            return "superseded"
        if group.state not in OPEN:
            return "duplicate" if group.accepted_attempt == attempt else "superseded"
        oldest = self._oldest(group, oldest_version)
        return "accepted" if self.policy.accepts(group.number, oldest) else "stale"

    def accept(
        self,
        id: GroupId,
        attempt: int,
        *,
        member: str,
        oldest_version: int | None,
        token_versions: dict[int, int],
        reward: float | None,
        payload: PayloadRef | None,
        filtered_because: str | None,
        keeps_place: bool = False,
    ) -> None:
        """Takes a group that was judged `accepted`: READY, or FILTERED with the reason, and then
        its place is free for another unless it `keeps_place`. `reward` is the mean of its scored
        rollouts."""
        group = self.groups.by_id[id]
        if (group.member, group.attempt) != (member, attempt):
            self._void_lease(group)
        group.version = self._oldest(group, oldest_version)
        group.member, group.reward = member, reward
        group.token_versions = dict(token_versions)
        group.accepted_attempt, group.payload = attempt, payload
        if filtered_because is None:
            self.policy.finish(group.number, group.version)
            self.groups.move(group, State.READY)
        elif keeps_place:
            self.policy.blank(group.number)
            group.reason = filtered_because
            self.groups.move(group, State.FILTERED)
        else:
            self._settle(group, State.FILTERED, filtered_because)

    def held(self, id: GroupId, attempt: int, *, by: str) -> Group | None:
        """The group that this generator has this lease of now; None when it has not."""
        group = self.groups.by_id.get(id)
        if group is None or group.state != State.LEASED:
            return None
        return group if (group.attempt, group.member) == (attempt, by) else None

    def fail(self, group: Group, *, content: bool, overdue: bool, reason: str) -> None:
        """Its generator gives a lease back. To quarantine count failures caused by content, and a
        lease that had used up its time, as if it had expired here."""
        group.seed_k += content
        group.member = ""  # whoever held it need not be told
        if content or overdue:
            self.strike(group, reason)
        else:
            self.reissue(group, reason)

    def let_go_late(self, *, reissue: bool) -> list[tuple[Group, LeaseId]]:
        """Groups in flight at their deadline for which alone the learner waits are waited for no
        longer: fate STALE, or generated anew as often as there are attempts. Returns them, and the
        leases that have ended so."""
        groups = [self.groups.by_number[number] for number in self.policy.late()]
        late = [(group, _lease_of(group)) for group in groups]
        for group in groups:
            reason = f"in flight at its deadline, step {self.policy.next_step}"
            if reissue:
                self.strike(group, reason)
            else:
                self._settle(group, State.STALE, reason)
        return late

    def drop(self, group: Group, reason: str) -> None:
        """No further attempt at this leased group can help: its fate is DROPPED."""
        group.member = ""  # whoever held it need not be told
        self._settle(group, State.DROPPED, reason)

    def fork(self, version: int) -> int:
        """The learner goes on differently from `version`: groups without a batch that newer
        versions began are generated anew, and what their generators may still submit is void.
        Returns how many."""
        outstanding = [n for n in self.policy.outstanding if not self.policy.is_blank(n)]
        newer = [
            self.groups.by_number[number]
            for number in outstanding
            if self._is_newer(self.groups.by_number[number], version)
        ]
        for group in newer:
            self.reissue(group, f"the learner was changed at version {version}")
            group.valid_attempt = group.attempt
        return len(newer)

    def strike(self, group: Group, reason: str) -> None:
        """An attempt that counts has failed: the group is quarantined, or generated anew."""
        group.strikes += 1
        if group.strikes >= self._max_attempts:
            self._settle(group, State.QUARANTINED, reason)
        else:
            self.reissue(group, reason)

    def reissue(self, group: Group, reason: str) -> None:
        """Back to WAITING, for a further attempt."""
        self._void_lease(group)
        self.policy.release(group.number)
        group.attempt += 1
        group.version = group.payload = group.accepted_attempt = group.started_at = None
        group.reward = group.leased_at = group.finished_at = None
        group.member, group.reason = "", reason
        group.token_versions = {}
        self.groups.move(group, State.WAITING)

    def drop_leftovers(self) -> None:
        """Gives a fate to groups at the end of the data that no batch will take, and frees the
        places of filtered groups that would make a batch on their own."""
        self._settle_all(self.policy.leftovers(), State.DROPPED, "too few for a last batch")
        while blank := self.policy.blank_batch():
            self._settle_all(blank, State.FILTERED, "")

    def cancel_outstanding(self, reason: str) -> None:
        """The run ends: whatever is outstanding is cancelled."""
        self._settle_all(self.policy.outstanding, State.CANCELLED, reason)

    def _admit(self) -> Group:
        number = self.policy.admit()
        group = Group(number, self._group_id(number))
        self.groups.add(group)
        self.groups.change(group)
        if self.groups.counts.total() != self.policy.admitted:
            raise RuntimeError(
                f"groups by state {dict(self.groups.counts)} do not add up to what was admitted: "
                f"{self.policy}"
            )
        return group

    def _resume(self, group: Group, now: float) -> None:
        assert group.version is not None
        finished = group.state == State.READY
        if not self.policy.resume(group.number, group.version, finished=finished):
            self.reissue(group, f"version {group.version} is too old for this max_staleness")
        elif not finished:
            group.granted_at = now
            group.started_at = None if group.started_at is None else now

    @staticmethod
    def _is_newer(group: Group, version: int) -> bool:
        begun = group.state == State.READY or group.started_at is not None
        return begun and group.version is not None and group.version > version

    def _oldest(self, group: Group, oldest_version: int | None) -> int:
        if oldest_version is not None:
            return oldest_version
        if group.state == State.LEASED and group.version is not None:
            return group.version
        return self.policy.min_version(group.number)

    def _settle_all(self, numbers: Sequence[int], state: State, reason: str) -> None:
        """A filtered group that had kept its place stays filtered."""
        for number in numbers:
            if self.policy.is_blank(number):
                self.policy.remove(number)
            else:
                self._settle(self.groups.by_number[number], state, reason)

    def _void_lease(self, group: Group) -> None:
        """Whoever holds it now is to hear that it does so no longer."""
        if group.state == State.LEASED and group.member:
            self.void.add(_lease_of(group))

    def _settle(self, group: Group, state: State, reason: str) -> None:
        if state != State.FILTERED:
            self._void_lease(group)
        self.policy.remove(group.number)
        group.reason = reason
        self.groups.move(group, state)


def _lease_of(group: Group) -> LeaseId:
    return LeaseId(group.id, group.attempt, group.member)
