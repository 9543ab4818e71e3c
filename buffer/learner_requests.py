"""What the learner asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from asyncrl import transport
from asyncrl.journal.segments import DamagedError
from asyncrl.messages import (
    Batch,
    Checkpointed,
    Commit,
    Committed,
    End,
    Fetch,
    Message,
    Ok,
    Record,
    Refused,
    Register,
    Registered,
    Waiting,
)
from asyncrl.wire import Frame, Packet
from buffer.changes import Changes, Handler
from buffer.evaluation import Evaluations
from buffer.groups import Group
from buffer.members import Member
from buffer.run import AssignedBatch, Run
from buffer.updates import Updates

log = logging.getLogger(__name__)

SAY_WAITING_S = 30.0
"""A wait for a batch that lasts longer than this is said in the log, and then as often."""


class LearnerRequests:
    """One method for each request of the learner, in `handlers`."""

    def __init__(self, run: Run, changes: Changes) -> None:
        self._run = run
        self._changes = changes
        self._mail = RecordMail(run.books.evaluations, run.books.updates)
        self._said_waiting = 0.0
        self.handlers: Mapping[type[Message], Handler] = {
            Register: self._register,
            Fetch: self._fetch,
            Commit: self._commit,
            Checkpointed: self._checkpointed,
        }

    async def _register(self, member: Member, packet: Packet, message: Register) -> Message:
        training = self._run.books.training
        refused = self._run.register(message, member, now=time.monotonic())
        if refused is not None:
            return refused
        self._mail.new_reader(since_step=message.checkpoint_version)
        registered = Registered(inc=training.inc, committed=training.committed)
        await self._changes.save()
        log.info(
            "learner number %d: %s at version %d, %d is the highest committed",
            *(registered.inc, member.name, message.checkpoint_version, registered.committed),
        )
        return registered

    async def _fetch(self, member: Member, packet: Packet, fetch: Fetch) -> transport.Reply:
        """The batch, the end, or after a while what is waited for."""
        self._mail.asked(packet.id)

        def look(now: float) -> AssignedBatch | Refused | End | None:
            refused = self._run.books.training.fenced(fetch.inc) or self._run.why_not(fetch.step)
            if refused is not None:
                return refused
            found = self._run.batch(fetch.step, now=now)
            return found or self._run.end

        found = look(time.monotonic())
        if found is None:
            self._note_waiting(fetch.step)
            found = await self._changes.until("batch", look)
        await self._changes.save()
        if isinstance(found, Refused):
            return found
        if isinstance(found, AssignedBatch):
            reply = await self._batch(found)
            if not isinstance(reply, End):
                return reply
            found = reply
        if isinstance(found, End):
            member.heard_end, self._run.books.training.end_step = True, fetch.step
            self._run.books.updates.settle_all()
            return found.model_copy(update={"records": self._mail.take()})
        reason = self._note_waiting(fetch.step)
        return Waiting(
            step=fetch.step,
            reason=reason,
            checkpoint=self._run.books.room.needs_checkpoint(),
            records=self._mail.take(),
        )

    async def _batch(self, batch: AssignedBatch) -> transport.Reply:
        """With its groups; or the end, where the journal is damaged."""
        groups = [group for group in batch.groups if group.payload is not None]
        if len(groups) != batch.step.num_groups:
            raise RuntimeError(f"{len(groups)} payloads are there for {batch.step}")
        try:
            frames = await asyncio.to_thread(lambda: tuple(map(self._read, groups)))
        except DamagedError as error:
            refused = self._run.why_not(batch.step.step)
            if refused is not None:  # deleted while it was read: the checkpoints are newer
                return refused
            self._run.ending.give_up(str(error))
            await self._changes.save()
            assert self._run.end is not None
            return self._run.end
        record = Record.model_validate_json(batch.step.record)
        message = Batch(
            step=batch.step.step,
            max_staleness=batch.step.max_staleness,
            replayed=batch.replayed,
            waited_for=batch.step.waited_for,
            records=[record, *self._mail.take()],
        )
        return message, frames

    def _read(self, group: Group) -> Frame:
        assert group.payload is not None
        try:
            return self._run.books.journal.read(group.payload)
        except DamagedError as error:
            raise DamagedError(
                f"group {group.id} of step {group.step} cannot be read: {error}. The batch of a "
                "step is never changed, so this run cannot go on from here: take another run_name, "
                "and a checkpoint of this run as checkpoint.resume"
            ) from None

    def _note_waiting(self, step: int) -> str:
        now = time.monotonic()
        reason, waited_s = self._run.note_waiting(step, now=now)
        if waited_s > SAY_WAITING_S and now - self._said_waiting > SAY_WAITING_S:
            self._said_waiting = now
            log.warning("step %d is waited for since %.0f s: %s", step, waited_s, reason)
        return reason

    async def _commit(self, member: Member, packet: Packet, message: Commit) -> Message:
        refused = self._run.commit(message, now=time.monotonic())
        await self._changes.save()
        end = self._run.end
        return refused or Committed(
            stop=end is not None and end.stopped,
            checkpoint=self._run.books.room.wants_checkpoint(),
        )

    async def _checkpointed(self, member: Member, packet: Packet, message: Checkpointed) -> Message:
        refused = self._run.books.training.checkpointed(message)
        await self._changes.save()
        await asyncio.wrap_future(self._run.books.room.retain())
        await self._changes.save()  # wakes those who wait for the room
        return refused or Ok()


class RecordMail:
    """Takes records of evaluations and of weight updates to the learner, which writes them down:
    each one once, evaluations of steps that are trained again once more; with every reply until
    the next request shows that a reply has arrived."""

    def __init__(self, evaluations: Evaluations, updates: Updates) -> None:
        self._evaluations = evaluations
        self._updates = updates
        self._num_updates_sent = 0
        self._next = self._sent = evaluations.num_told
        self._request = -1

    def new_reader(self, *, since_step: int) -> None:
        """A learner has registered at version `since_step`."""
        known = self._evaluations.results[: self._evaluations.num_told]
        self._next = self._sent = sum(record.step < since_step for record in known)
        self._request, self._num_updates_sent = -1, 0

    def asked(self, request: int) -> None:
        """A request has come; if it is a new one, the reply to the one before has arrived."""
        if request != self._request:
            self._request, self._next = request, self._sent
            self._evaluations.num_told = max(self._evaluations.num_told, self._sent)
            del self._updates.unread[: self._num_updates_sent]
            self._num_updates_sent = 0

    def take(self) -> list[Record]:
        """What rides on the next reply."""
        results, updates = self._evaluations.results, self._updates.unread
        self._sent, self._num_updates_sent = len(results), len(updates)
        return results[self._next :] + updates
