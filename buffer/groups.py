"""The books of one prompt group, and the states it passes through."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.journal_tables import GroupRow, PayloadRef
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
    DROPPED = "dropped"
    CANCELLED = "cancelled"


OUTSTANDING = frozenset({State.WAITING, State.LEASED, State.READY})
FATES = frozenset({State.FILTERED, State.QUARANTINED, State.DROPPED, State.CANCELLED})


@dataclass(slots=True)
class Group:
    """The books of one prompt group."""

    number: int
    """Order of admission."""
    id: GroupId
    state: State = State.WAITING
    attempt: int = 0
    strikes: int = 0
    """Failures that count towards max_attempts: caused by content, or by running late."""
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
