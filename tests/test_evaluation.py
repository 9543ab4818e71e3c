"""Evaluations: one version at a time, every row once, whatever happens to the generators."""

from __future__ import annotations

from scripted_peers import rows

from buffer.arrivals import Arrival
from buffer.evaluation import MAX_FAILURES, EvalLease, Evaluations


def make(num_rows: int = 2, *, timeout_s: float = 60.0) -> Evaluations:
    return Evaluations(rows(num_rows), temperature=1.0, timeout_s=timeout_s)


def arrival(*rewards: float, version: int = 0, source: str = "words") -> Arrival:
    return Arrival(
        source=source,
        oldest_version=version,
        token_versions={version: 4},
        rewards=rewards,
        lengths=(4,) * len(rewards),
        num_truncated=0,
    )


def lease(evaluations: Evaluations, member: str = "a", *, version: int = 0) -> EvalLease:
    found = evaluations.lease(member, serving_version=version, now=1.0)
    assert found is not None
    return found


def finish(evaluations: Evaluations, *, version: int) -> None:
    while (found := evaluations.lease("a", serving_version=version, now=1.0)) is not None:
        evaluations.accept(found.index, arrival(1.0, version=version), now=2.0)


def test_accuracy_is_the_mean_reward_over_all_and_by_source() -> None:
    evaluations = make()
    evaluations.due(0, now=0.0)
    evaluations.accept(lease(evaluations).index, arrival(1.0, 0.0, source="a"), now=1.0)
    evaluations.accept(lease(evaluations).index, arrival(1.0, 1.0, source="b"), now=3.5)
    [record] = evaluations.results
    assert record.values["accuracy"] == 0.75
    assert record.values["accuracy/a"] == 0.5
    assert record.values["accuracy/b"] == 1.0
    assert record.values["duration_s"] == 2.5
    assert evaluations.idle


def test_generators_of_older_versions_get_no_row() -> None:
    evaluations = make()
    evaluations.due(3, now=0.0)
    assert evaluations.lease("a", serving_version=2, now=0.0) is None
    assert lease(evaluations, version=4).version == 3


def test_of_several_that_become_due_meanwhile_only_the_newest_is_made() -> None:
    evaluations = make()
    for version in (0, 10, 20, 20):
        evaluations.due(version, now=0.0)
    finish(evaluations, version=0)
    finish(evaluations, version=20)
    assert [record.step for record in evaluations.results] == [0, 20]
    assert evaluations.idle


def test_a_dead_generators_rows_go_to_another_and_its_late_answer_is_superseded() -> None:
    evaluations = make()
    evaluations.due(0, now=0.0)
    lost = lease(evaluations, "dead")
    evaluations.release_member("dead")
    again = lease(evaluations, "b")
    assert (again.index, again.attempt, again.failures) == (lost.index, 1, 0)
    evaluations.accept(again.index, arrival(1.0), now=1.0)
    assert evaluations.judge(0, lost.index, 0, 0) == "superseded"
    assert evaluations.judge(0, lost.index, 1, 0) == "duplicate"


def test_a_row_that_always_fails_is_given_up_and_counted() -> None:
    evaluations = make()
    evaluations.due(0, now=0.0)
    for attempt in range(MAX_FAILURES):
        found = lease(evaluations)
        assert (found.index, found.attempt, found.failures) == (0, attempt, attempt)
        assert evaluations.fail(0, 0, attempt, now=1.0) == "accepted"
    finish(evaluations, version=0)
    [record] = evaluations.results
    assert (record.values["num_rows"], record.values["num_rows_missing"]) == (2, 1)


def test_responses_older_than_the_evaluated_version_are_stale() -> None:
    evaluations = make()
    evaluations.due(3, now=0.0)
    found = lease(evaluations, version=3)
    assert evaluations.judge(3, found.index, 0, 2) == "stale"
    assert evaluations.judge(3, found.index, 0, 3) == "accepted"


def test_an_evaluation_that_nobody_works_on_ends_after_its_time() -> None:
    evaluations = make(timeout_s=60.0)
    evaluations.due(0, now=0.0)
    evaluations.expire(now=59.0)
    assert not evaluations.results
    evaluations.expire(now=61.0)
    assert evaluations.idle
    assert "accuracy" not in evaluations.results[0].values


def test_without_rows_nothing_is_ever_due() -> None:
    evaluations = make(0)
    evaluations.due(0, now=0.0)
    assert evaluations.idle
