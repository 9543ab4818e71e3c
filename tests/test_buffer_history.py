"""What the report of a run reads: heartbeats as rows, and times in the rows of groups and steps."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from scripted_peers import make_config
from serving_buffer import play, serving

from asyncrl.journal import Journal, fates, open_read_only
from asyncrl.journal.tables import BeatRow, Change
from asyncrl.shares import lanes, shares
from asyncrl.types import WeightId
from buffer.history import IDLE_ROW_S, History, earlier_beats
from buffer.lives import MAX_LIVES, RECENT_S, Lives, time_values
from buffer.members import Member


class Heard:
    """One member whose heartbeats come every 5 s."""

    def __init__(self) -> None:
        self.history = History(interval_s=5.0, wall_offset=1000.0)
        self.member = Member("generator-0", "generator", "h", 1, 0.0)

    def beat(self, now: float, state: str, tokens: int = 0, **seconds: float) -> list[BeatRow]:
        self.member.state, self.member.num_tokens = state, tokens
        self.member.seconds = dict(seconds)
        self.history.heard(self.member, now=now)
        return list(self.history.take_rows())


def test_a_heartbeat_with_news_is_a_row_at_wall_clock_time() -> None:
    heard = Heard()
    heard.member.serving = WeightId(1, 7)
    [row] = heard.beat(5.0, "generating", 100, generating=4.0)
    assert row == BeatRow(
        at=1005.0,
        member="generator-0",
        role="generator",
        state="generating",
        seconds='{"generating": 4.0}',
        tokens=100,
        version=7,
    )
    assert len(heard.beat(10.0, "generating", 200, generating=9.0)) == 1


def test_a_heartbeat_before_its_time_is_part_of_the_next_row() -> None:
    heard = Heard()
    heard.beat(5.0, "generating", 100, generating=4.0)
    assert heard.beat(6.0, "swapping", 110, generating=5.0) == []
    [row] = heard.beat(10.0, "generating", 150, generating=8.0, swapping=1.0)
    assert json.loads(row.seconds) == {"generating": 8.0, "swapping": 1.0}


def test_a_process_that_only_waits_has_a_row_a_minute() -> None:
    heard = Heard()
    beats = range(5, 605, 5)
    rows = [row for now in beats for row in heard.beat(float(now), "waiting", waiting=float(now))]
    assert [row.at - 1005 for row in rows] == [i * IDLE_ROW_S for i in range(10)]


def test_work_between_two_looks_at_the_same_state_is_news() -> None:
    heard = Heard()
    heard.beat(5.0, "waiting", waiting=5.0)
    assert len(heard.beat(10.0, "waiting", waiting=9.0, generating=1.0)) == 1


def test_work_after_a_long_wait_is_not_spread_over_it() -> None:
    """Shares cut inside a gap between two rows are those of the whole gap."""
    heard = Heard()
    for now in (5.0, 10.0, 15.0):
        heard.beat(now, "waiting", wait_batch=now)
    rows = heard.beat(20.0, "generating", 50, wait_batch=16.0, generating=4.0)
    assert [(row.at, row.state) for row in rows] == [
        (1015.0, "waiting"),
        (1020.0, "generating"),
    ]
    [spent] = shares(lanes(rows), since_s=1015.0, until_s=1020.0)
    assert spent.seconds == pytest.approx({"generating": 4.0, "waiting for a batch": 1.0})


def test_there_is_a_row_an_interval_at_most_also_where_news_ends_a_wait() -> None:
    heard = Heard()
    for now in (5.0, 10.0):
        heard.beat(now, "waiting", waiting=now)
    [waited] = heard.beat(11.0, "generating", 10, waiting=10.5, generating=0.5)
    assert (waited.at, waited.state) == (1010.0, "waiting")
    [news] = heard.beat(15.0, "generating", 60, waiting=10.5, generating=4.5)
    assert (news.at, news.tokens) == (1015.0, 60)


def test_rows_wait_for_somebody_elses_transaction_only_so_long() -> None:
    heard = Heard()
    heard.history.note(heard.member, now=10.0)
    assert not heard.history.is_due(now=12.0)
    assert heard.history.is_due(now=16.0)
    heard.history.take_rows()
    assert not heard.history.is_due(now=100.0)


def beat_at(age: float, *, member: str = "generator-0-aaaa", began: float = 0.0) -> BeatRow:
    """Of a generator that waits every second second."""
    seconds = json.dumps({"generating": age / 2, "waiting for leases": age / 2})
    return BeatRow(began + age, member, "generator", "generating", seconds, 0, 0)


def test_what_the_status_keeps_tells_of_the_whole_run_and_of_the_last_minutes() -> None:
    lives = Lives()
    for age in range(5, 4005, 5):
        lives.add(beat_at(float(age)))
    assert len(lives.rows()) < 40
    [row] = time_values(lives.rows(), now=4000.0)
    assert row["process"] == "generator-0"
    assert row["run"] == {"generating": 2000, "waiting for leases": 2000}
    assert row["recent"] == {"generating": RECENT_S / 2, "waiting for leases": RECENT_S / 2}


def test_what_the_status_keeps_is_bounded_however_many_lives_a_process_has() -> None:
    lives = Lives()
    for number in range(2 * MAX_LIVES):
        for age in range(5, 65, 5):
            lives.add(beat_at(float(age), member=f"generator-0-{number:04}", began=60.0 * number))
    rows = lives.rows()
    assert len({row.member for row in rows}) == MAX_LIVES
    assert len(rows) < 4 * MAX_LIVES
    [row] = time_values(rows, now=60.0 * 2 * MAX_LIVES)
    assert sum(row["run"].values()) == pytest.approx(60 * MAX_LIVES)
    assert sum(row["recent"].values()) == pytest.approx(RECENT_S)
    assert row["run"].get("away", 0.0) == pytest.approx(0.0)


def test_a_member_that_is_forgotten_and_comes_back_makes_a_row_at_once() -> None:
    heard = Heard()
    heard.beat(5.0, "generating", 100, generating=4.0)
    heard.history.forget_others({"generator-1"})
    assert len(heard.beat(6.0, "generating", 100, generating=4.0)) == 1


def test_a_buffer_that_comes_back_knows_where_the_time_went_before(tmp_path: Path) -> None:
    first = [beat_at(float(age)) for age in range(5, 65, 5)]
    second = [beat_at(30.0, member="generator-0-bbbb", began=90.0)]
    journal = Journal(tmp_path)
    journal.write(Change(beats=(*first, *second))).result()
    journal.close()
    lives = Lives()
    for row in earlier_beats(tmp_path):
        lives.add(row)
    [told] = time_values(lives.rows(), now=120.0)
    assert told["run"] == {"generating": 45, "waiting for leases": 45, "away": 30}
    assert earlier_beats(tmp_path / "elsewhere") == []


def test_at_the_end_what_members_said_last_is_kept() -> None:
    heard = Heard()
    heard.beat(5.0, "generating", 100, generating=4.0)
    heard.beat(7.0, "generating", 100, generating=6.0)
    heard.member.last_seen = 7.0
    heard.history.note_last([heard.member])
    [row] = heard.history.take_rows()
    assert (row.at, json.loads(row.seconds)) == (1007.0, {"generating": 6.0})
    heard.history.note_last([heard.member])
    assert heard.history.take_rows() == ()


def test_the_journal_tells_who_did_what_and_when_while_the_run_goes_on(tmp_path: Path) -> None:
    began = time.time()

    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=3, max_staleness=1)) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for number in range(4):
                await generator.beat(tokens=100 * number, seconds={"generating": 0.3 * number})
                await learner.beat(seconds={"wait_batch": 0.3 * number})
                await asyncio.sleep(0.32)
            worker = asyncio.create_task(here.generator("generator-1").work())
            await learner.train(stop_at=2)
            await generator.leave()
            check(tmp_path)
            await learner.train()
            await worker

    def check(run_dir: Path) -> None:
        with closing(open_read_only(run_dir)) as journal:
            query = "SELECT member, role, state, tokens, at FROM beats ORDER BY at"
            beats = journal.execute(query).fetchall()
            steps = journal.execute("SELECT at FROM steps ORDER BY step").fetchall()
            groups = journal.execute(
                "SELECT leased_at, finished_at, reward FROM groups WHERE step IS NOT NULL"
            ).fetchall()
        tokens = [row[3] for row in beats if row[0] == "generator-0"]
        assert tokens == sorted(tokens) and tokens[-1] == 300 and len(tokens) <= 6
        assert {row[1] for row in beats} == {"generator", "learner"}
        assert beats[-1][2] == "left"
        times = [at for *_, at in beats] + [at for (at,) in steps]
        assert all(began - 1 < at < time.time() + 1 for at in times)
        assert steps == sorted(steps)
        for leased_at, finished_at, reward in groups:
            assert began - 1 < leased_at <= finished_at < time.time() + 1
            assert reward == 0.5
        assert sum(fates(run_dir).values()) == 12

    play(scenario())


def test_fates_add_up_to_the_data_at_any_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator = here.generator()
            for number, lease in enumerate(await generator.lease(4), start=1):
                await generator.submit(lease)
                assert fates(tmp_path) == {"ready": number, "not_issued": 8} | (
                    {"leased": 4 - number} if number < 4 else {}
                )

    play(scenario())
