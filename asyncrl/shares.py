"""Where the wall time of each process went: from heartbeats to seconds by state that add up.

Pure functions of the rows of the journal's `beats`. What a process said last before it was killed
is the last that is known of that life; from there on it is away.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.journal.tables import BeatRow
from asyncrl.states import AWAY, STATES, state_of

GONE = ("left", "dead")
"""States of the last row of a process that is there no more."""
SILENT_S = 75.0
"""A process that has not left, and was heard this lately, is there still."""
_TWINS_S = 1.0
"""Two lives of one name that overlap by more are two processes."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time and the seconds that each state took of it."""

    begin_s: float
    end_s: float
    seconds: dict[str, float]

    def within(self, begin_s: float, end_s: float) -> Span | None:
        """The part between two times, all states cut alike; None when there is none."""
        begin, end = max(self.begin_s, begin_s), min(self.end_s, end_s)
        if end <= begin:
            return None
        part = (end - begin) / (self.end_s - self.begin_s)
        return Span(begin, end, {state: part * s for state, s in self.seconds.items()})


@dataclass(frozen=True, slots=True)
class Lane:
    """One process, all of its lives one after the other."""

    name: str
    role: str
    spans: list[Span]
    """In order of time; they do not overlap."""
    is_gone: bool = False
    """Its last life has left, or is dead."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What became of the time of one process."""

    process: str
    role: str
    seconds: dict[str, float]
    """By state, AWAY among them; they add up to the time that was asked for."""


def lanes(beats: Iterable[BeatRow], *, at: Callable[[float], float] = float) -> list[Lane]:
    """A lane for each process: the buffer, the learner, then the generators by name. `at` turns
    the times of `beats` into those of the spans.

    A life's clock is its own: heartbeats lie at its start plus the seconds that they count, and
    its start is that by the heartbeat that came with the least delay.
    """
    by_member: defaultdict[str, list[BeatRow]] = defaultdict(list)
    for beat in beats:
        by_member[beat.member].append(beat)
    found: dict[str, Lane] = {}
    lives = [(list(_life(rows, at)), rows) for rows in by_member.values()]
    for spans, rows in sorted(lives, key=lambda life: life[0][0].begin_s if life[0] else 0.0):
        if not spans:
            continue
        name = _lane_name(rows[0].member, spans[0].begin_s, found)
        before = found[name].spans if name in found else []
        taken_s = before[-1].end_s if before else spans[0].begin_s
        cut = [part for span in spans if (part := span.within(taken_s, span.end_s))]
        found[name] = Lane(name, rows[0].role, [*before, *cut], _is_gone(rows))
    return sorted(found.values(), key=_place)


def shares(lanes: Sequence[Lane], *, since_s: float, until_s: float) -> list[Shares]:
    """Seconds by state of each process from `since_s` to `until_s`, or to the last heartbeat of one
    that is there still. A process of which nothing is known in that time is left out."""
    found = []
    for lane in lanes:
        last_s = lane.spans[-1].end_s
        is_there = not lane.is_gone and until_s - last_s < SILENT_S
        end_s = min(until_s, last_s) if is_there else until_s
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in lane.spans:
            part = span.within(since_s, end_s)
            for state, spent in (part.seconds if part else {}).items():
                seconds[state] += spent
        if seconds:
            seconds[AWAY] = max(0.0, end_s - since_s - sum(seconds.values()))
            in_order = {state: seconds[state] for state in STATES if seconds.get(state, 0.0) > 0}
            found.append(Shares(lane.name, lane.role, in_order))
    return found


def _life(rows: Sequence[BeatRow], at: Callable[[float], float]) -> Iterator[Span]:
    """From each heartbeat of one life to the next; the first from the process's start on."""
    counted = [json.loads(row.seconds) for row in rows]
    began = min(row.at - sum(c.values()) for row, c in zip(rows, counted, strict=True))
    before: dict[str, float] = {}
    for phases in sorted(counted, key=lambda c: sum(c.values())):
        begin, end = (at(began + sum(clock.values())) for clock in (before, phases))
        spent: defaultdict[str, float] = defaultdict(float)
        for phase, seconds in phases.items():
            spent[state_of(phase)] += max(0.0, seconds - before.get(phase, 0.0))
        total = sum(spent.values())
        if end > begin and total > 0:
            scale = (end - begin) / total
            yield Span(begin, end, {s: scale * t for s, t in spent.items() if t > 0})
        before = phases


def _is_gone(rows: Sequence[BeatRow]) -> bool:
    """Whether nothing was heard of a life after it was found dead, or had left."""
    counted = [sum(json.loads(row.seconds).values()) for row in rows]
    last = max(counted)
    return any(row.state in GONE for row, s in zip(rows, counted, strict=True) if s == last)


def _lane_name(member: str, begin_s: float, there: dict[str, Lane]) -> str:
    """`generator-0` for all lives of it (members are named generator-0-8f3a), unless two lives
    of that name overlap: then they are two processes."""
    name = member.rpartition("-")[0] or member
    is_free = name not in there or there[name].spans[-1].end_s <= begin_s + _TWINS_S
    return name if is_free else member


def _place(lane: Lane) -> tuple[int, str]:
    roles = ("buffer", "learner", "generator")
    return (roles.index(lane.role) if lane.role in roles else len(roles), lane.name)
