"""What a weight update costs: from Published and Served to rows of the journal and records."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from local_runs import Finished
from scripted_peers import Generator, Learner, make_config
from serving_buffer import Serving, play, serving

from asyncrl.journal import open_read_only
from asyncrl.messages import Served, WatchWeights
from asyncrl.report.reading import read_run
from asyncrl.report.summary import gather
from asyncrl.types import WeightId
from buffer.arrivals import mean
from buffer.members import Member
from buffer.updates import MAX_KNOWN, Updates

START = WeightId(0, 0)
SECONDS = {
    **{"rendezvous": 0.01, "transfer": 0.5, "verify": 0.04, "wait": 0.1},
    **{"pause": 0.02, "load": 0.2, "reset": 0.03, "resume": 0.001},
}


def make(*published: WeightId, is_under_pause: bool = False) -> Updates:
    return Updates(published, is_under_pause=is_under_pause, wall_offset=1000.0)


def generators(*names: str) -> list[Member]:
    return [Member(name, "generator", "here", 1, last_seen=0.0) for name in names]


def serve(
    updates: Updates, name: str, version: int, *, now: float, seconds: dict[str, float] = SECONDS
) -> None:
    updates.served(name, Served(inc=1, version=version, seconds=seconds), now=now)


def two_generators() -> Updates:
    """Both ask for weights at 1; version 1 is published at 10."""
    updates = make()
    for name in ("a", "b"):
        updates.asked(name, START, now=1.0)
    updates.published(WeightId(1, 1), now=10.0)
    return updates


def test_a_record_tells_means_and_maxima_over_generators_once_all_serve_the_version() -> None:
    updates = two_generators()
    serve(updates, "a", 1, now=11.0)
    updates.settle(generators("a", "b"))
    assert updates.unread == []
    serve(updates, "b", 1, now=13.0, seconds={**SECONDS, "transfer": 1.5, "load": 0.4})
    updates.settle(generators("a", "b"))
    updates.settle(generators("a", "b"))
    [record] = updates.unread
    assert (record.name, record.step) == ("weights", 1)
    values = record.values
    assert (values["inc"], values["num_served"], values["num_skipped"]) == (1, 2, 0)
    assert (values["propagation_mean_s"], values["propagation_max_s"]) == (2.0, 3.0)
    assert (values["transfer_mean_s"], values["transfer_max_s"]) == (1.0, 1.5)
    assert values["stage_max_s"] == pytest.approx(1.55)
    assert values["paused_max_s"] == pytest.approx(0.451)
    assert values["paused_sum_s"] == pytest.approx(0.251 + 0.451)
    assert values["wait_mean_s"] == 0.1


def test_staging_under_pause_counts_as_pause() -> None:
    updates = make(is_under_pause=True)
    updates.asked("a", START, now=1.0)
    updates.published(WeightId(1, 1), now=2.0)
    serve(updates, "a", 1, now=3.0)
    [row] = updates.take_rows()
    assert json.loads(row.seconds)["paused"] == pytest.approx(0.251 + 0.55)


def test_rows_have_the_wall_clock_and_are_taken_once() -> None:
    updates = two_generators()
    serve(updates, "a", 1, now=11.5)
    serve(updates, "a", 1, now=12.0)
    [row] = updates.take_rows()
    assert (row.inc, row.version, row.member, row.at, row.propagation_s) == (1, 1, "a", 1011.5, 1.5)
    assert updates.take_rows() == ()


def test_versions_that_a_generator_passed_over_are_counted_as_skipped() -> None:
    updates = two_generators()
    for version in (2, 3):
        updates.published(WeightId(1, version), now=10.0 + version)
    serve(updates, "a", 1, now=14.0)
    serve(updates, "a", 3, now=15.0)
    serve(updates, "b", 3, now=16.0)
    updates.settle(generators("a", "b"))
    told = [(r.step, r.values["num_served"], r.values["num_skipped"]) for r in updates.unread]
    assert told == [(1, 1, 1), (2, 0, 2), (3, 2, 0)]
    assert "propagation_mean_s" not in updates.unread[1].values


def test_a_generator_that_joins_later_has_skipped_nothing_and_counts_from_its_first_question() -> (
    None
):
    updates = two_generators()
    updates.published(WeightId(1, 2), now=11.0)
    updates.asked("late", START, now=50.0)
    serve(updates, "late", 2, now=51.0)
    assert updates.take_rows()[0].propagation_s == 1.0
    for name in ("a", "b"):
        serve(updates, name, 2, now=52.0)
    updates.settle(generators("a", "b", "late"))
    assert [record.values["num_skipped"] for record in updates.unread] == [2, 0]


def test_a_dead_generator_holds_up_no_record() -> None:
    updates = two_generators()
    serve(updates, "a", 1, now=11.0)
    updates.settle(generators("a"))
    assert [record.values["num_served"] for record in updates.unread] == [1]


def test_the_newest_version_that_nobody_serves_is_not_told_yet() -> None:
    updates = make()
    updates.published(WeightId(1, 1), now=1.0)
    updates.settle([])
    assert updates.unread == []
    updates.published(WeightId(1, 2), now=2.0)
    updates.settle([])
    assert [(r.step, r.values["num_served"]) for r in updates.unread] == [(1, 0)]


def test_at_the_end_what_some_serve_is_told() -> None:
    updates = two_generators()
    updates.published(WeightId(1, 2), now=11.0)
    serve(updates, "a", 1, now=12.0)
    updates.settle_all()
    assert [record.step for record in updates.unread] == [1]


def test_a_generator_that_takes_nothing_cannot_make_it_remember_more_and_more() -> None:
    updates = two_generators()
    for version in range(2, 3 * MAX_KNOWN):
        updates.published(WeightId(1, version), now=10.0 + version)
        serve(updates, "a", version, now=10.5 + version)
        updates.settle(generators("a", "b"))
    told = [record.step for record in updates.unread]
    assert told == list(range(1, 2 * MAX_KNOWN))
    serve(updates, "b", 1, now=500.0)
    assert updates.take_rows()[-1].propagation_s is None


def test_what_was_published_to_an_earlier_buffer_has_no_propagation() -> None:
    updates = make(WeightId(1, 4), WeightId(1, 3))
    updates.asked("a", START, now=1.0)
    updates.published(WeightId(1, 4), now=2.0)
    updates.published(WeightId(1, 5), now=3.0)
    for version in (4, 5):
        serve(updates, "a", version, now=4.0)
    assert [row.propagation_s for row in updates.take_rows()] == [None, 1.0]


def test_the_last_values_are_those_of_the_newest_version_that_somebody_serves() -> None:
    updates = two_generators()
    assert updates.last_values() == {}
    serve(updates, "b", 1, now=10.5)
    updates.published(WeightId(1, 2), now=11.0)
    values = updates.last_values()
    assert (values["last_version"], values["propagation_s"]) == (1, 0.5)
    assert values["paused_s"] == pytest.approx(0.251)


async def update(here: Serving, generator: Generator, *, published_by: Learner) -> None:
    """A step is trained by version 0's group, and the generator serves what comes of it."""
    learner = published_by
    await generator.ask(WatchWeights(have=list(generator.serving)))
    for lease in await generator.lease(slots=4):
        await generator.start(lease)
        await generator.submit(lease)
    await learner.fetch(learner.version)
    await learner.commit()
    generator.serving = WeightId(learner.inc, learner.version)
    served = Served(inc=learner.inc, version=learner.version, seconds=SECONDS)
    await generator.ask(served)
    here.run.tick(now=here.run.began_at)


def test_an_update_is_in_the_journal_the_status_and_once_in_the_learners_records(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=0)) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            await update(here, generator, published_by=learner)
            status = await generator.status()
            await update(here, generator, published_by=learner)
        weights = status["weights"]
        assert (weights["transport"], weights["num_serving"]) == ("disk", 1)
        assert weights["last_version"] == 1
        assert weights["propagation_s"] >= 0
        assert weights["paused_s"] == pytest.approx(0.251)
        [told] = [record for record in learner.records if record.name == "weights"]
        assert (told.step, told.values["transfer_mean_s"]) == (1, 0.5)

    play(scenario())
    with closing(open_read_only(tmp_path)) as database:
        found = database.execute("SELECT inc, version, member, propagation_s FROM served")
        rows = found.fetchall()
    assert [row[:3] for row in rows] == [(1, 1, "generator-0"), (1, 2, "generator-0")]
    assert all(row[3] >= 0 for row in rows)


def test_a_buffer_that_comes_back_knows_the_last_rewards_and_not_when_weights_were_published(
    tmp_path: Path,
) -> None:
    async def first() -> None:
        async with serving(tmp_path, make_config(max_staleness=0)) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            await update(here, generator, published_by=learner)

    async def second() -> None:
        async with serving(tmp_path, make_config(max_staleness=0)) as here:
            late = here.generator("late")
            assert (await late.status())["reward_mean"] == 0.5
            await late.ask(WatchWeights(have=[0, 0]))
            await late.ask(Served(inc=1, version=1, seconds=SECONDS))
            status = await late.status()
            assert "last_version" not in status["weights"]

    play(first())
    play(second())
    with closing(open_read_only(tmp_path)) as database:
        found = database.execute("SELECT propagation_s FROM served WHERE member='late'").fetchall()
    assert found == [(None,)]


def test_the_mean_of_rewards_near_the_largest_number_is_a_number() -> None:
    assert mean([1.7e308, 1.7e308]) == 1.7e308
    assert mean([1.0] * 10) == 1.0
    assert mean([]) == 0.0


@pytest.mark.e2e
def test_a_run_tells_in_its_metrics_and_its_report_what_its_updates_cost(
    scripted_run: Finished,
) -> None:
    facts = gather(read_run(scripted_run.run_dir))
    served = {cost.version: cost for cost in facts.updates}
    told = {r["step"]: r for r in scripted_run.records if "weights/num_served" in r}
    assert told, scripted_run.logs()
    assert {v for v, r in told.items() if r["weights/num_served"]} <= served.keys()
    for version, cost in served.items():
        assert cost.blocked_s is not None
        assert cost.blocked_s > 0
        assert cost.propagation_s is not None
        assert cost.propagation_s >= cost.seconds["stage"] + cost.seconds["paused"]
        if version in told:
            assert told[version]["weights/stage_mean_s"] == pytest.approx(cost.seconds["stage"])
    assert (scripted_run.run_dir / "report" / "updates.png").stat().st_size > 0
