"""Signs of life and the lack of them: who is there, whose leases pass on, whether the run gets on.

Time is passed in, in seconds of a monotonic clock.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import socket
import sys
from typing import Any, Literal

from asyncrl.config import Config
from asyncrl.messages import Heartbeat, Leave
from asyncrl.types import GroupId
from buffer.books import Books
from buffer.history import History
from buffer.leases import LeaseClocks, Suspension
from buffer.lives import time_values
from buffer.loop_clock import LoopClock
from buffer.members import Member, Members
from buffer.waiting import Waits, stall_reason

log = logging.getLogger(__name__)

WARN_SHARE = 0.1
"""A stall is told in the log after this share of the time that ends the run..."""
MIN_WARN_S = 30.0
"""...but not sooner than this."""


class Watch:
    """Everything about a run that the clock or a member's silence can change."""

    def __init__(self, config: Config, books: Books, *, now: float) -> None:
        lease_timeout_s, heartbeat_s = config.buffer.lease_timeout_s, config.network.heartbeat_s
        self._evaluations = books.evaluations
        self.members = Members(heartbeat_s=heartbeat_s)
        self.leases = LeaseClocks(books.ledger, lease_timeout_s=lease_timeout_s)
        self.suspension = Suspension(self.members, lease_timeout_s=lease_timeout_s)
        self.watchdog = Watchdog(config.network.stall_timeout_s, now=now)
        self.history = History(interval_s=heartbeat_s, wall_offset=books.wall_offset)
        self.waiting = Waits(books, self.leases, self.members, now=now)
        self._clock: LoopClock | None = None
        self.buffer: Member | None = None
        """The buffer itself, once it knows its own time."""
        for group in books.ledger.groups.leased():
            self.members.expect(group.member, now=now)

    def know_own_time(self, clock: LoopClock, *, now: float) -> None:
        """From now on the history tells of the buffer itself too; `clock` is that of its loop."""
        name = f"buffer-{secrets.token_hex(2)}"
        self.buffer = Member(name, "buffer", socket.gethostname(), os.getpid(), now)
        self._clock = clock

    def look_at_own_time(self, *, now: float) -> None:
        """A heartbeat of the buffer itself."""
        if self.buffer is not None and self._clock is not None:
            self.buffer.state, self.buffer.last_seen = self._clock.phases.phase, now
            self.buffer.seconds = self._clock.phases.total()
            self.history.heard(self.buffer, now=now)

    def take_lag(self) -> dict[str, float]:
        """The longest time that the buffer's loop did not get to run since the last call, if the
        loop is known; for the record of a step."""
        if self._clock is None:
            return {}
        return {"loop_lag_ms": round(1000 * self._clock.take_lag_s(), 1)}

    def note_last(self, *, now: float) -> None:
        """The buffer ends: what all have said last is kept. Who has heard of the end has left."""
        self.look_at_own_time(now=now)
        for member in self._everybody():
            if member.heard_end and member.alive:
                self.members.leave(member, now=member.last_seen)
        self.history.note_last(self._everybody())

    def time_values(self, *, now: float) -> list[dict[str, Any]]:
        """Where the time of each process went; `time` of the status."""
        self.look_at_own_time(now=now)
        there = [member for member in self._everybody() if member.alive]
        rows = self.history.up_to_now(there)
        return time_values(rows, now=self.history.wall(now))

    def _everybody(self) -> list[Member]:
        members = [m for m in self.members.by_name.values() if m.role != "monitor"]
        return [*members, *([self.buffer] if self.buffer else [])]

    def heartbeat(self, member: Member, beat: Heartbeat, *, now: float) -> None:
        self.members.heartbeat(member, beat, now=now)
        if not member.is_gone:
            self.history.heard(member, now=now)
        held = [(GroupId(*lease[:2]), lease[2]) for lease in beat.held if len(lease) == 3]
        self.leases.reconcile(member.name, held, now=now)

    def leave(self, member: Member, leave: Leave, *, now: float) -> None:
        """A member ends: its leases pass on at once."""
        self.members.leave(member, now=now)
        member.is_done = leave.is_done
        num_leases = self._pass_on(member, now)
        log.info("%s has left (%s): %d of its leases pass on", member, leave.reason, num_leases)

    def look_for_members(self, *, now: float) -> None:
        """Who has gone silent, and who is back."""
        for member in self.members.newly_back():
            log.info("%s is back", member)
        for member in self.members.newly_dead(now=now):
            num_leases = self._pass_on(member, now)
            after = f"{num_leases} of its leases pass on"
            if member.role == "learner":
                after = (
                    "generators go on as far as max_staleness allows; it may come back, or "
                    "another learner take over"
                )
            silent_s = now - member.last_seen
            log.warning(
                "%s has sent nothing for %.1f s: dead or stopped; %s", member, silent_s, after
            )
        self.leases.forget_void(self.members.alive())
        self.history.forget_others({member.name for member in self._everybody()})

    def why_stalled(self, *, now: float) -> str | None:
        """Why the run is to be given up, all stacks being in the log by then; or None."""
        found, still_s = self.watchdog.look(now=now), self.watchdog.still_s(now=now)
        if found == "warn":
            log.warning(
                "nothing has got on for %.0f s, after %g s the run is given up. Waiting for %s",
                *(still_s, self.watchdog.timeout_s, self.waiting.text(now=now)),
            )
        if found != "stalled":
            return None
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        return stall_reason(self.waiting, self.members, still_s=still_s, now=now)

    def excuse(self, seconds: float, *, now: float) -> None:
        """This process itself stood still for so long: no other is to blame for it."""
        self.members.excuse(now=now)
        self.leases.excuse(seconds)
        self._evaluations.excuse(seconds)
        self.watchdog.excuse(seconds)

    def excuse_silence(self, seconds: float, *, now: float) -> None:
        """Nothing was read for so long: what others sent is still to come. The watchdog counts that
        time, as the run has not got on in it."""
        self.members.excuse_silence(seconds, now=now)
        self.leases.excuse(seconds)
        self._evaluations.excuse(seconds)

    def _pass_on(self, member: Member, now: float) -> int:
        """What a member held that is no longer there; returns how many leases."""
        self.history.note(member, now=now)
        self._evaluations.release_member(member.name)
        return self.leases.release_member(member.name, reason=f"{member.name} is {member.state}")


class Watchdog:
    """Notices when nothing has got on for too long.

    The run gets on when a group or evaluation row comes in, a batch is assigned, a version is
    committed (a replayed one too), or a learner registers.
    """

    def __init__(self, timeout_s: float, *, now: float) -> None:
        self.timeout_s = timeout_s
        self._warn_s = max(MIN_WARN_S, WARN_SHARE * timeout_s)
        self._last = now
        self._has_warned = False

    def got_on(self, *, now: float) -> None:
        self._last, self._has_warned = now, False

    def excuse(self, seconds: float) -> None:
        """The buffer itself stood still for so long."""
        self._last += seconds

    def still_s(self, *, now: float) -> float:
        """For how long nothing has got on."""
        return now - self._last

    def look(self, *, now: float) -> Literal["fine", "warn", "stalled"]:
        """`warn` once for each stall; `stalled` when the run is to end."""
        still_s = self.still_s(now=now)
        if still_s > self.timeout_s:
            return "stalled"
        if still_s > self._warn_s and not self._has_warned:
            self._has_warned = True
            return "warn"
        return "fine"
