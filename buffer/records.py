"""Evaluation records on their way to the learner, which writes them down."""

from __future__ import annotations

from asyncrl.messages import Record
from buffer.evaluation import Evaluations


class RecordMail:
    """Gives each result to each life of the learner: again with every reply until the next
    request shows that a reply has arrived."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations
        self._next = 0
        self._sent = 0
        self._request = -1

    def new_reader(self, *, since_step: int) -> None:
        """A learner has registered at version `since_step`: it has written the earlier ones."""
        results = self._evaluations.results
        self._next = self._sent = sum(record.step < since_step for record in results)
        self._request = -1

    def asked(self, request: int) -> None:
        """A request has come; if it is a new one, the reply to the one before has arrived."""
        if request != self._request:
            self._request, self._next = request, self._sent

    def take(self) -> list[Record]:
        """What rides on the next reply."""
        results = self._evaluations.results
        self._sent = len(results)
        return results[self._next :]
