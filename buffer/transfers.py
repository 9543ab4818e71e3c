"""Offers and rosters: who is sent which weights by the collective transport.

The learner offers one version, the newest. Generators that lack it say that they are ready; those
that are ready when the learner asks are the roster of one broadcast, in a group of its own. Whoever
comes later is in the next roster, and a generator that broke a broadcast, by its silence or by an
error of its own, is sent weights alone until that went well. Nothing here is kept on disk: a
learner offers anew to a buffer that has restarted. Time is passed in, in seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.messages import OpenGroup, Outcome, Ready, Roster, RosterMember, Seat, Staged
from asyncrl.types import WeightId
from asyncrl.wire import Frame
from buffer.broadcast import Broadcast
from buffer.members import Member, Members
from buffer.suspects import Suspects

log = logging.getLogger(__name__)

JOIN_WINDOW_S = 0.5
"""A broadcast waits for so long after the first generator is ready for the others."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that the learner sends to whoever is ready for them."""

    weights: WeightId
    manifest: Frame


@dataclass(slots=True)
class _Candidate:
    devices: list[str]
    since: float


class Transfers:
    """The offer, who is ready for it, and the broadcast under way."""

    def __init__(self, members: Members) -> None:
        self.offer: Offer | None = None
        self._members = members
        self._followers: set[str] = set()
        """Generators that have asked for weights: they are waited for."""
        self._ready: dict[str, _Candidate] = {}
        self._refusals: dict[str, str] = {}
        """By generator, of this offer."""
        self._untold: dict[str, str] = {}
        """Refusals that the learner has not heard."""
        self._has: dict[str, WeightId] = {}
        """The newest that each generator has staged."""
        self._suspects = Suspects()
        self._broadcast: Broadcast | None = None
        self._last_number = 0
        self._last_asked: tuple[int, Roster] | None = None
        """The learner's last request that closed a roster, and the answer: it may be sent again."""

    def publish(self, weights: WeightId, manifest: Frame) -> None:
        """From now on these are offered; whoever was ready for others is not any more."""
        if self.offer is None or self.offer.weights != weights:
            self._forget_answers()
            if self._broadcast is not None and self._broadcast.place is None:
                self._broadcast = None  # the learner did not come to hear of this roster
        self.offer = Offer(weights, manifest)

    def withdraw(self) -> None:
        """The learner that offers is not the current one any more. Nobody is suspected of breaking
        broadcasts of the next one."""
        self.offer = self._broadcast = None
        self._suspects = Suspects()
        self._forget_answers()

    def newer(self, member: Member, have: WeightId) -> Offer | None:
        """The offer, if it is newer than what this generator has, and it can be sent it."""
        self._followers.add(member.name)
        is_newer = self.offer is not None and self.offer.weights > have
        is_refused = member.name in self._refusals
        return self.offer if is_newer and not is_refused and self._is_sender_there() else None

    def ready(self, member: Member, message: Ready, *, now: float) -> None:
        """It wants the offered weights, or refuses them."""
        if self.offer is None or self.offer.weights != WeightId(message.inc, message.version):
            return
        name = member.name
        if message.error:
            self._refusals[name] = self._untold[name] = message.error
        elif name not in self._ready and not self._sits(name):
            self._ready[name] = _Candidate(message.devices or ["cpu"], now)

    def seat(self, member: Member, weights: WeightId) -> Seat | None:
        """Where it meets the others; None: not yet."""
        broadcast, name = self._broadcast, member.name
        if broadcast is not None and broadcast.weights == weights and self._sits(name):
            return broadcast.seat(name)
        is_offered = self.offer is not None and self.offer.weights == weights
        is_offered = is_offered and self._is_sender_there()
        reason = self._refusals.get(name, "") if is_offered else ""
        return Seat(is_over=True, reason=reason) if not is_offered or reason else None

    def close_roster(self, weights: WeightId, *, request: int, now: float) -> Roster | None:
        """Who is sent `weights` now; None: nobody yet. `request` is the number of the learner's
        request: the same one gets the same roster, and one before it nothing."""
        if self._last_asked is not None and request <= self._last_asked[0]:
            last, roster = self._last_asked
            return roster if request == last else Roster(roster=0)
        if self.offer is None or self.offer.weights != weights:
            return Roster(roster=0, is_over=True)
        self._retire()
        names = self._choose(now)
        if not names and (not self._untold or self._trusted() or self._late()):
            return None
        refusals, self._untold = self._untold, {}
        roster = Roster(roster=0, refusals=refusals)
        if names:
            roster = self._begin(weights, names, refusals)
        self._last_asked = (request, roster)
        return roster

    def open(self, message: OpenGroup) -> bool:
        """The sender listens; False when this roster is not the current one."""
        if self._broadcast is None or self._broadcast.number != message.roster:
            return False
        self._broadcast.place = message
        for name, reason in message.refused.items():
            if self._broadcast.members.pop(name, None) is not None:
                self._refusals[name] = reason
        return True

    def staged(self, member: Member, message: Staged) -> None:
        """It has left the group, with or without the whole version."""
        weights, broadcast, name = self._weights(message), self._broadcast, member.name
        if not message.error:
            self._has[name] = max(weights, self._has.get(name, weights))
            self._suspects.went_well(name)
        if broadcast is None or broadcast.number != message.roster or not self._sits(name):
            return  # that it broke one, and was not heard of, is known
        if message.error:
            if not message.is_lost:
                self._suspects.broke(name)
            broadcast.failed[name] = message.error
            broadcast.has_culprit |= not message.is_lost
        else:
            broadcast.staged.append(name)

    def outcome(self, roster: int, *, has_ended: bool = False) -> tuple[Outcome, bool]:
        """What became of it so far, and whether that is all that will be heard. When the run
        `has_ended`, generators leave, and say nothing of weights any more."""
        broadcast = self._broadcast
        if broadcast is None or broadcast.number != roster:
            return Outcome(), True
        unreported = broadcast.unreported()
        missing = [name for name in unreported if self._is_alive(name) and not has_ended]
        why = "the run has ended" if has_ended else "it is dead or stopped"
        silent = dict.fromkeys(unreported, why)
        failed = broadcast.failed | {n: why for n, why in silent.items() if n not in missing}
        return Outcome(staged=broadcast.staged, failed=failed, missing=missing), not missing

    def _forget_answers(self) -> None:
        self._ready, self._refusals, self._untold = {}, {}, {}
        self._last_asked = None

    def _begin(self, weights: WeightId, names: list[str], refusals: dict[str, str]) -> Roster:
        self._last_number += 1
        taken = {name: self._ready.pop(name).devices for name in names}
        self._suspects.tried(names)
        self._broadcast = Broadcast(self._last_number, weights, taken)
        members = [RosterMember(name=name, devices=devices) for name, devices in taken.items()]
        return Roster(roster=self._last_number, members=members, refusals=refusals)

    def _choose(self, now: float) -> list[str]:
        """Nobody, as long as others are worth waiting for."""
        self._ready = {n: c for n, c in self._ready.items() if self._is_alive(n)}
        due, trusted = self._due(now), self._trusted()
        ready = [name for name in due if name in self._ready]
        if ready or not trusted:
            return self._suspects.together(ready)
        if now - min(self._ready[name].since for name in trusted) >= JOIN_WINDOW_S:
            self._suspects.stayed_away(due)
            return trusted
        return [] if due or self._late() else trusted

    def _trusted(self) -> list[str]:
        return [name for name in self._ready if name not in self._suspects]

    def _due(self, now: float) -> list[str]:
        """Suspects whose turn it is, ready or not."""
        followers = [m.name for m in self._members.alive() if m.name in self._followers]
        return self._suspects.due(
            [*self._ready, *self._lacking()],
            is_alone=all(name in self._suspects for name in followers),
            are_others_ready=bool(self._trusted()),
            now=now,
        )

    def _late(self) -> list[str]:
        return [name for name in self._lacking() if name not in self._suspects]

    def _lacking(self) -> list[str]:
        """Those who lack the offer and have yet to say that they are ready."""
        assert self.offer is not None
        return [
            m.name
            for m in self._members.alive()
            if m.name in self._followers
            and max(m.serving, self._has.get(m.name, m.serving)) < self.offer.weights
            and not {m.name} & (self._ready.keys() | self._refusals.keys())
        ]

    def _retire(self) -> None:
        """The learner goes on without those of the last roster that it has not heard from. Where
        it never came to listen, they are ready as before."""
        broadcast, self._broadcast = self._broadcast, None
        if broadcast is None:
            return
        if broadcast.place is not None:
            for name in broadcast.unreported():
                self._suspects.broke(name)
            for name in broadcast.members if broadcast.is_lost_by_all() else ():
                self._suspects.lost(name, is_alone=len(broadcast.members) == 1)
        elif self.offer is not None and self.offer.weights == broadcast.weights:
            for name in broadcast.unreported():
                self._ready[name] = _Candidate(broadcast.members[name], float("-inf"))
        known = self._members.by_name
        self._suspects.keep(known)
        self._followers &= known.keys()
        self._has = {name: weights for name, weights in self._has.items() if name in known}

    def _sits(self, name: str) -> bool:
        """It has a place in the broadcast under way, and has not left it."""
        broadcast = self._broadcast
        return (
            broadcast is not None and name in broadcast.members and not broadcast.has_reported(name)
        )

    def _is_sender_there(self) -> bool:
        return any(learner.alive for learner in self._members.learners())

    def _is_alive(self, name: str) -> bool:
        return any(member.alive for member in self._members.named(name))

    @staticmethod
    def _weights(message: Staged) -> WeightId:
        return WeightId(message.inc, message.version)
