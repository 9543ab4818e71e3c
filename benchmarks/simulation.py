"""A run on a simulated clock: the buffer's real ledger and policy, with generators and a learner
that only take time.

One unit of time is a training step. Generators have `slots` places for groups, take new weights the
moment they are committed, and keep their places full; the learner asks for a batch ahead of time,
as the real one does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from asyncrl.journal.tables import PayloadRef
from asyncrl.types import GroupId
from buffer.groups import Group
from buffer.ledger import Ledger
from buffer.policy import OrderName, StalenessPolicy

_NOWHERE = PayloadRef(1, 0, 0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. Latencies are in training steps."""

    max_staleness: int
    order: OrderName = "fifo"
    on_late: str = "wait"
    groups_per_step: int = 32
    num_steps: int = 200
    short: float = 0.5
    """Latency of a usual group; the others, `long_share` of them, take `long`."""
    long: float = 8.0
    long_share: float = 0.1
    spare: float = 1.25
    """Generator capacity, as a multiple of what keeps the learner busy."""
    seed: int = 0

    @property
    def mean_latency(self) -> float:
        return self.long_share * self.long + (1 - self.long_share) * self.short

    @property
    def slots(self) -> int:
        return round(self.spare * self.groups_per_step * self.mean_latency)

    def latency(self, id: GroupId) -> float:
        """The same whenever and by whomever the group is generated."""
        draw = random.Random(f"{self.seed}|{id}").random()
        return self.long if draw < self.long_share else self.short


@dataclass(slots=True)
class Outcome:
    """What came out of a simulated run."""

    trained: list[GroupId] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    """Trained groups by the staleness of their oldest token."""
    kept: list[float] = field(default_factory=list)
    let_go: list[float] = field(default_factory=list)
    """Latencies of the groups that were trained, and of those that were let go at their deadline,
    each time. A latency is a length: generators decode at one speed."""
    fates: dict[str, int] = field(default_factory=dict)
    total_time: float = 0.0
    num_steps: int = 0

    def summary(self) -> dict[str, float]:
        return {
            "steps_per_unit": self.num_steps / self.total_time,
            "staleness_mean": sum(a * n for a, n in self.ages.items()) / self.ages.total(),
            "staleness_max": max(self.ages),
            "num_let_go": len(self.let_go),
            "length_kept": fmean(self.kept),
            "length_let_go": fmean(self.let_go) if self.let_go else 0.0,
        }


def simulate(scenario: Scenario) -> Outcome:
    """Runs until every prompt of the scenario is trained or has a fate."""
    return _Simulation(scenario).run()


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        num_groups = scenario.num_steps * scenario.groups_per_step
        self._scenario = scenario
        self._policy = StalenessPolicy(
            max_staleness=scenario.max_staleness,
            groups_per_step=scenario.groups_per_step,
            num_groups=num_groups,
            order=scenario.order,
        )
        self._ledger = Ledger(
            self._policy, group_id=lambda number: GroupId(0, number), max_attempts=3
        )
        self._outcome = Outcome()
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._free = scenario.slots
        self._is_training = False
        self._ahead: tuple[int, list[Group]] | None = None

    def run(self) -> Outcome:
        self._move()
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._move()
        counts = self._ledger.groups.counts
        self._outcome.fates = {state.value: n for state, n in counts.items() if n}
        self._outcome.total_time = self._now
        self._outcome.num_steps = self._policy.committed
        if not self._policy.exhausted:
            raise RuntimeError(f"stuck: {self._policy}")
        return self._outcome

    def _move(self) -> None:
        """Whatever can go on at this moment."""
        self._let_go()
        self._lease()
        if self._ahead is None and self._policy.can_assign():
            self._ahead = self._ledger.batches.assign()
            self._lease()
        if self._ahead is not None and not self._is_training:
            step, groups = self._ahead
            self._ahead, self._is_training = None, True
            self._after(1.0, partial(self._train, step, groups))
            self._move()

    def _lease(self) -> None:
        version = self._policy.committed
        while self._free:
            group = self._ledger.lease("generator", serving_version=version, now=self._now)
            if group is None:
                return
            self._free -= 1
            self._ledger.started(group.id, group.attempt, version, now=self._now)
            finish = partial(self._finish, group, group.attempt, version)
            self._after(self._scenario.latency(group.id), finish)

    def _finish(self, group: Group, attempt: int, version: int) -> None:
        if self._ledger.held(group.id, attempt, by="generator") is None:
            return  # it was let go, and its place is free already
        self._free += 1
        self._ledger.accept(
            group.id,
            attempt,
            member="generator",
            oldest_version=version,
            token_versions={version: 1},
            reward=0.5,
            payload=_NOWHERE,
            filtered_because=None,
        )

    def _let_go(self) -> None:
        if self._scenario.on_late == "wait":
            return
        late = self._ledger.let_go_late(reissue=self._scenario.on_late == "reissue")
        self._free += len(late)
        self._outcome.let_go += [self._scenario.latency(group.id) for group, _ in late]

    def _train(self, step: int, groups: list[Group]) -> None:
        self._is_training = False
        self._ledger.batches.commit(step + 1)
        for group in groups:
            assert group.version is not None
            self._outcome.trained.append(group.id)
            self._outcome.ages[step - group.version] += 1
            self._outcome.kept.append(self._scenario.latency(group.id))

    def _after(self, delay: float, event: Callable[[], Any]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), event))
