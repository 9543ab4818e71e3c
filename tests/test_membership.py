"""Members come, fall silent, return and leave; leases pass on, and nobody waits for the dead."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_peers import Generator, make_config
from serving_buffer import Serving, play, serving

from asyncrl.journal import fates
from asyncrl.messages import Failed, Hello, Lease
from asyncrl.types import GroupId
from buffer.leases import OVERDUE_IN_A_ROW, Overdue, Suspension
from buffer.members import MAX_CONNECTIONS, MAX_GONE, Members

NOW = 100.0


async def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "the condition did not come true"
        await asyncio.sleep(0.02)


async def row_of(here: Serving, name: str) -> dict[str, Any]:
    values = await here.monitor().status()
    return next(member for member in values["members"] if member["name"] == name)


def told(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_a_generator_that_leaves_passes_its_leases_on_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(network__heartbeat_s=60), max_wait_s=5) as here:
            leaving, other = here.generator("leaving"), here.generator("other")
            held = await leaving.lease(4)
            asking = asyncio.create_task(other.lease(4))
            await leaving.leave()
            again = await asking
            assert [lease.group for lease in again] == [lease.group for lease in held]
            assert {lease.attempt for lease in again} == {1}
            row = await row_of(here, "leaving")
            assert (row["state"], row["alive"], row["leases"]) == ("left", False, 0)
            await leaving.beat("generating")  # was on its way
            assert (await row_of(here, "leaving"))["state"] == "left"

    play(scenario())


def test_a_lease_request_that_waits_while_its_generator_leaves_gets_nothing(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), max_wait_s=5) as here:
            leaving, other = here.generator("leaving"), here.generator("other")
            held = await leaving.lease(4)
            waiting = asyncio.create_task(leaving.lease(4))
            await asyncio.sleep(0.2)
            await leaving.leave()
            assert await waiting == []
            assert [x.group for x in await other.lease(4)] == [x.group for x in held]

    play(scenario())


def test_leases_of_the_dead_never_go_back_to_the_dead(tmp_path: Path) -> None:
    """Its request still waits when it is found dead and its own leases become free."""

    async def scenario() -> None:
        async with serving(tmp_path, make_config(), max_wait_s=5) as here:
            dead = here.generator("dead")
            await dead.lease(4)
            waiting = asyncio.create_task(dead.lease(4))
            await until(lambda: not here.run.members.by_name["dead"].alive)
            assert await waiting == []
            assert here.run.books.ledger.groups.leased() == []

    play(scenario())


def test_a_learner_that_falls_silent_is_named_once_and_generators_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=1), train=24) as here:
            learner, generator = here.learner("learner-ab12"), here.generator()
            await learner.register()
            await learner.beat("train step 0: forward")
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await until(lambda: not here.run.members.by_name["learner-ab12"].alive)
            await generator.beat()
            row = await row_of(here, "learner-ab12")
            assert (row["state"], row["alive"]) == ("dead", False)
            values = await here.monitor().status()
            assert values["waiting_for"].count("learner-ab12") == 1
            for lease in await generator.lease(9):
                assert (await generator.submit(lease)).verdict == "accepted"
            await asyncio.sleep(1.2)
            await learner.fetch(0)
            assert (await row_of(here, "learner-ab12"))["alive"]
            await until(lambda: told(caplog, f"{name} is back") > 0)

    name = f"learner-ab12 (pid {os.getpid()} on test)"
    with caplog.at_level(logging.INFO):
        play(scenario())
    [silent] = [
        r.getMessage()
        for r in caplog.records
        if name in r.getMessage() and "sent nothing" in r.getMessage()
    ]
    assert "dead or stopped" in silent
    assert told(caplog, f"{name} is back") == 1


def test_a_learner_whose_place_is_taken_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            first, second = here.learner("learner-a"), here.learner("learner-b")
            await first.register()
            await second.register()
            for _ in range(12):
                await second.beat()
                await asyncio.sleep(0.1)
            assert (await row_of(here, "learner-a"))["state"] == "replaced"

    with caplog.at_level(logging.WARNING):
        play(scenario())
    assert told(caplog, "learner-a") == 0


def test_a_learner_that_is_loading_is_told_as_such(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            learner = here.learner("learner-c")
            await learner.beat("loading the model")
            values = await here.monitor().status()
            expected = f"no learner has registered: learner-c (pid {os.getpid()} on test) loading"
            assert expected in values["waiting_for"]

    play(scenario())


def test_whoever_only_looked_at_the_run_is_forgotten_and_may_look_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            monitor = here.monitor()
            await monitor.status()
            assert monitor.name in here.run.members.by_name
            await until(lambda: monitor.name not in here.run.members.by_name)
            assert (await monitor.status())["step"] == 0

    play(scenario())


def test_status_says_what_each_process_does_and_since_when(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), max_wait_s=1) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            leases = await generator.lease(3)
            await generator.start(leases[0])
            seconds = {"generating": 5.0, "waiting for leases": 2.0}
            await generator.beat("generating", state_s=4.0, seconds=seconds)
            waiting = asyncio.create_task(learner.fetch(0))
            await asyncio.sleep(0.5)
            row = await row_of(here, "generator-0")
            assert row["state"] == "generating" and 4.4 < row["state_s"] < 6
            assert row["seconds"] == seconds
            assert row["leases"] == 3 and 0.4 < row["oldest_lease_s"] < 5
            row = await row_of(here, "learner-0")
            assert row["state"] == "waiting for step 0" and 0.4 < row["state_s"] < 5
            values = await here.monitor().status()
            assert "need 4 groups, have 0, 3 in flight" in values["waiting_for"]
            assert 0.4 < values["waiting_s"] < 5
            waiting.cancel()

    play(scenario())


def test_nobody_waits_while_the_learner_trains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=1), train=24) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.beat("train step 0: backward")
            values = await here.monitor().status()
            assert values["waiting_s"] == 0.0
            assert values["waiting_for"].startswith(
                "step 0 is being trained by learner-0 (train step 0: backward for 0 s"
            )

    play(scenario())


def test_a_stall_by_a_stopped_learner_is_told_as_its_silence_and_not_as_missing_groups(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_staleness=1), train=24) as here:
            learner, generator = here.learner("learner-ab12"), here.generator()
            await learner.register()
            for lease in await generator.lease(8):
                await generator.submit(lease)
            await learner.fetch(0)
            await until(lambda: not here.run.members.by_name["learner-ab12"].alive)
            values = await here.monitor().status()
            assert values["waiting_for"].startswith("step 0 is being trained by learner-ab12 (has")
            assert "need" not in values["waiting_for"]
            assert values["waiting_for"].count("learner-ab12") == 1
            row = await row_of(here, "learner-ab12")
            assert values["waiting_s"] == pytest.approx(row["last_seen_s"], abs=0.5)
            assert values["waiting_s"] > 0.5

    play(scenario())


async def fail_late(generator: Generator, leases: list[Lease]) -> None:
    """As a generator does whose own clock ends a lease."""
    for lease in leases:
        reason = "not finished in its time"
        await generator.ask(
            Failed(
                kind=lease.kind,
                group=lease.group,
                attempt=lease.attempt,
                reason=reason,
                content=False,
            )
        )


@pytest.mark.parametrize("says_so", [True, False])
def test_a_generator_that_finishes_nothing_gets_no_more_leases(
    tmp_path: Path, says_so: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=3, max_staleness=1, buffer__lease_timeout_s=0.5)
        async with serving(tmp_path, config, train=40) as here:
            learner, stuck = here.learner(), here.generator("stuck")
            await learner.register()
            leases = await stuck.lease(OVERDUE_IN_A_ROW)
            for lease in leases:
                await stuck.start(lease)
            beats = asyncio.create_task(stuck.beat_for_ever())
            if says_so:
                await asyncio.sleep(0.51)
                await fail_late(stuck, leases)
            await until(lambda: here.run.members.by_name["stuck"].num_overdue >= OVERDUE_IN_A_ROW)
            good = here.generator("good")
            await good.beat()
            row = await row_of(here, "stuck")
            assert row["suspended"] and row["state"] == "suspended"
            worker = asyncio.create_task(good.work())
            assert await stuck.lease(4) == []
            end = await learner.train()
            await worker
            beats.cancel()
            assert end is not None and not end.failed
        assert fates(tmp_path)["trained"] == 12

    with caplog.at_level(logging.WARNING):
        play(scenario())
    assert told(caplog, "stuck (pid") >= 2
    assert told(caplog, "is suspended: 3 leases in a row") == 1


def suspended(*names: str) -> tuple[Members, Suspension]:
    members = Members(heartbeat_s=1.0)
    suspension = Suspension(members, lease_timeout_s=60.0)
    for name in names:
        members.expect(name, now=NOW)
    return members, suspension


def run_out(suspension: Suspension, name: str, number: int = OVERDUE_IN_A_ROW) -> None:
    for index in range(number):
        suspension.ran_out([Overdue(name, GroupId(0, index), 0)])


def test_the_only_generator_gets_leases_whatever_ran_out() -> None:
    members, suspension = suspended("only")
    run_out(suspension, "only")
    assert suspension.is_suspended(members.by_name["only"])
    assert suspension.may_lease(members.by_name["only"], now=NOW)


def test_with_all_generators_suspended_each_gets_leases() -> None:
    members, suspension = suspended("a", "b")
    for name in ("a", "b"):
        run_out(suspension, name)
    assert all(suspension.may_lease(member, now=NOW) for member in members.generators())


def test_the_death_of_the_better_one_lifts_a_suspension() -> None:
    members, suspension = suspended("a", "b")
    run_out(suspension, "a")
    assert not suspension.may_lease(members.by_name["a"], now=NOW)
    members.by_name["b"].alive = False
    assert suspension.may_lease(members.by_name["a"], now=NOW)


def test_a_lease_that_nobody_else_takes_goes_to_a_suspended_generator_in_the_end() -> None:
    """The other one lives, but never asks: it is loading for ever, say."""
    members, suspension = suspended("a", "idle")
    run_out(suspension, "a")
    a = members.by_name["a"]
    assert not suspension.may_lease(a, now=NOW)
    assert not suspension.may_lease(a, now=NOW + 60)
    assert suspension.may_lease(a, now=NOW + 61)
    assert not suspension.may_lease(a, now=NOW + 62)


def test_a_lease_that_the_other_one_takes_starts_that_wait_anew() -> None:
    members, suspension = suspended("a", "b")
    run_out(suspension, "a")
    a, b = members.by_name["a"], members.by_name["b"]
    assert not suspension.may_lease(a, now=NOW)
    assert suspension.may_lease(b, now=NOW + 59)
    assert not suspension.may_lease(a, now=NOW + 61)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_whoever_is_suspended_somebody_who_asks_gets_a_lease_in_time(
    generators: list[tuple[bool, bool, bool]],
) -> None:
    """Each is (alive, suspended, asks for leases); only those that ask can take any."""
    members, suspension = suspended(*(f"{number}" for number in range(len(generators))))
    for member, (alive, is_overdue, _) in zip(members.generators(), generators, strict=True):
        member.alive, member.num_overdue = alive, OVERDUE_IN_A_ROW * is_overdue
    asking = [
        member
        for member, (alive, _, asks) in zip(members.generators(), generators, strict=True)
        if alive and asks
    ]
    given = [suspension.may_lease(member, now=NOW + s) for s in range(62) for member in asking]
    assert any(given) == bool(asking)


def test_a_submitted_group_ends_the_row_of_late_leases() -> None:
    members, suspension = suspended("a", "b")
    a = members.by_name["a"]
    run_out(suspension, "a", OVERDUE_IN_A_ROW - 1)
    suspension.worked(a)
    run_out(suspension, "a", OVERDUE_IN_A_ROW - 1)
    assert suspension.may_lease(a, now=NOW)
    run_out(suspension, "a", 1)
    assert not suspension.may_lease(a, now=NOW)
    suspension.worked(a)
    assert suspension.may_lease(a, now=NOW)


def test_a_buffer_that_stood_still_blames_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(buffer__lease_timeout_s=5.0)
        async with serving(tmp_path, config) as here:
            generator = here.generator()
            await generator.lease(4)
            now = time.monotonic()
            here.run.watch.excuse(3600.0, now=now + 3600)
            here.run.tick(now=now + 3600)
            assert here.run.members.by_name["generator-0"].alive
            assert len(here.run.books.ledger.groups.leased()) == 4

    play(scenario())


def test_what_is_void_is_kept_for_generators_that_are_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(network__heartbeat_s=60)) as here:
            assert len(await here.generator("there").lease()) == 1
            ledger, now = here.run.books.ledger, time.monotonic()
            assert ledger.lease("gone", serving_version=0, now=now) is not None
            here.run.watch.leases.expire(now=now + 1e5)
            here.run.watch.look_for_members(now=now)
            assert ledger.void.take("gone") == []
            assert ledger.void.take("there") == [(GroupId(0, 0), 0, "there")]

    play(scenario())


def hello(name: str) -> Hello:
    return Hello(role="generator", member=name, run_id=None, host="test", pid=1)


def test_members_that_went_long_ago_are_forgotten_and_say_hello_again() -> None:
    members = Members(heartbeat_s=1.0)
    for number in range(3 * MAX_GONE):
        members.hello(b"%d" % number, hello(f"generator-{number}"), now=NOW + number)
        members.newly_dead(now=NOW + number)
    members.newly_dead(now=NOW + 1000)
    assert [*members.by_name] == [f"generator-{n}" for n in range(2 * MAX_GONE, 3 * MAX_GONE)]
    assert members.of(b"0", now=NOW + 1001) is None
    assert members.hello(b"0", hello("generator-0"), now=NOW + 1001).alive
    assert len(members.generators()) == MAX_GONE + 1


def test_a_member_that_connects_again_and_again_leaves_only_its_last_connections() -> None:
    members = Members(heartbeat_s=1.0)
    for number in range(100):
        members.hello(b"%d" % number, hello("generator-0"), now=NOW)
    known = [n for n in range(100) if members.of(b"%d" % n, now=NOW) is not None]
    assert known == list(range(100 - MAX_CONNECTIONS, 100))
