"""After the end: who has yet to hear of it, and how long the buffer stays for them."""

from __future__ import annotations

from buffer.members import Member
from buffer.run import Run

LEAVE_S = 10.0
"""How long the buffer stays after the end of the run for members that have not heard of it."""
TRAINING_LEAVE_S = 60.0
"""The same for a learner that is in the middle of a step."""


class Farewell:
    """Decides when the buffer may leave."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._ended_at: float | None = None

    def may_leave(self, *, now: float) -> bool:
        """The run has ended, and every member that is there was told or had the time to ask."""
        if self._run.end is None:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        return self._all_told(now) or now - self._ended_at > self._patience_s()

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long: nobody could ask."""
        if self._ended_at is not None:
            self._ended_at += seconds

    def _all_told(self, now: float) -> bool:
        run = self._run
        told = all(member.heard_end for member in [*run.members.alive(), *run.members.learners()])
        just_resumed = run.is_resumed and now - run.began_at < run.members.silence_s
        is_away = bool(run.training.owner) and self._learner() is None
        return told and not self._is_training() and not just_resumed and not is_away

    def _patience_s(self) -> float:
        """A stopped run waits for a step as long as its learner gives signs of life: a second
        signal ends the wait."""
        learner = self._learner()
        if learner is None or not self._is_training():
            return LEAVE_S
        if self._run.end is not None and self._run.end.stopped and learner.alive:
            return max(TRAINING_LEAVE_S, self._run.watch.watchdog.timeout_s)
        return TRAINING_LEAVE_S

    def _is_training(self) -> bool:
        """The learner has a batch of which it has not said that it is trained. One that was told
        of the stop trains at most up to the step for which it was told."""
        learner, training = self._learner(), self._run.training
        if learner is None or learner.is_gone:
            return False
        last = self._run.ledger.policy.next_step
        if self._run.end is not None and self._run.end.stopped and training.end_step is not None:
            last = min(last, training.end_step)
        return training.position < last

    def _learner(self) -> Member | None:
        return next(iter(self._run.members.named(self._run.training.owner)), None)
