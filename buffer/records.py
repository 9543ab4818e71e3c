"""Evaluation records on their way to the learner, which writes them down."""

from __future__ import annotations

from asyncrl.messages import Record
from buffer.evaluation import Evaluations


class RecordMail:
    """Gives each result to the learner, and those of steps that it trains again once more: with
    every reply until the next request shows that a reply has arrived."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._next = self._sent = evaluations.num_told
        self._request = -1

    def new_reader(self, *, since_step: int) -> None:
        """A learner has registered at version `since_step`."""
        known = self._evaluations.results[: self._evaluations.num_told]
        self._next = self._sent = sum(record.step < since_step for record in known)
        self._request = -1

    def asked(self, request: int) -> None:
        """A request has come; if it is a new one, the reply to the one before has arrived."""
        if request != self._request:
            self._request, self._next = request, self._sent
            self._evaluations.num_told = max(self._evaluations.num_told, self._sent)

    def take(self) -> list[Record]:
        """What rides on the next reply."""
        results = self._evaluations.results
        self._sent = len(results)
        return results[self._next :]
