"""What learner and generators ask about weights: publications, offers, rosters."""

from __future__ import annotations

import time
from collections.abc import Mapping

from asyncrl import transport
from asyncrl.messages import (
    AwaitStaged,
    CloseRoster,
    Message,
    Ok,
    OpenGroup,
    Published,
    Ready,
    Refused,
    Roster,
    Seat,
    Served,
    Staged,
    WatchWeights,
    Weights,
)
from asyncrl.types import WeightId
from asyncrl.wire import Packet
from buffer.changes import Changes, Handler
from buffer.members import Member
from buffer.run import Run
from buffer.transfers import Transfers

LOOK_S = 0.1
"""A roster also closes by time alone."""


class WeightsRequests:
    """One method for each request, in `of_generators` and `of_learner`."""

    def __init__(self, run: Run, changes: Changes) -> None:
        self._run = run
        self._changes = changes
        self._transfers: Transfers = run.transfers
        self.of_generators: Mapping[type[Message], Handler] = {
            WatchWeights: self._watch,
            Ready: self._ready,
            Staged: self._staged,
            Served: self._served,
        }
        self.of_learner: Mapping[type[Message], Handler] = {
            Published: self._published,
            CloseRoster: self._close_roster,
            OpenGroup: self._open_group,
            AwaitStaged: self._await_staged,
        }

    async def _watch(self, member: Member, packet: Packet, watch: WatchWeights) -> transport.Reply:
        have = WeightId(*watch.have)
        self._run.books.updates.asked(member.name, have, now=time.monotonic())
        return (
            await self._changes.until("weights", lambda now: self._newer(member, have))
            or self._nothing_newer()
        )

    def _newer(self, member: Member, have: WeightId) -> transport.Reply:
        offer = self._transfers.newer(member, have)
        if offer is not None:
            inc, version = offer.weights
            return Weights(inc=inc, version=version, transport="collective"), (offer.manifest,)
        newest = self._run.books.training.newest
        if not newest.location or WeightId(newest.inc, newest.version) <= have:
            return None
        return Weights(
            inc=newest.inc, version=newest.version, transport="disk", location=newest.location
        )

    def _nothing_newer(self) -> Weights:
        newest = self._run.books.training.newest
        return Weights(inc=newest.inc, version=newest.version, transport="none")

    async def _ready(self, member: Member, packet: Packet, message: Ready) -> Seat:
        self._transfers.ready(member, message, now=time.monotonic())
        self._changes.note("weights")
        weights = WeightId(message.inc, message.version)
        seat = await self._changes.until(
            "weights", lambda now: self._transfers.seat(member, weights)
        )
        return seat or Seat()

    async def _staged(self, member: Member, packet: Packet, message: Staged) -> Ok:
        self._transfers.staged(member, message)
        self._changes.note("weights")
        return Ok()

    async def _served(self, member: Member, packet: Packet, message: Served) -> Ok:
        member.serving = WeightId(message.inc, message.version)
        self._run.books.updates.served(member.name, message, now=time.monotonic())
        self._changes.note("weights", "lease")
        return Ok()

    async def _published(self, member: Member, packet: Packet, message: Published) -> Message:
        training = self._run.books.training
        if message.transport == "collective" and not packet.frames:
            return Refused(code="invalid", reason="weights to be sent came without their manifest")
        weights, refused = WeightId(message.inc, message.version), training.published(message)
        if refused is None:
            self._run.books.updates.published(weights, now=time.monotonic())
            if message.transport == "collective":
                self._transfers.publish(weights, packet.frames[0])
        await self._changes.save()
        return refused or Ok()

    async def _close_roster(self, member: Member, packet: Packet, message: CloseRoster) -> Message:
        weights = WeightId(message.inc, message.version)

        def look(now: float) -> Message | None:
            return self._run.books.training.fenced(message.inc) or self._transfers.close_roster(
                weights, request=packet.id, now=now
            )

        return await self._changes.until("weights", look, every_s=LOOK_S) or Roster(roster=0)

    async def _open_group(self, member: Member, packet: Packet, message: OpenGroup) -> Message:
        refused = self._run.books.training.fenced(message.inc)
        if refused is None and not self._transfers.open(message):
            refused = Refused(code="invalid", reason=f"roster {message.roster} is not the last one")
        self._changes.note("weights")
        return refused or Ok()

    async def _await_staged(self, member: Member, packet: Packet, message: AwaitStaged) -> Message:
        ends = time.monotonic() + message.wait_s

        def look(now: float) -> Message | None:
            refused = self._run.books.training.fenced(message.inc)
            has_ended = self._run.end is not None
            outcome, is_complete = self._transfers.outcome(message.roster, has_ended=has_ended)
            return refused or (outcome if is_complete or now >= ends else None)

        found = await self._changes.until("weights", look, every_s=LOOK_S)
        return found or self._transfers.outcome(message.roster)[0]
