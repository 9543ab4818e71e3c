"""The books of prompt groups: verdicts, re-leases, quarantine, and a restart that keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncrl.journal.tables import GroupRow, PayloadRef
from asyncrl.types import GroupId
from buffer.groups import Group, State
from buffer.leases import LOST_LEASE_S, LeaseClocks, Overdue
from buffer.ledger import Ledger
from buffer.policy import StalenessPolicy

FIRST = GroupId(0, 0)


def make_ledger(*, max_staleness: int = 1, groups_per_step: int = 2, num_groups: int = 8) -> Ledger:
    policy = StalenessPolicy(
        max_staleness=max_staleness, groups_per_step=groups_per_step, num_groups=num_groups
    )
    return Ledger(
        policy,
        group_id=lambda number: GroupId(*divmod(number, num_groups)),
        max_attempts=3,
    )


def clocks_of(ledger: Ledger) -> LeaseClocks:
    return LeaseClocks(ledger, lease_timeout_s=100.0)


def lease(ledger: Ledger, member: str = "a", *, version: int = 0, now: float = 0.0) -> Group:
    group = ledger.lease(member, serving_version=version, now=now)
    assert group is not None
    return group


def accept(ledger: Ledger, id: GroupId, attempt: int = 0, *, version: int = 0) -> None:
    assert ledger.judge(id, attempt, version) == "accepted"
    ledger.accept(
        id,
        attempt,
        member="a",
        oldest_version=version,
        token_versions={version: 3},
        reward=0.5,
        payload=PayloadRef(1, 0, 10),
        filtered_because=None,
    )


def test_a_group_sent_twice_is_a_duplicate() -> None:
    ledger = make_ledger()
    lease(ledger)
    accept(ledger, FIRST)
    assert ledger.judge(FIRST, 0, 0) == "duplicate"


def test_a_group_that_another_attempt_finished_is_superseded() -> None:
    ledger = make_ledger()
    lease(ledger, "a")
    clocks_of(ledger).release_member("a", reason="dead")
    assert lease(ledger, "b").attempt == 1
    accept(ledger, FIRST, 0)
    assert ledger.judge(FIRST, 1, 0) == "superseded"
    assert ledger.held(FIRST, 1, by="b") is None


def test_a_group_never_leased_is_unknown() -> None:
    ledger = make_ledger()
    assert ledger.judge(FIRST, 0, 0) == "unknown"
    lease(ledger)
    assert ledger.judge(FIRST, 1, 0) == "unknown"


def test_a_group_with_tokens_too_old_is_stale() -> None:
    ledger = make_ledger(max_staleness=0)
    for _ in range(2):
        accept(ledger, lease(ledger).id)
    ledger.batches.assign()
    ledger.batches.commit(1)
    group = lease(ledger, version=1)
    assert ledger.judge(group.id, 0, 0) == "stale"
    assert ledger.judge(group.id, 0, 1) == "accepted"


def test_dead_generators_leases_go_to_another_in_order_and_with_the_same_seeds() -> None:
    ledger = make_ledger()
    lost = [lease(ledger, "a") for _ in range(3)]
    lease(ledger, "b")
    assert clocks_of(ledger).release_member("a", reason="dead") == 3
    again = [lease(ledger, "b") for _ in range(3)]
    assert [group.id for group in again] == [group.id for group in lost]
    assert [(group.attempt, group.seed_k) for group in again] == [(1, 0)] * 3


def test_content_failures_raise_the_seed_number_and_end_in_quarantine() -> None:
    ledger = make_ledger()
    for attempt in range(3):
        group = lease(ledger)
        assert (group.id, group.attempt, group.seed_k) == (FIRST, attempt, attempt)
        ledger.fail(group, content=True, overdue=False, reason="bad answer")
    assert group.state == State.QUARANTINED
    assert group.reason == "bad answer"
    assert lease(ledger).id == GroupId(0, 1)


def test_failures_of_machines_never_quarantine() -> None:
    ledger = make_ledger()
    for attempt in range(10):
        group = lease(ledger)
        assert group.attempt == attempt
        ledger.fail(group, content=False, overdue=False, reason="engine died")
    assert lease(ledger).seed_k == 0


def test_the_clock_of_a_lease_starts_with_the_generation() -> None:
    ledger = make_ledger()
    group = lease(ledger, now=0.0)
    assert ledger.started(group.id, 0, 0, now=90.0)
    assert clocks_of(ledger).expire(now=180.0) == []
    assert clocks_of(ledger).expire(now=191.0) == [Overdue("a", FIRST, 0)]
    assert (group.state, group.attempt, group.strikes) == (State.WAITING, 1, 1)


@pytest.mark.parametrize("told", [True, False])
def test_a_prompt_that_hangs_every_generator_is_quarantined(told: bool) -> None:
    """Whether the generator's own clock ends the lease, or the one here."""
    ledger = make_ledger()
    for attempt in range(3):
        now = 1000.0 * attempt
        group = lease(ledger, now=now)
        assert (group.id, group.attempt, group.seed_k) == (FIRST, attempt, 0)
        assert ledger.started(FIRST, attempt, 0, now=now + 0.5)
        if told:
            overdue = clocks_of(ledger).is_overdue(group, now=now + 100.1)
            ledger.fail(group, content=False, overdue=overdue, reason="not finished")
        clocks_of(ledger).expire(now=now + 101.0)
    assert (group.state, group.strikes) == (State.QUARANTINED, 3)


def test_a_lease_given_back_late_but_never_begun_does_not_count() -> None:
    ledger = make_ledger()
    group = lease(ledger, now=0.0)
    assert not clocks_of(ledger).is_overdue(group, now=100.1)
    ledger.fail(group, content=False, overdue=False, reason="no room")
    assert (group.state, group.strikes) == (State.WAITING, 0)


def test_a_lease_that_waited_long_for_weights_and_then_failed_is_not_late() -> None:
    ledger = make_ledger()
    group = lease(ledger, now=0.0)
    ledger.started(FIRST, 0, 0, now=90.0)
    assert not clocks_of(ledger).is_overdue(group, now=120.0)
    assert clocks_of(ledger).is_overdue(group, now=189.5)


def test_a_lease_that_its_generator_does_not_report_is_leased_again() -> None:
    ledger = make_ledger()
    lost, kept = lease(ledger), lease(ledger)
    for now in (1.0, 5.0, 1.0 + LOST_LEASE_S):
        clocks_of(ledger).reconcile("a", [(kept.id, 0)], now=now)
        assert lost.state == State.LEASED
    clocks_of(ledger).reconcile("a", [(kept.id, 0)], now=1.5 + LOST_LEASE_S)
    assert (lost.state, kept.state) == (State.WAITING, State.LEASED)


def test_a_lease_reported_again_is_not_lost() -> None:
    ledger = make_ledger()
    group = lease(ledger)
    clocks_of(ledger).reconcile("a", [], now=0.0)
    clocks_of(ledger).reconcile("a", [(group.id, 0)], now=9.0)
    clocks_of(ledger).reconcile("a", [], now=10.0)
    clocks_of(ledger).reconcile("a", [], now=19.0)
    assert group.state == State.LEASED


def test_a_filtered_group_frees_its_place_at_once() -> None:
    ledger = make_ledger(max_staleness=0)
    first = lease(ledger)
    lease(ledger)
    assert ledger.lease("a", serving_version=0, now=0.0) is None
    ledger.accept(
        first.id,
        0,
        member="a",
        oldest_version=0,
        token_versions={0: 3},
        reward=0.0,
        payload=PayloadRef(1, 0, 10),
        filtered_because="all rewards are 0",
    )
    assert lease(ledger).id == GroupId(0, 2)


def restarted(ledger: Ledger, rows: Sequence[GroupRow], *, max_staleness: int = 1) -> Ledger:
    again = make_ledger(max_staleness=max_staleness)
    policy = ledger.policy
    again.restore(
        rows,
        committed=policy.committed,
        steps=policy.next_step,
        closed=policy.closed,
        now=1000.0,
    )
    return again


def test_a_restart_keeps_the_books_and_gives_leases_a_fresh_deadline() -> None:
    ledger = make_ledger()
    groups = [lease(ledger) for _ in range(4)]
    ledger.started(groups[3].id, 0, 0, now=0.0)
    for group in groups[:3]:
        accept(ledger, group.id)
    ledger.batches.assign()
    again = restarted(ledger, ledger.groups.take_rows(at=0.0))
    assert again.groups.counts == ledger.groups.counts
    assert again.policy.outstanding == (2, 3)
    assert [group.id for group in again.batches.of(0)] == [groups[0].id, groups[1].id]
    assert clocks_of(again).expire(now=1099.0) == []
    assert again.judge(groups[2].id, 0, 0) == "duplicate"
    accept(again, groups[3].id)
    again.batches.commit(1)
    assert [group.number for group in again.batches.assign()[1]] == [2, 3]


def test_after_a_restart_only_leases_that_had_begun_count_when_they_run_late() -> None:
    ledger = make_ledger()
    begun, granted = lease(ledger), lease(ledger)
    ledger.started(begun.id, 0, 0, now=0.0)
    again = restarted(ledger, ledger.groups.take_rows(at=0.0))
    assert [group.started_at for group in again.groups.leased()] == [1000.0, None]
    assert len(clocks_of(again).expire(now=1101.0)) == 2
    strikes = {row.number: row.strikes for row in again.groups.take_rows(at=0.0)}
    assert strikes == {begun.number: 1, granted.number: 0}


def test_a_restart_with_a_smaller_bound_generates_anew_what_is_too_old_for_it() -> None:
    ledger = make_ledger()
    for _ in range(4):
        accept(ledger, lease(ledger).id)
    ledger.batches.assign()
    again = restarted(ledger, ledger.groups.take_rows(at=0.0), max_staleness=0)
    assert again.groups.counts == {State.ASSIGNED: 2, State.READY: 0, State.WAITING: 2}
    again.batches.commit(1)
    assert lease(again, version=1).attempt == 1


def test_forgetting_trained_steps_keeps_the_counts() -> None:
    ledger = make_ledger()
    for _ in range(4):
        accept(ledger, lease(ledger).id)
    ledger.batches.assign()
    ledger.batches.commit(1)
    ledger.groups.take_rows(at=0.0)
    ledger.batches.forget(before_step=1)
    assert ledger.judge(FIRST, 0, 0) == "unknown"
    assert ledger.groups.counts[State.TRAINED] == 2
    ledger.batches.assign()
    assert ledger.groups.counts.total() == 4
