"""The batches of all steps: which groups are in each, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable

from buffer.groups import FATES, Group, Groups, State
from buffer.policy import StalenessPolicy


class Batches:
    """Groups by the step that they are assigned to, for good."""

    def __init__(self, policy: StalenessPolicy, groups: Groups) -> None:
        self._policy = policy
        self._groups = groups
        self._steps: dict[int, list[Group]] = {}

    def restore(self, groups: Iterable[Group]) -> None:
        """Takes over what a buffer that has ended had assigned; `groups` are in order of
        admission."""
        for group in groups:
            if group.step is not None:
                self._steps.setdefault(group.step, []).append(group)

    def assign(self) -> tuple[int, list[Group]]:
        """Closes the next batch (policy.can_assign): its step and its groups in order."""
        step = self._policy.next_step
        groups = [self._groups.by_number[number] for number in self._policy.assign()]
        for group in groups:
            group.step = step
            self._groups.move(group, State.ASSIGNED)
        self._steps[step] = groups
        return step, groups

    def of(self, step: int) -> list[Group]:
        """The groups of an assigned step, in order of admission."""
        return self._steps[step]

    def commit(self, version: int) -> list[Group]:
        """Step version - 1 is trained: returns its groups."""
        self._policy.commit(version)
        groups = self._steps[version - 1]
        for group in groups:
            self._groups.move(group, State.TRAINED)
        return groups

    def rewind(self, version: int) -> None:
        """The learner is at `version` (back, or ahead of the last commit that arrived): earlier
        steps are trained, later ones are assigned."""
        self._policy.commit(version)
        for step, groups in self._steps.items():
            state = State.TRAINED if step < version else State.ASSIGNED
            for group in groups:
                if group.state != state:
                    self._groups.move(group, state)

    def forget(self, *, before_step: int) -> None:
        """Drops from memory what can never be asked for again; the journal keeps it.

        These are the groups trained before `before_step`, and the fates admitted before them, but
        for filtered ones that have a place in a batch to come.
        """
        steps = [step for step in self._steps if step < before_step]
        last = max((g.number for step in steps for g in self._steps.pop(step)), default=-1)
        for number in [n for n in self._groups.by_number if n <= last]:
            group = self._groups.by_number[number]
            is_trained = group.step is not None and group.step < before_step
            is_settled = group.state in FATES and not self._policy.is_outstanding(number)
            if is_trained or is_settled:
                self._groups.forget(number)
