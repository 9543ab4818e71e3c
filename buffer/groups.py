"""The books of each prompt group, and the states it passes through."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.journal.tables import GroupRow, PayloadRef
from asyncrl.types import GroupId


class State(StrEnum):
    """Where a group stands. From FILTERED on: a fate without a step."""

    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    ASSIGNED = "assigned"
    TRAINED = "trained"
    FILTERED = "filtered"
    QUARANTINED = "quarantined"
    STALE = "stale"
    DROPPED = "dropped"
    CANCELLED = "cancelled"


OPEN = frozenset({State.WAITING, State.LEASED})
OUTSTANDING = OPEN | {State.READY}
FATES = frozenset({State.FILTERED, State.QUARANTINED, State.STALE, State.DROPPED, State.CANCELLED})


@dataclass(slots=True)
class Group:
    """The books of one prompt group."""

    number: int
    """Order of admission."""
    id: GroupId
    state: State = State.WAITING
    attempt: int = 0
    strikes: int = 0
    """Failures that count towards max_attempts."""
    seed_k: int = 0
    """Failures caused by content."""
    member: str = ""
    """Generator that holds the lease, or made the accepted rollouts."""
    version: int | None = None
    """LEASED: version that started it, or min_version before. READY and on: of the oldest token."""
    step: int | None = None
    accepted_attempt: int | None = None
    payload: PayloadRef | None = None
    token_versions: dict[int, int] = field(default_factory=dict)
    reason: str = ""
    valid_attempt: int = 0
    """Earlier attempts are void: a fork has put other weights in the place of theirs."""
    reward: float | None = None
    leased_at: float | None = None
    """Wall-clock time, for the journal; so is finished_at."""
    finished_at: float | None = None
    granted_at: float = 0.0
    started_at: float | None = None
    missing_since: float | None = None

    def row(self) -> GroupRow:
        segment, offset, length = self.payload or (None, None, None)
        return GroupRow(
            number=self.number,
            epoch=self.id.epoch,
            position=self.id.position,
            state=self.state.value,
            attempt=self.attempt,
            strikes=self.strikes,
            seed_k=self.seed_k,
            member=self.member,
            version=self.version,
            started=int(self.started_at is not None),
            step=self.step,
            accepted_attempt=self.accepted_attempt,
            segment=segment,
            offset=offset,
            length=length,
            token_versions=json.dumps(self.token_versions),
            reason=self.reason,
            valid_attempt=self.valid_attempt,
            reward=self.reward,
            leased_at=self.leased_at,
            finished_at=self.finished_at,
        )

    @classmethod
    def from_row(cls, row: GroupRow) -> Group:
        payload = None
        if row.segment is not None and row.offset is not None and row.length is not None:
            payload = PayloadRef(row.segment, row.offset, row.length)
        return cls(
            number=row.number,
            id=GroupId(row.epoch, row.position),
            state=State(row.state),
            attempt=row.attempt,
            strikes=row.strikes,
            seed_k=row.seed_k,
            member=row.member,
            version=row.version,
            step=row.step,
            accepted_attempt=row.accepted_attempt,
            payload=payload,
            token_versions={int(v): n for v, n in json.loads(row.token_versions).items()},
            reason=row.reason,
            valid_attempt=row.valid_attempt,
            reward=row.reward,
            leased_at=row.leased_at,
            finished_at=row.finished_at,
            started_at=0.0 if row.started else None,
        )


class Groups:
    """All groups of a run, by name, number and state; and which of them the journal has yet to
    hear of."""

    def __init__(self) -> None:
        self.by_id: dict[GroupId, Group] = {}
        self.by_number: dict[int, Group] = {}
        self.counts: Counter[State] = Counter()
        """Groups by state, also of those that are forgotten."""
        self._open: dict[State, set[int]] = {state: set() for state in OPEN}
        self._changed: set[int] = set()

    @property
    def is_changed(self) -> bool:
        """Whether `take_rows` has any."""
        return bool(self._changed)

    def add(self, group: Group) -> None:
        """A group in whatever state it is in; the journal knows of it already."""
        self.by_id[group.id] = self.by_number[group.number] = group
        self.counts[group.state] += 1
        if group.state in OPEN:
            self._open[group.state].add(group.number)

    def move(self, group: Group, state: State) -> None:
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state in OPEN:
            self._open[group.state].discard(group.number)
        if state in OPEN:
            self._open[state].add(group.number)
        group.state = state
        self.change(group)

    def change(self, group: Group) -> None:
        """Its books have changed."""
        self._changed.add(group.number)

    def first_waiting(self) -> int | None:
        """Number of the WAITING group that was admitted first."""
        return min(self._open[State.WAITING], default=None)

    def leased(self) -> list[Group]:
        """In order of admission."""
        return [self.by_number[number] for number in sorted(self._open[State.LEASED])]

    def forget(self, number: int) -> None:
        """Drops a group from memory, if the journal has heard of it as it is now."""
        if number not in self._changed:
            del self.by_id[self.by_number.pop(number).id]

    def take_rows(self, *, at: float) -> tuple[GroupRow, ...]:
        """Rows of the groups that changed since the last call, stamped with the wall-clock time
        `at`."""
        groups = [self.by_number[number] for number in sorted(self._changed)]
        self._changed.clear()
        for group in groups:
            if group.state == State.LEASED and group.leased_at is None:
                group.leased_at = at
            if group.state not in OPEN and group.finished_at is None:
                group.finished_at = at
        return tuple(group.row() for group in groups)
