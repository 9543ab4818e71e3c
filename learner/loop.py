"""The learner's loop: get a batch, train it, commit the new version, publish it, go on.

Step s turns version s into s + 1. Every rank runs this loop alike; rank 0, the lead, talks to the
buffer and writes the files; or reads the journal of a recorded run instead (replay.py).

    consumes        batches of its line; the next one is fetched while this one trains
    waits for       the next batch and nothing else: no generator, no reader, no tracker
    unblocks        the buffer (commit) and the generators (publish)
"""

from __future__ import annotations

import logging
import sys
import time
from functools import partial

from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.training import training_digest
from asyncrl.disk import remove_whole
from asyncrl.messages import Batch, End, Heartbeat, Waiting
from asyncrl.run_dir import RunDir
from asyncrl.types import WeightId
from asyncrl.wire import Packet, decode_group
from learner.batch import staleness_metrics
from learner.checkpoint import (
    State,
    list_versions,
    prune_checkpoints,
    save_checkpoint,
)
from learner.export import export_policy
from learner.optimizer import Optimizer
from learner.parity import ParityWatch
from learner.policy import load_policy
from learner.ranks import Ranks
from learner.reporting import Reporter, last_line, state_in_words
from learner.resume import resume
from learner.sides import Line, Outlet
from learner.train_step import train_step

log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""At the end of the run, how long the newest weights may take to be published."""
SAY_WAITING_S = 10.0
"""A wait is said in the log when it has lasted this long, and then as often."""


class Learner:
    """One rank of the learner, from registration to the end of the run."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        line: Line,
        outlet: Outlet,
        ranks: Ranks,
        clock: PhaseClock,
    ) -> None:
        """`clock` has been in phase "start" since the program began."""
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self.clock = clock
        self.version = self.inc = self.num_tokens = 0
        self.committed = 0
        """Highest version ever committed when this learner took over; until then it replays."""
        self.snapshot_version = 0
        """Newest version handed to the outlet. Version 0 needs none: generators load it."""
        self.saved_version = -1
        """Version of the newest checkpoint; the same on all ranks, whatever each sees on a disk."""
        self.line = line
        self.outlet = outlet
        self.parity = ParityWatch(config)
        self.line.give_signs_of_life(self.look)
        self.policy = load_policy(config, ranks)
        self.optimizer = Optimizer(self.policy, config.learner.optim)
        self.reporter = Reporter(run_dir, config, ranks)

    def take_over(self) -> None:
        """Goes on from where the run is; learners registered before are fenced off from now on.
        ValueError for what the user can mend."""
        self.version = resume(
            self.policy, self.optimizer, self.config, self.run_dir, ranks=self.ranks
        )
        self.saved_version = self.version or -1  # 0: perhaps from the beginning, without one
        registered = self.line.register(
            checkpoint_version=self.version, config_digest=training_digest(self.config)
        )
        self.inc, self.committed = registered.inc, registered.committed
        self.parity.begin(WeightId(self.inc, self.version))
        if self.committed > self.version:
            log.info("replaying steps %d to %d", self.version, self.committed - 1)

    def run(self) -> int:
        """Trains until the buffer says that the run has ended; returns the exit code."""
        if self.version == self.committed > 0:
            self.publish()
        self.line.fetch(self.version)
        while True:
            packet, waited_for = self.next_batch()
            if isinstance(packet.message, End):
                return self.finish(packet.message)
            self.line.fetch(self.version + 1)
            values = self.train(packet)
            is_asked = self.commit(values)
            if self.is_time_to_publish():
                self.publish()
            if is_asked or _is_multiple(self.version, self.config.checkpoint.every):
                self.save()
            self.report(packet.message, values, waited_for)

    def look(self) -> Heartbeat:
        """What this learner does now; called from the heartbeat's thread."""
        words = state_in_words(self.clock.phase, version=self.version, committed=self.committed)
        return Heartbeat(
            state="; ".join(filter(None, [words, self.outlet.trouble(), self.parity.trouble()])),
            state_s=self.clock.phase_s(),
            seconds=self.clock.total(),
            serving=[self.inc, self.version],
            num_tokens=self.num_tokens,
        )

    def next_batch(self) -> tuple[Packet, str]:
        """The Batch of the next step or the End, and what was waited for."""
        self.clock.enter("wait_batch")
        started = said = time.monotonic()
        waited_for = ""
        while True:
            packet = self.line.next_reply(give_up=self.outlet.why_give_up())
            self.reporter.records(packet.message.records)
            if isinstance(packet.message, End):
                return packet, waited_for
            if packet.message.step != self.version:
                raise RuntimeError(f"expected step {self.version}, got {packet.message.step}")
            if isinstance(packet.message, Batch):
                return packet, packet.message.waited_for or waited_for
            waited_for = packet.message.reason
            self.use_the_wait(packet.message)
            if time.monotonic() - said > SAY_WAITING_S:
                said = time.monotonic()
                log.info(
                    "step %d, %.0f s, waiting for: %s", self.version, said - started, waited_for
                )

    def train(self, packet: Packet) -> dict[str, float]:
        """One step on a batch: version s becomes s + 1."""
        self.clock.enter("prepare")
        step, batch = self.version, packet.message
        groups = [decode_group(frame) for frame in packet.frames]
        ages = staleness_metrics(groups, step=step, max_staleness=batch.max_staleness)
        is_new = not (batch.replayed or self.line.is_recorded)
        check = partial(self.parity.look, groups, step=step, is_judged=is_new)
        values = train_step(
            self.policy, self.optimizer, groups, self.config, clock=self.clock, check=check
        )
        if values["train/skipped"]:
            self.reporter.skipped(step, packet)
        self.version = step + 1
        self.num_tokens += int(values["train/num_tokens"])
        return {**values, **ages, "train/replayed": float(batch.replayed)}

    def commit(self, values: dict[str, float]) -> bool:
        """Whether a checkpoint is asked for, to make room in the journal."""
        self.clock.enter("commit")
        return self.line.commit(self.version, values)

    def is_time_to_publish(self) -> bool:
        """Replayed versions stay silent up to the one that generators may serve already."""
        if self.version <= self.committed:
            return self.version == self.committed
        return _is_multiple(self.version, self.config.weights.publish_every)

    def publish(self) -> None:
        self.clock.enter("snapshot")
        self.outlet.snapshot(self.policy, WeightId(self.inc, self.version))
        self.snapshot_version = self.version

    def use_the_wait(self, waiting: Waiting) -> None:
        """While there is nothing to train, a version that publish_every passed over goes out: the
        newest is always published in the end. And the journal gets room where it asks for it."""
        if self.snapshot_version < self.version and self.version >= self.committed:
            self.publish()
        if waiting.checkpoint:
            self.make_room()
        self.clock.enter("wait_batch")

    def make_room(self) -> None:
        """A checkpoint lets the journal delete older batches. Where the newest one is of this
        version already, what keeps them are the older ones: those go, and the buffer is told."""
        if self.saved_version < self.version:
            self.save()
        elif self.ranks.is_lead:
            if len(list_versions(self.run_dir.checkpoints)) > 1:
                log.warning("older checkpoints go: the journal is near buffer.max_journal_gb")
            self.prune(keep_last=1)

    def save(self) -> None:
        """Writes a checkpoint, deletes old ones, and tells the buffer which there are."""
        self.clock.enter("checkpoint")
        state = State(
            version=self.version,
            num_steps=self.optimizer.num_steps,
            num_updates=self.optimizer.num_updates,
            seed=self.config.seed,
            config_digest=training_digest(self.config),
        )
        save_checkpoint(
            self.run_dir.checkpoints, self.policy, self.optimizer, state, is_lead=self.ranks.is_lead
        )
        self.saved_version = self.version
        if self.ranks.is_lead:
            self.prune(keep_last=self.config.checkpoint.keep_last)

    def prune(self, *, keep_last: int) -> None:
        """On the lead."""
        prune_checkpoints(self.run_dir.checkpoints, keep_last=keep_last)
        self.line.checkpointed(list_versions(self.run_dir.checkpoints))

    def report(self, batch: Batch, values: dict[str, float], waited_for: str) -> None:
        self.clock.enter("log")
        self.reporter.step(
            batch.step,
            {**values, **self.outlet.metrics()},
            seconds=self.clock.take(),
            waited_for=waited_for,
        )

    def finish(self, end: End) -> int:
        """The run has ended: newest weights out, last checkpoint, export. A run that was stopped or
        has failed is not exported. Generators have heard of the end: published weights may go."""
        is_over = not (end.failed or end.stopped)
        self.clock.enter("drain")
        self.outlet.close(drain_s=DRAIN_S if is_over else 0.0)
        if self.saved_version != self.version:
            try:
                self.save()
            except OSError as error:  # a run that fails for want of space says so all the same
                if not end.failed:
                    raise
                log.warning("there is no checkpoint of version %d: %s", self.version, error)
        if is_over and self.config.checkpoint.export_hf:
            self.clock.enter("export")
            is_lead = self.ranks.is_lead
            export_policy(self.run_dir.final, self.policy, self.config.model, is_lead=is_lead)
        self.reporter.close()
        last = last_line(end, self.version)
        self.line.close(last)
        if self.ranks.is_lead:
            remove_whole(self.run_dir.weights(self.config))
            print(last, file=sys.stderr)
        return 1 if end.failed else 0


def _is_multiple(version: int, every: int) -> bool:
    return every > 0 and version % every == 0
