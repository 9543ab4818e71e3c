"""The tables of the journal, and their rows.

    meta(key, value)      what is kept by name: schema; data, groups_per_step, group_size (must not
                          change); inc, position, committed, oldest_step, owner, config_digest,
                          forks, done, staleness (JSON), closed, evaluating (JSON), records_told,
                          not_issued, end (JSON of messages.End, or empty)
    groups(number, ...)   one row for each admitted prompt group: GroupRow, number = admission order
    steps(step, ...)      one row for each assigned batch: StepRow; its groups are those of the step
    weights(inc, ...)     every publication: WeightsRow
    served(inc, ...)      every swap of a generator to new weights: ServedRow
    evals(version, ...)   every finished evaluation: EvalRow
    beats(at, ...)        what each process did, heartbeat by heartbeat: BeatRow; thinned out when
                          there are many (journal.MAX_BEATS)

Columns `at` and those that end in `_at` are wall-clock times, in seconds since 1970. Anybody may
read while the run goes on (journal.open_read_only). Groups by state and `not_issued` of meta add up
to what the data holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SCHEMA = 5
"""Raised by any change to a table, or to what lies in the segments. A journal of another
schema is refused."""
TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups(
  number INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, position INTEGER NOT NULL,
  state TEXT NOT NULL, attempt INTEGER NOT NULL, strikes INTEGER NOT NULL,
  seed_k INTEGER NOT NULL, member TEXT NOT NULL, version INTEGER, started INTEGER NOT NULL,
  step INTEGER,
  accepted_attempt INTEGER, segment INTEGER, offset INTEGER, length INTEGER,
  token_versions TEXT NOT NULL, reason TEXT NOT NULL,
  valid_attempt INTEGER NOT NULL, reward REAL,
  leased_at REAL, finished_at REAL, UNIQUE(epoch, position));
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(step);
CREATE INDEX IF NOT EXISTS groups_by_segment ON groups(segment);
CREATE TABLE IF NOT EXISTS steps(
  step INTEGER PRIMARY KEY, num_groups INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
  waited_for TEXT NOT NULL, record TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS weights(
  inc INTEGER, version INTEGER, location TEXT NOT NULL, digest TEXT NOT NULL,
  PRIMARY KEY(inc, version));
CREATE TABLE IF NOT EXISTS served(
  inc INTEGER, version INTEGER, member TEXT, at REAL NOT NULL, propagation_s REAL,
  seconds TEXT NOT NULL, PRIMARY KEY(inc, version, member));
CREATE TABLE IF NOT EXISTS evals(version INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS beats(
  at REAL NOT NULL, member TEXT NOT NULL, role TEXT NOT NULL, state TEXT NOT NULL,
  seconds TEXT NOT NULL, tokens INTEGER NOT NULL, version INTEGER NOT NULL);
"""


class PayloadRef(NamedTuple):
    """Where a payload lies; `length` is without its checksum."""

    segment: int
    offset: int
    length: int


class GroupRow(NamedTuple):
    """What is kept of one prompt group (buffer/ledger.py gives the fields their meaning)."""

    number: int
    epoch: int
    position: int
    state: str
    attempt: int
    strikes: int
    seed_k: int
    member: str
    version: int | None
    started: int
    """1: generation has begun, 0: leased only, or not even that."""
    step: int | None
    accepted_attempt: int | None
    segment: int | None
    offset: int | None
    length: int | None
    token_versions: str
    """JSON: trained tokens by version."""
    reason: str
    valid_attempt: int
    """Earlier attempts are void (a fork)."""
    reward: float | None
    """Mean over the scored rollouts."""
    leased_at: float | None
    """When the present lease was granted, or the one that was accepted."""
    finished_at: float | None
    """When it was accepted or got its fate."""


class StepRow(NamedTuple):
    """One assigned batch, immutable once written."""

    step: int
    num_groups: int
    max_staleness: int
    waited_for: str
    record: str
    """JSON: the metrics record of the step."""
    at: float
    """When it was assigned."""


class WeightsRow(NamedTuple):
    """One publication."""

    inc: int
    version: int
    location: str
    digest: str


class ServedRow(NamedTuple):
    """One generator serves new weights."""

    inc: int
    version: int
    member: str
    at: float
    """When it was heard."""
    propagation_s: float | None
    """Since the buffer heard of the publication, or since the generator first asked for weights,
    whichever was later. None: published before the buffer began."""
    seconds: str
    """JSON: seconds of each phase (buffer/updates.py)."""


class EvalRow(NamedTuple):
    """One finished evaluation; `record` is JSON."""

    version: int
    record: str


class BeatRow(NamedTuple):
    """One sign of life; sums count from the start of that process."""

    at: float
    member: str
    role: str
    state: str
    seconds: str
    """JSON: seconds in each phase; the difference of two rows of a member is what it did between
    them."""
    tokens: int
    """Generator: sampled. Learner: trained."""
    version: int
    """Generator: served. Learner: where it stands."""


@dataclass(frozen=True, slots=True)
class Change:
    """Rows that are written in one transaction; a row replaces the one with the same key."""

    groups: tuple[GroupRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    weights: tuple[WeightsRow, ...] = ()
    served: tuple[ServedRow, ...] = ()
    evals: tuple[EvalRow, ...] = ()
    beats: tuple[BeatRow, ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """What a journal held when it was opened, as far as a run goes on from it."""

    groups: tuple[GroupRow, ...]
    steps: tuple[StepRow, ...]
    weights: tuple[WeightsRow, ...]
    evals: tuple[EvalRow, ...]
    meta: dict[str, str]
