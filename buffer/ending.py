"""When the run is over, and why; and when the buffer may leave. Decided here and nowhere else.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import logging

from asyncrl.config import Config
from asyncrl.journal.claim import how_to_go_on
from asyncrl.messages import End
from buffer.books import Books
from buffer.members import Member, Members
from buffer.watch import Watch

log = logging.getLogger(__name__)

RETURN_S = 120.0
"""How long a run whose steps are all trained waits for a learner that has died, or has not been
heard since the buffer was started again: without it there is no last checkpoint."""
LEAVE_S = 10.0
"""How long the buffer stays after the end of the run for members that have not heard of it."""
LATELY_S = 30.0
"""A member that fell silent not longer ago than this may only be loading: it, too, may hear."""
TRAINING_LEAVE_S = 60.0
"""The same for a learner that is in the middle of a step."""


class Ending:
    """The end of one run: well, failed, or stopped (then it can go on)."""

    def __init__(self, config: Config, books: Books, members: Members, *, now: float) -> None:
        """`now` is when this buffer began."""
        self._config = config
        self._members = members
        self._ledger = books.ledger
        self._training = books.training
        self._evaluations = books.evaluations
        self._tally = books.tally
        self._num_groups = books.prompts.num_groups
        self._began_at = now
        self._end: End | None = None
        self._stopped_by = ""
        self._has_said = False

    @property
    def end(self) -> End | None:
        """None as long as the run goes on."""
        if not self._stopped_by:
            return self._end
        again = how_to_go_on(self._config.buffer.durability, name=self._config.run_name)
        reason = f"stopped by {self._stopped_by} at version {self._training.position}; {again}"
        return End(reason=reason, stopped=True, records=[])

    def advance(self, *, now: float) -> None:
        """Whatever follows from a change: leftovers, the last evaluation, the end."""
        if self.end is not None:
            return
        policy = self._ledger.policy
        self._ledger.drop_leftovers()
        if self._tally.num_useless_in_a_row >= self._config.buffer.max_filtered_in_a_row:
            self._finish(self._tally.why_useless(), failed=True)
        elif policy.exhausted and policy.next_step == 0:
            self._finish(f"the data gave no step: {self._tally.why_useless()}", failed=True)
        elif policy.exhausted and self._is_trained(now):
            self._evaluations.due(policy.next_step, now=now)
            if self._evaluations.idle:
                self._finish(self._why_over(), failed=False)
        elif policy.exhausted and not self._training.is_present:
            self._say_who_is_missing()

    def stop(self, by: str) -> None:
        """Nothing new is begun. The books stay as they are, so that the run can go on later."""
        if self.end is None:
            self._stopped_by = by
            log.warning("%s: the learner ends its step, writes a checkpoint, and all leave", by)

    def give_up(self, reason: str) -> None:
        """The run fails, but not for good: the books stay as they are."""
        if self.end is None:
            self._declare(reason, failed=True)

    def reopen(self) -> None:
        """The learner has come back from an earlier version: the end waits for it."""
        is_behind = self._training.position < self._ledger.policy.next_step
        if is_behind and self._end is not None and not self._end.failed:
            self._end = None

    def _is_trained(self, now: float) -> bool:
        """The current learner has trained every step. After a restart it has to say so first, and
        one that has died is waited for: it may come back from an earlier checkpoint."""
        if self._training.is_done:
            return True
        learner = self._members.named(self._training.owner)
        here = self._training.is_present and all(member.alive for member in learner)
        away_since = max([self._began_at, *(member.last_seen for member in learner)])
        may_end = here or now - away_since > RETURN_S
        return may_end and self._training.position == self._ledger.policy.next_step

    def _say_who_is_missing(self) -> None:
        """Once in the life of a buffer that was started again."""
        if not self._has_said:
            self._has_said = True
            log.warning(
                "all %d steps are assigned, the learner stands at version %d and has not said that "
                "its last checkpoint is written: start it again. If all is trained, the run ends "
                "without it in %.0f s",
                *(self._ledger.policy.next_step, self._training.position, RETURN_S),
            )

    def _why_over(self) -> str:
        steps, config = self._ledger.policy.next_step, self._config
        if config.max_steps is not None and steps >= config.max_steps:
            return f"all {steps} steps of max_steps are trained"
        return (
            f"data exhausted after {steps} steps: {self._num_groups} prompts in "
            f"{config.max_epochs} epochs"
        )

    def _finish(self, reason: str, *, failed: bool) -> None:
        self._ledger.cancel_outstanding("the run has ended")
        self._declare(reason, failed=failed)

    def _declare(self, reason: str, *, failed: bool) -> None:
        self._end = End(reason=reason, failed=failed, records=[])
        log.log(logging.ERROR if failed else logging.INFO, "the run has ended: %s", reason)


class Farewell:
    """After the end: who has yet to hear of it, and how long the buffer stays for them."""

    def __init__(self, books: Books, ending: Ending, watch: Watch, *, now: float) -> None:
        """`now` is when this buffer began."""
        self._books = books
        self._ending = ending
        self._watch = watch
        self._began_at = now
        self._ended_at: float | None = None

    def may_leave(self, *, now: float) -> bool:
        """The run has ended, and every member that is there was told or had the time to ask."""
        if self._ending.end is None:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at = now
        if self._learner_finishes(now):
            return False
        return self._all_told(now) or now - self._ended_at > self._patience_s()

    @property
    def is_unfinished(self) -> bool:
        """The run has ended well, and its learner has not said that all its work is written."""
        end, learner = self._ending.end, self._learner()
        if end is None or end.failed or end.stopped or learner is None:
            return False
        return not learner.is_done

    def _learner_finishes(self, now: float) -> bool:
        """Its last checkpoint and export are to come: it is waited for while it gives signs of
        life, and for RETURN_S after the last one, as it may be started again."""
        learner = self._learner()
        if not self.is_unfinished or learner is None or self._ended_at is None:
            return False
        if learner.alive:
            return now - self._ended_at < self._watch.watchdog.timeout_s
        return now - learner.last_seen < RETURN_S

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long: nobody could ask."""
        if self._ended_at is not None:
            self._ended_at += seconds

    def _all_told(self, now: float) -> bool:
        members = self._watch.members
        told = all(
            member.heard_end
            for member in [*members.generators(), *members.learners()]
            if member.alive or (not member.is_gone and now - member.last_seen < LATELY_S)
        )
        just_resumed = self._books.is_resumed and now - self._began_at < members.silence_s
        training = self._books.training
        is_away = bool(training.owner) and not training.is_done and self._learner() is None
        return told and not self._is_training() and not just_resumed and not is_away

    def _patience_s(self) -> float:
        """A stopped run waits for a step as long as its learner gives signs of life: a second
        signal ends the wait."""
        learner = self._learner()
        if learner is None or not self._is_training():
            return LEAVE_S
        if self._ending.end is not None and self._ending.end.stopped and learner.alive:
            return max(TRAINING_LEAVE_S, self._watch.watchdog.timeout_s)
        return TRAINING_LEAVE_S

    def _is_training(self) -> bool:
        """The learner has a batch of which it has not said that it is trained. One that was told
        of the stop trains at most up to the step for which it was told."""
        learner, training = self._learner(), self._books.training
        if learner is None or learner.is_gone:
            return False
        last, end = self._books.ledger.policy.next_step, self._ending.end
        if end is not None and end.stopped and training.end_step is not None:
            last = min(last, training.end_step)
        return training.position < last

    def _learner(self) -> Member | None:
        return next(iter(self._watch.members.named(self._books.training.owner)), None)
