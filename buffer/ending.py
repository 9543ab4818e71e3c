"""When the run is over, and why: decided here and nowhere else. Time is passed in, in seconds."""

from __future__ import annotations

import logging

from asyncrl.config import Config
from asyncrl.messages import End
from buffer.evaluation import Evaluations
from buffer.ledger import Ledger
from buffer.tally import Tally
from buffer.training import Training

log = logging.getLogger(__name__)

RETURN_S = 120.0
"""How long a restarted buffer whose steps are all trained waits for the learner to come back."""


class Ending:
    """The end of one run: well, failed, or stopped (then it can go on)."""

    def __init__(
        self,
        config: Config,
        *,
        ledger: Ledger,
        training: Training,
        evaluations: Evaluations,
        tally: Tally,
        num_groups: int,
        now: float,
    ) -> None:
        """`num_groups` is what the data holds; `now` is when this buffer began."""
        self._config = config
        self._ledger = ledger
        self._training = training
        self._evaluations = evaluations
        self._tally = tally
        self._num_groups = num_groups
        self._began_at = now
        self._end: End | None = None
        self._stopped_by = ""

    @property
    def end(self) -> End | None:
        """None as long as the run goes on."""
        if not self._stopped_by:
            return self._end
        where = f"at version {self._training.position}"
        reason = f"stopped by {self._stopped_by} {where}; go on with checkpoint.resume=auto"
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
        """The current learner has trained every step. After a restart it has to say so first: it
        may come back from an earlier checkpoint."""
        here = self._training.is_present or now - self._began_at > RETURN_S
        return here and self._training.position == self._ledger.policy.next_step

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
