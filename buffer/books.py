"""The books of a run: what the journal holds of it, kept up to date, and taken over by the next
buffer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from asyncrl.config import Config
from asyncrl.journal.tables import BeatRow, Change, EvalRow, Stored
from asyncrl.messages import End, Record
from asyncrl.types import Row, WeightId
from buffer.evaluation import Evaluations
from buffer.ledger import Ledger
from buffer.policy import StalenessPolicy
from buffer.prompts import Prompts, pack_rows
from buffer.room import AnyJournal, JournalRoom
from buffer.tally import Tally
from buffer.training import Training
from buffer.updates import Updates


class Books:
    """Prompts, groups, batches, evaluations and counts of one run. Whoever changes them calls
    `save`, whose future completes when it is on disk."""

    def __init__(
        self,
        config: Config,
        *,
        train: Sequence[Row],
        val: Sequence[Row],
        journal: AnyJournal,
        now: float,
    ) -> None:
        """Goes on where the journal ends. ValueError when data or B differ from the journal's,
        for a row that cannot be sent, and for a journal with too little room."""
        for _ in pack_rows(val, "data.val_files"):
            pass  # raises for a row that cannot be sent
        stored = journal.stored
        self.journal = journal
        self.is_resumed = bool(stored.groups)
        self.wall_offset = time.time() - now
        """`wall_offset` + a monotonic time is the wall-clock time."""
        self.prompts = Prompts(
            train, num_epochs=config.max_epochs, seed=config.seed, shuffle=config.data.shuffle
        )
        self._constants = _constants(config, self.prompts)
        _check_same_run(stored.meta, self._constants)
        self.ledger = _restored_ledger(config, self.prompts, stored, now)
        self.training = Training(self.ledger, stored)
        self.ledger.batches.forget(before_step=self.training.oldest_step)
        self.room = JournalRoom(config, journal=journal, ledger=self.ledger, training=self.training)
        self.evaluations = _restored_evaluations(config, val, stored, now)
        self.updates = Updates(
            [WeightId(row.inc, row.version) for row in stored.weights],
            is_under_pause=config.weights.staging == "none",
            wall_offset=self.wall_offset,
        )
        self.tally = Tally()
        self.tally.restore(
            stored.meta.get("staleness", "{}"), recent_rewards=_recent_rewards(stored)
        )
        self._saved_meta: dict[str, str] = {}
        self._num_saved_evals = len(self.evaluations.results)

    @property
    def is_changed(self) -> bool:
        """Whether there is something to save that nobody's request has brought."""
        new_results = len(self.evaluations.results) > self._num_saved_evals
        return self.ledger.groups.is_changed or new_results or self.updates.has_rows

    def save(self, *, beats: tuple[BeatRow, ...], end: End | None, now: float) -> Future[None]:
        """Writes what changed, as one transaction; `end` is that of the run, if it has ended. The
        future completes when that, and all before, is on disk."""
        steps, weights = self.training.take_rows()
        results = self.evaluations.results[self._num_saved_evals :]
        self._num_saved_evals = len(self.evaluations.results)
        return self.journal.write(
            Change(
                groups=self.ledger.groups.take_rows(at=now + self.wall_offset),
                steps=steps,
                weights=weights,
                served=self.updates.take_rows(),
                evals=tuple(EvalRow(r.step, r.model_dump_json()) for r in results),
                beats=beats,
                meta=self._changed_meta(end),
            )
        )

    def _changed_meta(self, end: End | None) -> dict[str, str]:
        before, self._saved_meta = self._saved_meta, self._meta(end)
        return {key: text for key, text in self._saved_meta.items() if before.get(key) != text}

    def _meta(self, end: End | None) -> dict[str, str]:
        not_issued = max(0, self.prompts.num_groups - self.ledger.policy.admitted)
        return {
            **self._constants,
            **self.training.meta(),
            "staleness": self.tally.staleness_json(),
            "closed": str(int(self.ledger.policy.closed)),
            "not_issued": str(not_issued),
            "evaluating": json.dumps(self.evaluations.versions_due),
            "records_told": str(self.evaluations.num_told),
            "end": end.model_dump_json() if end else "",
        }


def _restored_ledger(config: Config, prompts: Prompts, stored: Stored, now: float) -> Ledger:
    policy = StalenessPolicy(
        max_staleness=config.max_staleness,
        groups_per_step=config.prompts_per_step,
        num_groups=prompts.num_groups,
        max_steps=config.max_steps,
        last_batch=config.data.last_batch,
        order=config.buffer.order,
    )
    ledger = Ledger(policy, group_id=prompts.group_id, max_attempts=config.buffer.max_attempts)
    committed = int(stored.meta.get("committed", 0))
    closed = stored.meta.get("closed") == "1"
    steps = len(stored.steps)
    ledger.restore(stored.groups, committed=committed, steps=steps, closed=closed, now=now)
    return ledger


def _restored_evaluations(
    config: Config, val: Sequence[Row], stored: Stored, now: float
) -> Evaluations:
    """With those due that the last buffer had not finished, or the first one of a new run."""
    options = config.eval
    evaluations = Evaluations(val, temperature=options.temperature, timeout_s=options.timeout_s)
    evaluations.results += [Record.model_validate_json(row.record) for row in stored.evals]
    evaluations.num_told = int(stored.meta.get("records_told", 0))
    first = [0] if options.before_training else []
    for version in json.loads(stored.meta.get("evaluating", str(first))):
        evaluations.due(version, now=now)
    return evaluations


def _recent_rewards(stored: Stored) -> list[float]:
    """Of the groups that came in last, the newest at the end."""
    scored = [(row.finished_at, row.reward) for row in stored.groups if row.reward is not None]
    return [reward for at, reward in sorted(scored, key=lambda each: each[0] or 0.0)]


def _constants(config: Config, prompts: Prompts) -> dict[str, str]:
    """What the arithmetic of a begun run rests on, as `meta` keeps it."""
    return {
        "data": prompts.fingerprint,
        "groups_per_step": str(config.prompts_per_step),
        "group_size": str(config.group_size),
    }


def _check_same_run(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises ValueError when one of the `_constants` differs from that of a begun run."""
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
