"""The wall time of every process by state: it adds up, whatever heartbeats came through."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.journal.tables import BeatRow
from asyncrl.shares import lanes, shares
from asyncrl.states import AWAY, COLORS, STATES, is_waiting, percentages, state_of

BEGAN = 1000.0
PHASES = ("generating", "scoring", "swapping", "waiting for leases", "waiting for the buffer")


@dataclass
class Life:
    """One life of a process: what it did, one phase after the other."""

    began: float
    phases: list[tuple[str, float]]

    @property
    def age(self) -> float:
        return sum(seconds for _, seconds in self.phases)

    def until(self, age: float) -> dict[str, float]:
        """Seconds by phase at this age."""
        found: defaultdict[str, float] = defaultdict(float)
        for phase, seconds in self.phases:
            spent = min(seconds, age)
            found[phase] += spent
            age -= spent
        return {phase: seconds for phase, seconds in found.items() if seconds > 0}

    def beats(self, member: str, ages: list[float], delays: list[float]) -> list[BeatRow]:
        """Heartbeats at these shares of its age, each heard after a delay; one without any."""
        delays[0] = 0.0
        return [
            BeatRow(
                self.began + age * self.age + delay,
                *(member, "generator", "generating", json.dumps(self.until(age * self.age)), 0, 0),
            )
            for age, delay in zip(sorted(ages), delays, strict=False)
        ]


seconds = st.floats(0.5, 100.0)
phases = st.lists(st.tuples(st.sampled_from(PHASES), seconds), min_size=1, max_size=12)
ages = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=10, unique=True)
delays = st.lists(st.floats(0.0, 4.0), min_size=10, max_size=10)
lives = st.lists(st.tuples(phases, st.floats(5.0, 60.0), ages, delays), min_size=1, max_size=4)


@given(lives=lives, window=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_the_row_of_a_process_that_was_killed_and_came_back_adds_up_to_the_wall_time(
    lives: list[tuple[list[tuple[str, float]], float, list[float], list[float]]],
    window: tuple[float, float],
) -> None:
    now, beats = BEGAN, []
    known: defaultdict[str, float] = defaultdict(float)
    for number, (did, pause, when, late) in enumerate(lives):
        life = Life(now, did)
        beats += life.beats(f"generator-0-{number:04x}", when, late)
        for phase, spent in life.until(max(when) * life.age).items():
            known[state_of(phase)] += spent
        now += life.age + pause
    dead = beats[-1]._replace(at=now, state="dead")
    found = lanes([*beats, dead])
    [row] = shares(found, since_s=BEGAN, until_s=now)
    assert sum(row.seconds.values()) == pytest.approx(now - BEGAN)
    assert {s: t for s, t in row.seconds.items() if s != AWAY} == pytest.approx(known)

    begin, end = (BEGAN + part * (now - BEGAN) for part in sorted(window))
    for part in shares(found, since_s=begin, until_s=end):
        assert sum(part.seconds.values()) == pytest.approx(end - begin)


@given(st.dictionaries(st.sampled_from(STATES), st.floats(0, 1e6)))
def test_percentages_add_up_to_100(taken: dict[str, float]) -> None:
    found = percentages(taken)
    total = sum(taken.values())
    assert sum(found.values()) == (100 if total else 0)
    for state, percent in found.items():
        assert abs(percent - 100 * taken[state] / total) < 1


def test_what_was_left_out_between_two_heartbeats_changes_nothing() -> None:
    life = Life(BEGAN, [("generating", 50.0), ("swapping", 2.0), ("waiting for leases", 48.0)])
    when = [0.1 * i for i in range(1, 11)]
    beats = life.beats("generator-0-aaaa", when, [0.0] * 10)
    [every] = shares(lanes(beats), since_s=BEGAN, until_s=BEGAN + 100)
    [thinned] = shares(lanes([beats[0], beats[-1]]), since_s=BEGAN, until_s=BEGAN + 100)
    assert every.seconds == pytest.approx(thinned.seconds)


def test_a_process_that_is_there_still_is_not_away_since_its_last_heartbeat() -> None:
    life = Life(BEGAN, [("generating", 100.0)])
    beats = life.beats("generator-0-aaaa", [0.5, 1.0], [0.0, 0.0])
    [row] = shares(lanes(beats), since_s=BEGAN, until_s=BEGAN + 104)
    assert row.seconds == pytest.approx({"generating": 100})
    [silent] = shares(lanes(beats), since_s=BEGAN, until_s=BEGAN + 300)
    assert silent.seconds == pytest.approx({"generating": 100, AWAY: 200})
    left = beats[-1]._replace(state="left")
    [gone] = shares(lanes([*beats, left]), since_s=BEGAN, until_s=BEGAN + 104)
    assert gone.seconds == pytest.approx({"generating": 100, AWAY: 4})


def test_two_processes_of_one_name_that_live_together_have_a_row_each() -> None:
    one, two = Life(BEGAN, [("generating", 50.0)]), Life(BEGAN + 20, [("scoring", 50.0)])
    beats = one.beats("generator-0-aaaa", [1.0], [0.0]) + two.beats(
        "generator-0-bbbb", [1.0], [0.0]
    )
    assert [lane.name for lane in lanes(beats)] == ["generator-0", "generator-0-bbbb"]


def test_the_buffer_and_the_learner_come_first() -> None:
    rows = [
        BeatRow(BEGAN + 9, f"{role}-0-aaaa", role, "it", json.dumps({"starting": 9.0}), 0, 0)
        for role in ("generator", "learner", "buffer")
    ]
    found = lanes(rows)
    assert [lane.role for lane in found] == ["buffer", "learner", "generator"]
    assert lanes([]) == []


def test_every_state_has_a_colour_and_waits_or_not() -> None:
    assert set(COLORS) == set(STATES)
    assert [state for state in STATES if is_waiting(state)] == [
        *("waiting for a batch", "waiting for leases", "waiting for generators"),
        *("waiting for the learner", "waiting for requests", "waiting for the buffer"),
    ]
    assert state_of("a phase that nobody knows") == "other"
