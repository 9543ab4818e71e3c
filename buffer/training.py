"""The learner's side of the buffer: which life of it is current, its batches and its commits."""

from __future__ import annotations

import logging

from asyncrl.journal.tables import StepRow, Stored, WeightsRow
from asyncrl.messages import Checkpointed, Commit, Published, Record, Refused, Register
from asyncrl.types import WeightId
from buffer.groups import Group
from buffer.ledger import Ledger

log = logging.getLogger(__name__)


class Training:
    """Registration, batches, commits and publications. Asking twice is the same as asking once.

    A method that carries out a request returns None, or the Refused that says why not.
    """

    def __init__(self, ledger: Ledger, stored: Stored) -> None:
        meta = stored.meta
        self.inc = int(meta.get("inc", 0))
        """Which life of the learner is the current one; 0: none has registered."""
        self.position = int(meta.get("position", 0))
        """Version of the current learner. Below the committed one while it replays."""
        self.oldest_step = int(meta.get("oldest_step", 0))
        """Payloads of earlier steps may be gone."""
        self.newest = WeightsRow(0, 0, "", "")
        """The newest publication. Version 0 everybody has from the start."""
        self.newest_version = 0
        """Highest version number ever published, by any life of the learner."""
        self.end_step: int | None = None
        """The step for which the current learner was told that there is none."""
        self.is_done = meta.get("done") == "1"
        """The current learner has said that its last checkpoint and export are written."""
        self.metrics: dict[str, float] = {}
        """What the learner said with its last commit."""
        self._ledger = ledger
        self._is_present = False
        self.owner = meta.get("owner", "")
        """Member that is the current learner; empty: none has ever registered."""
        self.num_forks = int(meta.get("forks", 0))
        """How often the learner went on differently from a version that there was already."""
        self._digest = meta.get("config_digest", "")
        self._steps = {row.step: row for row in stored.steps}
        self._publications: dict[int, WeightsRow] = {}
        self._new_steps: list[StepRow] = []
        self._new_weights: list[WeightsRow] = []
        for row in stored.weights:
            self._remember(row)

    @property
    def committed(self) -> int:
        """Highest version ever committed, by any life of the learner."""
        return self._ledger.policy.committed

    @property
    def is_present(self) -> bool:
        """Whether the current learner has been heard since this buffer started."""
        return self._is_present

    def fenced(self, inc: int) -> Refused | None:
        """The refusal for a message of another life of the learner than the current one."""
        if inc == self.inc:
            self._is_present = True
            return None
        if inc < self.inc:
            return Refused(
                code="fenced",
                reason=f"learner number {self.inc} has taken over from number {inc}: end this one",
            )
        return Refused(code="invalid", reason=f"learner number {inc} has not registered")

    def register(self, message: Register, *, member: str) -> Refused | None:
        """A learner takes over from its checkpoint; later steps are replayed to it."""
        version = message.checkpoint_version
        problem = self._why_not_from(version)
        if problem is not None:
            return Refused(code="invalid", reason=problem)
        self._is_present = True
        if member == self.owner and version == self.position:
            return None
        if self._digest and message.config_digest != self._digest:
            self._fork_from(version)
        self.inc, self.owner = self.inc + 1, member
        self._digest, self.position = message.config_digest, version
        self.end_step, self.is_done = None, False
        self._ledger.batches.rewind(version)
        return None

    def assign(self, record: Record, *, waited_for: str, at: float) -> None:
        """Notes the batch that the ledger has just closed, for good, with its record and the
        wall-clock time."""
        groups = self._ledger.batches.of(record.step)
        row = StepRow(
            step=record.step,
            num_groups=len(groups),
            max_staleness=self._ledger.policy.max_staleness,
            waited_for=waited_for,
            record=record.model_dump_json(),
            at=at,
        )
        self._steps[record.step] = row
        self._new_steps.append(row)

    def step(self, step: int) -> tuple[StepRow, list[Group]] | None:
        """An assigned batch; None when there is none yet, or none any more."""
        row = self._steps.get(step)
        if row is None or step < self.oldest_step:
            return None
        return row, self._ledger.batches.of(step)

    def commit(self, message: Commit) -> Refused | None:
        """The next step is trained."""
        refused = self.fenced(message.inc)
        if refused is not None or message.version <= self.position:
            return refused
        if message.version > self.position + 1 or message.version - 1 not in self._steps:
            return Refused(
                code="invalid",
                reason=f"version {message.version} is committed by a learner at version "
                f"{self.position}, and {self._ledger.policy.next_step} steps are assigned",
            )
        self.position, self.metrics = message.version, dict(message.metrics)
        self._ledger.batches.commit(message.version)
        return None

    def published(self, message: Published) -> Refused | None:
        """Weights can be taken; a second digest of the same version is a fork of the run."""
        refused = self.fenced(message.inc)
        if refused is not None:
            return refused
        if message.version > self.position:
            return Refused(
                code="invalid",
                reason=f"version {message.version} is published by a learner at version "
                f"{self.position}: only what is committed can be published",
            )
        row = WeightsRow(message.inc, message.version, message.location, message.digest)
        before = self._publications.get(message.version)
        if before is not None and before.digest != row.digest:
            self.num_forks += 1
            log.warning(
                "fork: version %d of learner number %d has digest %s, that of number %d had %s",
                *(row.version, row.inc, row.digest, before.inc, before.digest),
            )
        self._remember(row)
        self._new_weights.append(row)
        return None

    def checkpointed(self, message: Checkpointed) -> Refused | None:
        """Batches before the oldest checkpoint are not needed any more (see oldest_step)."""
        refused = self.fenced(message.inc)
        if refused is not None:
            return refused
        oldest = min(message.versions, default=0)
        if self.oldest_step < oldest <= self.position:
            self.oldest_step = oldest
            self._steps = {s: row for s, row in self._steps.items() if s >= oldest}
            self._ledger.batches.forget(before_step=oldest)
        return None

    def meta(self) -> dict[str, str]:
        """What must outlive a kill besides rows."""
        return {
            "inc": str(self.inc),
            "position": str(self.position),
            "oldest_step": str(self.oldest_step),
            "committed": str(self.committed),
            "owner": self.owner,
            "config_digest": self._digest,
            "forks": str(self.num_forks),
            "done": str(int(self.is_done)),
        }

    def take_rows(self) -> tuple[tuple[StepRow, ...], tuple[WeightsRow, ...]]:
        """Batches and publications since the last call, for the journal."""
        taken = tuple(self._new_steps), tuple(self._new_weights)
        self._new_steps, self._new_weights = [], []
        return taken

    def _fork_from(self, version: int) -> None:
        self.num_forks += 1
        log.warning(
            "fork: the learner comes back at version %d with another training configuration. "
            "Batches that are assigned stay; %d groups without one that newer versions began are "
            "generated anew",
            *(version, self._ledger.fork(version)),
        )

    def _why_not_from(self, version: int) -> str | None:
        num_steps = self._ledger.policy.next_step
        if version > num_steps:
            return (
                f"the checkpoint is of version {version}, but this run has assigned only "
                f"{num_steps} steps: the checkpoint is of another run, or the journal is"
            )
        if version < self.oldest_step:
            return (
                f"the checkpoint is of version {version}, but the batches before step "
                f"{self.oldest_step} are deleted: resume from a checkpoint of version "
                f"{self.oldest_step} or later"
            )
        return None

    def _remember(self, row: WeightsRow) -> None:
        self._publications[row.version] = row
        self.newest_version = max(self.newest_version, row.version)
        if WeightId(row.inc, row.version) > WeightId(self.newest.inc, self.newest.version):
            self.newest = row
