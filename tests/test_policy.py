"""Rule H as a property: over random schedules never over the bound, never stuck, all accounted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl import versions
from asyncrl.journal.tables import GroupRow, PayloadRef
from asyncrl.types import GroupId
from buffer.groups import OPEN, Group, State
from buffer.leases import LeaseClocks
from buffer.ledger import Ledger
from buffer.orders import Ready
from buffer.outstanding import Place
from buffer.policy import StalenessPolicy

PAYLOAD = PayloadRef(1, 0, 0)


class Schedules(RuleBasedStateMachine):
    """Generators, a learner and accidents in any order, on the real ledger and policy.

    `trained` is this test's own account of what was trained by which version at which step.
    """

    @initialize(
        max_staleness=st.integers(0, 4),
        groups_per_step=st.integers(1, 5),
        num_groups=st.integers(1, 30),
        max_steps=st.none() | st.integers(1, 6),
        last_batch=st.sampled_from(["train", "drop", "wrap"]),
        order=st.sampled_from(["fifo", "ready"]),
        on_late=st.sampled_from(["wait", "drop", "reissue"]),
        keeps_place=st.booleans(),
        data=st.data(),
    )
    def begin(
        self,
        max_staleness: int,
        groups_per_step: int,
        num_groups: int,
        max_steps: int | None,
        last_batch: Any,
        order: Any,
        on_late: str,
        keeps_place: bool,
        data: st.DataObject,
    ) -> None:
        if last_batch == "drop":
            num_groups = max(num_groups, groups_per_step)
        self.bound = max_staleness
        self.publish_every = data.draw(st.integers(1, max_staleness + 1))
        self.policy = StalenessPolicy(
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
            num_groups=num_groups,
            max_steps=max_steps,
            last_batch=last_batch,
            order=order,
        )
        self.on_late = "wait" if order == "fifo" and on_late == "reissue" else on_late
        self.keeps_place = keeps_place
        self.accepted: Counter[GroupId] = Counter()
        self.ledger = self.new_ledger()
        self.journal: dict[int, GroupRow] = {}
        self.forgotten = 0
        """Batches before this step are forgotten: no learner goes back that far."""
        self.version = 0
        self.serving = {"a": 0, "b": 0}
        self.now = 0.0
        self.sizes: list[int] = []
        self.admitted_by_wider_bound: set[int] = set()
        if data.draw(st.booleans()):
            self.all_go_on_but_one(data, num_moves=60)

    def new_ledger(self) -> Ledger:
        num_groups = self.policy.plan.num_groups
        return Ledger(
            self.policy,
            group_id=lambda number: GroupId(*divmod(number, num_groups)),
            max_attempts=3,
        )

    @property
    def deadlines(self) -> LeaseClocks:
        return LeaseClocks(self.ledger, lease_timeout_s=10.0)

    def in_flight(self, started: bool) -> list[Group]:
        return [g for g in self.ledger.groups.leased() if (g.started_at is not None) == started]

    @property
    def published(self) -> int:
        """publish_every passes versions over; the newest goes out while the learner idles."""
        return self.version // self.publish_every * self.publish_every

    @rule(member=st.sampled_from(["a", "b"]), slots=st.integers(1, 8))
    def lease(self, member: str, slots: int) -> None:
        for _ in range(slots):
            self.ledger.lease(member, serving_version=self.serving[member], now=self.now)

    @rule()
    def finish_everything(self) -> None:
        for group in self.in_flight(started=False):
            self.start_one(group)
        for group in self.in_flight(started=True):
            self.finish_one(group, filtered=False)

    @rule(data=st.data())
    @precondition(lambda self: self.in_flight(started=False))
    def start(self, data: st.DataObject) -> None:
        self.start_one(data.draw(st.sampled_from(self.in_flight(started=False))))

    def start_one(self, group: Group) -> None:
        version = self.serving[group.member]
        assert group.version is not None
        assert version >= group.version
        assert self.ledger.started(group.id, group.attempt, version, now=self.now)

    @rule(data=st.data(), filtered=st.integers(0, 3).map(lambda n: n == 0))
    @precondition(lambda self: self.in_flight(started=True))
    def finish(self, data: st.DataObject, filtered: bool) -> None:
        self.finish_one(data.draw(st.sampled_from(self.in_flight(started=True))), filtered)

    def finish_one(
        self,
        group: Group,
        filtered: bool,
        *,
        attempt: int | None = None,
        version: int | None = None,
    ) -> None:
        attempt = group.attempt if attempt is None else attempt
        oldest = group.version if version is None else version
        assert oldest is not None
        assert self.ledger.judge(group.id, attempt, oldest) == "accepted"
        self.ledger.accept(
            group.id,
            attempt,
            member=group.member,
            oldest_version=oldest,
            token_versions={oldest: 1},
            reward=0.5,
            payload=PAYLOAD,
            filtered_because="all rewards are 0" if filtered else None,
            keeps_place=self.keeps_place,
        )
        self.accepted[group.id] += 1
        assert self.accepted[group.id] == 1, f"{group} was accepted twice"

    @rule(data=st.data())
    @precondition(lambda self: self.ledger.groups.by_id)
    def somebody_else_submits(self, data: st.DataObject) -> None:
        """An earlier attempt, or the accepted one once more, comes in late."""
        group = data.draw(st.sampled_from([*self.ledger.groups.by_id.values()]))
        attempt = data.draw(st.integers(0, group.attempt))
        version = data.draw(st.integers(0, self.version))
        judgement = self.ledger.judge(group.id, attempt, version)
        if judgement == "accepted":
            self.finish_one(group, filtered=False, attempt=attempt, version=version)
        elif self.accepted[group.id]:
            assert judgement in ("duplicate", "superseded")

    @rule()
    def late_groups_are_let_go(self) -> None:
        """Only such as would make the learner wait, and only when there is a full batch without."""
        if self.on_late == "wait":
            return
        for group, _ in self.ledger.let_go_late(reissue=self.on_late == "reissue"):
            assert self.version == self.policy.next_step
            assert group.state in (State.STALE, State.WAITING, State.QUARANTINED)
            assert self.policy.can_assign() or self.policy.exhausted

    @rule(kind=st.sampled_from(["fail", "content", "drop", "death", "delay"]), data=st.data())
    @precondition(lambda self: self.ledger.groups.leased())
    def accident(self, kind: str, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.ledger.groups.leased()))
        if kind == "death":
            self.deadlines.release_member(group.member, reason="dead")
        elif kind == "delay":
            self.now += data.draw(st.floats(0, 12))
            self.deadlines.expire(now=self.now)
        elif kind == "drop":
            self.ledger.drop(group, "too long")
        else:
            overdue = self.deadlines.is_overdue(group, now=self.now)
            self.ledger.fail(group, content=kind == "content", overdue=overdue, reason="test")

    @rule(member=st.sampled_from(["a", "b"]))
    def swap(self, member: str) -> None:
        self.serving[member] = max(self.serving[member], self.published)

    @rule()
    @precondition(lambda self: self.policy.can_assign())
    def assign(self) -> None:
        try:
            step, groups = self.ledger.batches.assign()
        except RuntimeError:
            del self.policy  # what it says is what this schedule has shown
            raise
        assert 1 <= len(groups) <= self.policy.groups_per_step
        assert [group.number for group in groups] == sorted(group.number for group in groups)
        for group in groups:
            assert group.version is not None
            assert step - group.version <= self.bound, f"{group} in step {step}"
        self.sizes.append(len(groups))

    @rule()
    @precondition(lambda self: self.version < self.policy.next_step)
    def commit(self) -> None:
        self.version += 1
        self.ledger.batches.commit(self.version)

    @rule(data=st.data())
    def learner_dies(self, data: st.DataObject) -> None:
        """It comes back from an older checkpoint and replays up to where it was."""
        self.ledger.batches.rewind(data.draw(st.integers(self.forgotten, self.version)))
        self.ledger.batches.rewind(self.version)

    @rule(data=st.data())
    def learner_comes_back_changed(self, data: st.DataObject) -> None:
        """A fork: what newer versions began is generated anew, assigned batches stay."""
        version = data.draw(st.integers(self.forgotten, self.version))
        self.ledger.fork(version)
        self.take_back_acceptances()
        self.ledger.batches.rewind(version)
        self.ledger.batches.rewind(self.version)
        for number in self.policy.outstanding:
            group = self.ledger.groups.by_number[number]
            is_begun = group.state == State.READY or (
                group.state == State.LEASED and group.started_at is not None
            )
            assert not (is_begun and group.version is not None and group.version > version)

    @rule()
    def buffer_restarts(self) -> None:
        """Everything is read back from rows."""
        before, states = self.policy, self.ledger.groups.counts
        unstarted = [group.id for group in self.in_flight(started=False)]
        self.restart(max_staleness=self.bound, max_steps=before.plan.max_steps)
        assert +self.ledger.groups.counts == +states
        assert [group.id for group in self.in_flight(started=False)] == unstarted
        kept = [
            (number, deadline)
            for number, deadline in zip(before.outstanding, before.deadlines(), strict=True)
            if not before.is_blank(number)
        ]
        assert [*zip(self.policy.outstanding, self.policy.deadlines(), strict=True)] == kept
        assert self.policy.exhausted == (
            before.exhausted or (before.plan.has_ended(before.admitted) and not kept)
        )

    @rule(data=st.data())
    @precondition(lambda self: self.bound > 0)
    def buffer_restarts_with_a_smaller_bound(self, data: st.DataObject) -> None:
        self.bound = data.draw(st.integers(0, self.bound - 1))
        self.publish_every = min(self.publish_every, self.bound + 1)
        self.admitted_by_wider_bound |= {*self.policy.outstanding}
        self.restart(max_staleness=self.bound, max_steps=self.policy.plan.max_steps)

    @rule(data=st.data())
    @precondition(lambda self: self.policy.next_step > 0)
    def buffer_restarts_with_fewer_steps(self, data: st.DataObject) -> None:
        fewer = data.draw(st.integers(1, self.policy.plan.max_steps or 6))
        self.restart(max_staleness=self.bound, max_steps=fewer)

    def restart(self, *, max_staleness: int, max_steps: int | None) -> None:
        before = self.policy
        self.take_rows()
        self.policy = StalenessPolicy(
            max_staleness=max_staleness,
            groups_per_step=before.groups_per_step,
            num_groups=before.plan.num_groups,
            max_steps=max_steps,
            last_batch=before.plan.last_batch,
            order=before.order_name,
        )
        self.ledger = self.new_ledger()
        rows = [self.journal[number] for number in sorted(self.journal)]
        self.ledger.restore(
            rows,
            committed=self.version,
            steps=before.next_step,
            closed=before.closed,
            now=self.now,
        )
        self.take_back_acceptances()

    def take_back_acceptances(self) -> None:
        """Finished groups that are generated anew may be accepted once more."""
        for group in self.ledger.groups.by_id.values():
            if group.state in OPEN:
                self.accepted[group.id] = 0

    @rule(data=st.data())
    def a_checkpoint_lets_the_ledger_forget(self, data: st.DataObject) -> None:
        """Perhaps before the journal has heard of what has changed, perhaps after."""
        if data.draw(st.booleans()):
            self.take_rows()
        self.forgotten = max(self.forgotten, data.draw(st.integers(0, self.version)))
        self.ledger.batches.forget(before_step=self.forgotten)

    def take_rows(self) -> None:
        self.journal |= {row.number: row for row in self.ledger.groups.take_rows(at=0.0)}

    @rule()
    def follow_up(self) -> None:
        self.ledger.drop_leftovers()

    @invariant()
    def rule_h_holds(self) -> None:
        """Computed anew, from the groups themselves."""
        if not hasattr(self, "policy"):
            return
        size = self.policy.groups_per_step
        next_pick = self.policy.next_step * size
        outstanding = [self.ledger.groups.by_number[n] for n in self.policy.outstanding]
        deadlines = sorted(
            self.bound + (self.version if group.version is None else group.version)
            for group in outstanding
            if group.state != State.FILTERED
            and not (group.version is None and group.number in self.admitted_by_wider_bound)
        )
        for place, deadline in enumerate(deadlines):
            assert (next_pick + place) // size <= deadline

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "policy"):
            return
        states = {row.number: State(row.state) for row in self.journal.values()}
        states |= {number: group.state for number, group in self.ledger.groups.by_number.items()}
        assert Counter(states.values()) == +self.ledger.groups.counts
        assert len(states) == self.policy.admitted

    def teardown(self) -> None:
        """Never stuck: from wherever the accidents left it, honest work ends the run."""
        if not hasattr(self, "policy"):
            return
        for _ in range(2000):
            if self.policy.exhausted and self.version == self.policy.next_step:
                break
            self.work_honestly()
        else:
            raise AssertionError(f"stuck: {self.policy}")
        self.check_end()

    def work_honestly(self, *, but_for: Group | None = None) -> bool:
        """Whatever comes next, one group left alone; False: nothing can be done without it."""
        self.late_groups_are_let_go()
        self.ledger.drop_leftovers()
        started = [g for g in self.in_flight(started=True) if g is not but_for]
        unstarted = [g for g in self.in_flight(started=False) if g is not but_for]
        if self.policy.can_assign():
            self.assign()
        elif self.version < self.policy.next_step:
            self.commit()
        elif started:
            self.finish_one(started[0], filtered=False)
        elif unstarted:
            self.start_one(unstarted[0])
        else:
            self.swap("a")
            num_leased = len(self.ledger.groups.leased())
            self.lease("a", 1)
            return len(self.ledger.groups.leased()) > num_leased
        return True

    @rule(data=st.data(), num_moves=st.integers(20, 60))
    def all_go_on_but_one(self, data: st.DataObject, num_moves: int) -> None:
        """A straggler: as many steps go past it as may."""
        self.swap("a")
        self.lease("a", 8)
        for group in self.in_flight(started=False):
            self.start_one(group)
        if started := self.in_flight(started=True):
            straggler = data.draw(st.sampled_from(started))
            while num_moves and self.work_honestly(but_for=straggler):
                num_moves -= 1

    def check_end(self) -> None:
        policy, counts = self.policy, self.ledger.groups.counts
        self.ledger.cancel_outstanding("the run has ended")
        assert counts[State.TRAINED] == sum(self.sizes)
        self.take_rows()
        prompts = {(row.epoch, row.position) for row in self.journal.values()}
        assert len(prompts) == len(self.journal) == policy.admitted
        assert not any(counts[s] for s in (State.WAITING, State.LEASED, State.READY))
        smaller = [size for size in self.sizes if size < policy.groups_per_step]
        assert self.keeps_place or len(smaller) <= (policy.plan.last_batch == "train")
        if policy.plan.max_steps is None or policy.next_step < policy.plan.max_steps:
            assert counts[State.CANCELLED] == 0
            assert policy.admitted >= policy.plan.num_groups


def check(machine: type[RuleBasedStateMachine], *, examples: int, shrink: bool = True) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_schedule_stays_within_the_bound_and_comes_to_its_end() -> None:
    check(Schedules, examples=200)


@pytest.mark.slow
def test_thousands_of_schedules_stay_within_the_bound_and_come_to_their_end() -> None:
    check(Schedules, examples=3000)


class SchedulesJudgedByAgeAlone(Schedules):
    """As Schedules, but only what is trained is looked at."""

    @invariant()
    def rule_h_holds(self) -> None:
        pass


@pytest.mark.parametrize("machine", [Schedules, SchedulesJudgedByAgeAlone])
def test_the_same_schedules_find_a_bound_that_is_off_by_one(
    monkeypatch: pytest.MonkeyPatch, machine: type[RuleBasedStateMachine]
) -> None:
    monkeypatch.setattr(versions, "last_step", lambda version, bound: version + bound + 1)
    with pytest.raises((AssertionError, RuntimeError), match=r"versions old|assert"):
        check(machine, examples=150, shrink=False)


@pytest.mark.parametrize("asserted", [True, False])
def test_the_same_schedules_find_an_order_that_overtakes_without_rule_h(
    monkeypatch: pytest.MonkeyPatch, asserted: bool
) -> None:
    """By the policy's own assertion, and without it by this test's account of H."""

    def without_h(self: Ready, size: int, n: int, *, without: Collection[int] = ()) -> int:
        return max(0, size - self.outstanding.finished.total())

    monkeypatch.setattr(Ready, "num_missing", without_h)
    if not asserted:
        monkeypatch.setattr(StalenessPolicy, "_assert_rule_h", lambda self: None)
    with pytest.raises((RuntimeError, AssertionError), match=r"rule H is broken|assert"):
        check(Schedules, examples=150, shrink=False)


def test_the_same_schedules_find_a_ledger_that_takes_each_attempt_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Ledger.judge

    def by_attempt(self: Ledger, id: GroupId, attempt: int, oldest_version: int | None) -> Any:
        judgement = real(self, id, attempt, oldest_version)
        group = self.groups.by_id.get(id)
        is_new = group is not None and attempt != group.accepted_attempt
        return "accepted" if judgement == "superseded" and is_new else judgement

    monkeypatch.setattr(Ledger, "judge", by_attempt)
    with pytest.raises((AssertionError, RuntimeError), match=r"accepted twice|not outstanding"):
        check(Schedules, examples=150, shrink=False)


def test_admission_stops_exactly_at_the_bound() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_step=3, num_groups=100)
    while policy.can_admit():
        policy.admit()
    assert policy.admitted == 6
    policy.commit(1)
    while policy.can_admit():
        policy.admit()
    assert policy.admitted == 9


def test_min_version_is_the_oldest_that_reaches_the_step_of_the_place() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_step=2, num_groups=100)
    policy.commit(2)
    numbers = [policy.admit() for _ in range(8)]
    assert [policy.min_version(number) for number in numbers] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_only_the_head_of_the_queue_is_assigned() -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_step=1, num_groups=2, max_steps=2)
    policy.commit(1)
    first, second = policy.admit(), policy.admit()
    policy.lease(second, 0)
    policy.finish(second, 1)
    assert not policy.can_assign()
    policy.lease(first, 0)
    policy.finish(first, 0)
    assert policy.assign() == (first,)


def test_tokens_too_old_are_caught_at_assignment_with_all_numbers() -> None:
    policy = StalenessPolicy(max_staleness=1, groups_per_step=1, num_groups=9)
    policy.commit(5)
    for _ in range(4):
        number = policy.admit()
        policy.finish(number, 5)
        policy.assign()
    number = policy.admit()
    policy._outstanding.put(number, Place(2, finished=True))
    with pytest.raises(RuntimeError, match=r"version 2, 2 versions old in step 4; max_staleness"):
        policy.assign()


def test_fewer_prompts_than_a_step_are_an_error_when_the_last_batch_is_dropped() -> None:
    with pytest.raises(ValueError, match="fewer than one step of prompts_per_step=4"):
        StalenessPolicy(max_staleness=0, groups_per_step=4, num_groups=3, last_batch="drop")


def test_a_filtered_last_group_ends_the_data_without_an_empty_batch() -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_step=2, num_groups=3)
    for _ in range(2):
        policy.finish(policy.admit(), 0)
    policy.assign()
    policy.commit(1)
    last = policy.admit()
    before = policy.exhausted
    policy.remove(last)
    assert (before, policy.exhausted) == (False, True)
    assert not policy.can_assign()
    assert policy.next_step == 1


def test_a_run_resumed_with_a_smaller_bound_assigns_what_was_waiting() -> None:
    wide = StalenessPolicy(max_staleness=4, groups_per_step=1, num_groups=9)
    while wide.can_admit():
        wide.admit()
    policy = StalenessPolicy(max_staleness=0, groups_per_step=1, num_groups=9)
    policy.restore(admitted=5, committed=0, next_step=0, closed=False, queue=[*wide.outstanding])
    for step in range(9):
        if policy.can_admit():
            policy.admit()
        head = policy.outstanding[0]
        assert policy.lease(head, 0) == step
        policy.finish(head, step)
        assert policy.assign() == (head,)
        policy.commit(step + 1)
    assert policy.exhausted


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_run_resumed_with_fewer_steps_than_it_has_made_is_over(max_steps: int) -> None:
    policy = StalenessPolicy(max_staleness=0, groups_per_step=1, num_groups=9, max_steps=max_steps)
    policy.restore(admitted=3, committed=3, next_step=3, closed=False, queue=[])
    assert policy.exhausted
    assert not policy.can_admit()
