"""What is waited for, by whom and since when, in words and numbers. Time is passed in."""

from __future__ import annotations

from asyncrl.types import WeightId
from buffer.books import Books
from buffer.groups import Group, State
from buffer.leases import LeaseClocks
from buffer.members import Member, Members


class Waits:
    """Looks at a run and says what its next batch, or its end, waits for."""

    def __init__(self, books: Books, leases: LeaseClocks, members: Members, *, now: float) -> None:
        self._ledger = books.ledger
        self._training = books.training
        self._room = books.room
        self._evaluations = books.evaluations
        self._leases = leases
        self._members = members
        self._asked_at: dict[int, float] = {}
        self._position_since = now

    def asked(self, step: int, *, now: float) -> None:
        """The learner has asked for the batch of `step`, perhaps ahead of time."""
        self._asked_at.setdefault(step, now)

    def asked_s(self, step: int, *, now: float) -> float:
        """Seconds since `step` was first asked for."""
        return now - self._asked_at.get(step, now)

    def moved(self, *, now: float) -> None:
        """The learner stands at another version than before."""
        self._position_since = now
        position = self._training.position
        self._asked_at = {step: at for step, at in self._asked_at.items() if step >= position}

    def learner_s(self, *, now: float) -> float | None:
        """For how long the learner has stood still for want of its next batch; None: it has not."""
        step = self._training.position
        if step not in self._asked_at or step < self._ledger.policy.next_step:
            return None
        return now - max(self._asked_at[step], self._position_since)

    def seconds(self, *, now: float) -> float:
        """How long what `text` tells has been waited for."""
        silent = [m for m in self._members.named(self._training.owner) if not m.alive]
        if silent and self._is_for_learner:
            return now - silent[0].last_seen
        policy = self._ledger.policy
        if not policy.exhausted:
            return self.learner_s(now=now) or 0.0
        if self._training.position < policy.next_step:
            return now - self._position_since
        return self._evaluations.running_s(now=now)

    def state(self) -> str:
        """The state of a buffer that has nothing to do (asyncrl/states.py): for whom the run waits,
        or for requests as long as both sides are busy."""
        policy, step = self._ledger.policy, self._training.position
        is_flying = self._ledger.groups.counts[State.LEASED] > 0 or bool(
            self._evaluations.holders()
        )
        if self._is_for_learner:
            return "waiting for the learner"
        if policy.exhausted:  # evaluations are left, or the learner's last work
            return f"waiting for {'generators' if is_flying else 'the learner'}"
        if step in self._asked_at and step >= policy.next_step:  # the learner stands still
            is_its_turn = not is_flying and self.is_unpublished
            return f"waiting for {'the learner' if is_its_turn else 'generators'}"
        if not is_flying and self._ledger.next_min_version() is None:
            return "waiting for the learner"
        return "waiting for requests"

    def text(self, *, now: float) -> str:
        """What the next batch, or the end of the run, waits for."""
        evaluating = self._evaluations.describe()
        missing = self.missing_learner(now=now)
        if self._is_for_learner:
            is_named = bool(self._members.named(self._training.owner))
            parts = [self._training_text(now), "" if is_named else missing]
        elif not self._ledger.policy.exhausted:
            parts = [self._batch_text(now), evaluating, missing]
        else:
            parts = [evaluating or "the end of the run"]
        return "; ".join(part for part in parts if part)

    @property
    def _is_for_learner(self) -> bool:
        """The learner has a batch to train, and no group is missing for the next one."""
        policy = self._ledger.policy
        return self.is_training and (policy.exhausted or policy.num_missing() == 0)

    @property
    def is_training(self) -> bool:
        """Whether a batch is assigned that the learner has not committed."""
        return self._training.position < self._ledger.policy.next_step

    @property
    def is_unpublished(self) -> bool:
        """Whether the next group needs a version that the learner has not published."""
        needed = self._ledger.next_min_version()
        return needed is not None and needed > self._training.newest_version

    def missing_learner(self, *, now: float) -> str:
        """Why there is no learner at work; empty when there is one."""
        owner = self._training.owner
        if not owner:
            there = "".join(f": {m} {m.condition(now=now)}" for m in self._members.learners())
            return f"no learner has registered{there}"
        for member in self._members.named(owner):
            return "" if member.alive else f"{member} {member.condition(now=now)}"
        return f"{owner} has not been heard since the buffer was started again"

    def holders(self) -> list[Member]:
        """Generators that have leases or evaluation rows."""
        names = {group.member for group in self._ledger.groups.leased()} | {
            *self._evaluations.holders()
        }
        return [member for name in sorted(names) for member in self._members.named(name)]

    def _batch_text(self, now: float) -> str:
        policy = self._ledger.policy
        size, missing = policy.batch_size, policy.num_missing()
        flying = self._ledger.groups.leased()
        text = f"step {policy.next_step}: need {size} groups, have {size - missing}"
        text += f", {len(flying)} in flight"
        if flying:
            text += self._flight_text(flying, now)
        if missing == 0 or (not flying and self._ledger.next_min_version() is None):
            return f"{text}; {self._training_text(now)}"
        if flying:
            return text
        return f"{text}; {self._idle_text(now)}"

    def _flight_text(self, flying: list[Group], now: float) -> str:
        started = [group for group in flying if group.started_at is not None]
        age = "none started"
        if started:
            age = f"oldest {max(self._leases.age_s(g, now=now) for g in started):.0f} s"
        first = flying[0]
        text = f", {age}; first is group {first.id} at {first.member}"
        for member in self._members.named(first.member):
            text += f" ({member.condition(now=now)})"
        return text

    def _training_text(self, now: float) -> str:
        """What the learner does while the batch it would fetch next is complete, or cannot be."""
        step, next_step = self._training.position, self._ledger.policy.next_step
        if step < next_step:
            text = f"step {step} is being trained"
            for member in self._members.named(self._training.owner):
                text += f" by {member.name} ({member.condition(now=now)})"
            return text
        committed = self._ledger.policy.committed
        if self._ledger.policy.num_missing() > 0:
            return f"the next one may start when version {committed + 1} is committed"
        return "all are there, the learner has yet to ask for them"

    def _idle_text(self, now: float) -> str:
        """Why a group that may be leased is not: who could have it."""
        if not self._room.may_lease():
            return self._room.full_text()
        needed = self._ledger.next_min_version()
        alive = self._members.alive()
        if not alive:
            return "no generator is connected" + self._lost_text(now)
        newest = WeightId(self._training.newest.inc, self._training.newest_version)
        serving = ", ".join(
            f"{m.name} serves {m.serving.version} ({m.condition(now=now)})" for m in alive
        )
        text = f"the next needs version {needed}, newest published {newest.version}, {serving}"
        if self.is_unpublished:  # it says what keeps it from publishing
            for member in self._members.named(self._training.owner):
                text += f", {member.name}: {member.condition(now=now)}"
        return text

    def _lost_text(self, now: float) -> str:
        lost = [m for m in self._members.generators() if not m.is_gone]
        return "".join(f", {m} {m.condition(now=now)}" for m in lost)


def stall_reason(waits: Waits, members: Members, *, still_s: float, now: float) -> str:
    """Why the run is given up, who is there, and what to do."""
    everybody = members.by_name.values()
    there = [m for m in everybody if m.role != "monitor" and not m.is_gone]
    who = "; ".join(f"{member}: {member.condition(now=now)}" for member in there) or "nobody"
    return (
        f"nothing has got on for {still_s:.0f} s (network.stall_timeout_s): no group came in, no "
        f"batch was closed, no version was committed. Waiting for {waits.text(now=now)}. "
        f"Members: {who}. {_mending(waits, members, now=now)}, then go on with "
        "checkpoint.resume=auto"
    )


def _mending(waits: Waits, members: Members, *, now: float) -> str:
    look = "its log says what it does, SIGUSR1 makes it dump its stacks"
    if waits.missing_learner(now=now):
        return "Start a learner (asyncrl-launch learner CONFIG)"
    if waits.is_training or (waits.is_unpublished and not waits.holders()):
        return f"Look at the learner: {look}"
    if not members.alive():
        return "Start a generator (asyncrl-launch generator CONFIG)"
    names = ", ".join(member.name for member in waits.holders() or members.alive())
    return f"Look at {names}: {look}"
