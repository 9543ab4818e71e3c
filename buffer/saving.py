"""What changed since the last time, as one transaction of the journal; and what must not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from asyncrl.config import Config
from asyncrl.journal import Journal
from asyncrl.journal_tables import Change, EvalRow
from buffer.evaluation import Evaluations
from buffer.history import History
from buffer.ledger import Ledger
from buffer.prompts import Prompts
from buffer.training import Training


class Saving:
    """Collects rows from everything that has any."""

    def __init__(
        self,
        journal: Journal,
        *,
        ledger: Ledger,
        training: Training,
        evaluations: Evaluations,
        history: History,
        meta: Callable[[], Mapping[str, str]],
        wall_offset: float,
    ) -> None:
        """`meta` gives what is kept by name; `wall_offset` + a monotonic time is the wall-clock
        time. The results that `evaluations` has now are in the journal already."""
        self._journal = journal
        self._ledger = ledger
        self._training = training
        self._evaluations = evaluations
        self._history = history
        self._meta = meta
        self._wall_offset = wall_offset
        self._saved_meta: dict[str, str] = {}
        self._num_evals = len(evaluations.results)

    def is_due(self, *, now: float) -> bool:
        """Whether there is something to write although nobody has asked for anything."""
        new_results = len(self._evaluations.results) > self._num_evals
        return self._ledger.is_changed or new_results or self._history.is_due(now=now)

    def save(self, *, now: float) -> Future[None]:
        """The future completes when what changed, and all before, is on disk."""
        steps, weights = self._training.take_rows()
        results = self._evaluations.results[self._num_evals :]
        self._num_evals = len(self._evaluations.results)
        return self._journal.write(
            Change(
                groups=self._ledger.take_rows(at=now + self._wall_offset),
                steps=steps,
                weights=weights,
                evals=tuple(EvalRow(r.step, r.model_dump_json()) for r in results),
                beats=self._history.take_rows(),
                meta=self._changed_meta(),
            )
        )

    def _changed_meta(self) -> dict[str, str]:
        before, self._saved_meta = self._saved_meta, dict(self._meta())
        return {key: text for key, text in self._saved_meta.items() if before.get(key) != text}


def constants(config: Config, prompts: Prompts) -> dict[str, str]:
    """What the arithmetic of a begun run rests on, as `meta` keeps it."""
    return {
        "data": prompts.fingerprint,
        "groups_per_step": str(config.prompts_per_step),
        "group_size": str(config.group_size),
    }


def check_same_run(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises ValueError when one of the `constants` differs from that of a begun run."""
    names = {
        "data": "data.train_files and their order (fingerprint)",
        "groups_per_step": "prompts_per_step",
        "group_size": "group_size",
    }
    for key, text in now.items():
        if before.get(key, text) != text:
            raise ValueError(
                f"{names[key]} of this run was {before[key]}, now it is {text}: a run cannot go on "
                "with another one. Set it back, or start a new run (another run_name) from a "
                "checkpoint of this one: checkpoint.resume=PATH"
            )
