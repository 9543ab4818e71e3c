"""Who is there: the processes that have said hello, and the signs of life of each.

A member is one life of a process. It may have several connections (heartbeats come over one of
their own), and a connection that breaks comes back under another identity, so the identities of
sockets lead to members and not the other way round. Time is passed in, in seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncrl.messages import Heartbeat, Hello, Leases
from asyncrl.types import WeightId

MISSED_HEARTBEATS = 3
"""A member that is silent for this many heartbeats is dead, or stopped."""

MAX_GONE = 32
"""Members that are dead or have left are forgotten when so many others went after them."""
MAX_CONNECTIONS = 8
"""Connections of one member that are known: each one that broke has left one behind."""

NO_WEIGHTS = WeightId(0, 0)
"""What everybody has from the start: version 0."""


@dataclass(slots=True)
class Member:
    """One process that has said hello."""

    name: str
    role: str
    host: str
    pid: int
    """0: not heard since this buffer started; it held leases before."""
    last_seen: float
    engine: str = ""
    """Generator: its engine and that one's release, as it said when it joined."""
    alive: bool = True
    is_gone: bool = False
    """It has left, or another learner has taken its place: nobody misses it."""
    state: str = "starting"
    state_since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, since the process started, as it said in its last heartbeat."""
    serving: WeightId = NO_WEIGHTS
    num_running: int = 0
    num_tokens: int = 0
    paused_s: float = 0.0
    is_done: bool = False
    """Learner: it has left with its last checkpoint and export written."""
    heard_end: bool = False
    """It was told that the run has ended."""
    num_overdue: int = 0
    """Leases that ran past their time since it last submitted a group."""
    lease_request: int = 0
    """Number of its last one."""
    leases: Leases | None = None
    """What it was given for that one, as long as it is there."""
    counted: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=12))
    """Recent (time, tokens so far)."""

    def __str__(self) -> str:
        where = f"pid {self.pid} on {self.host}" if self.pid else "not heard since the restart"
        return f"{self.name} ({where})"

    def condition(self, *, now: float) -> str:
        """What it does and when it was last heard, in words and seconds."""
        state_s, silent_s = now - self.state_since, now - self.last_seen
        if not self.alive and not self.is_gone:
            return f"has sent nothing for {silent_s:.0f} s, dead or stopped"
        if not self.alive:
            return f"{self.state} {state_s:.0f} s ago"
        return f"{self.state} for {state_s:.0f} s, last heard {silent_s:.0f} s ago"

    def enter(self, state: str, *, since: float) -> None:
        self.state, self.state_since = state, since

    def end(self, state: str, *, since: float) -> None:
        """It is not there any more."""
        self.alive, self.leases = False, None
        self.enter(state, since=since)

    @property
    def tokens_per_s(self) -> float:
        """Speed over the last heartbeats; 0 until there are two."""
        if len(self.counted) < 2 or not self.alive:
            return 0.0
        (start, before), (end, after) = self.counted[0], self.counted[-1]
        return (after - before) / (end - start) if end > start else 0.0


class Members:
    """All members, by connection and by name."""

    def __init__(self, *, heartbeat_s: float) -> None:
        self.heartbeat_s = heartbeat_s
        self.silence_s = MISSED_HEARTBEATS * heartbeat_s
        self.by_name: dict[str, Member] = {}
        self._by_peer: dict[bytes, Member] = {}
        self._returned: list[Member] = []

    def hello(self, peer: bytes, hello: Hello, *, now: float) -> Member:
        """Adds the connection `peer` to the member that it names."""
        member = self.by_name.get(hello.member)
        if member is None or member.pid == 0:
            member = Member(hello.member, hello.role, hello.host, hello.pid, now, state_since=now)
            self.by_name[hello.member] = member
        member.engine = hello.settings.get("engine", "")
        self._connect(peer, member)
        self._seen(member, now)
        return member

    def engine(self, *, besides: str = "") -> str:
        """What the generators that are there run; empty when there is none, `besides` aside."""
        there = [m.engine for m in self.alive() if m.engine and m.name != besides]
        return there[0] if there else ""

    def expect(self, name: str, *, now: float) -> None:
        """A generator that held leases before the buffer restarted: it may come back."""
        self.by_name.setdefault(name, Member(name, "generator", "", 0, now, state_since=now))

    def of(self, peer: bytes, *, now: float) -> Member | None:
        """Whose connection it is; None before hello, which is asked for again from those that were
        forgotten. Anything it sends is a sign of life."""
        member = self._by_peer.get(peer)
        if member is not None:
            self._seen(member, now)
        return member

    def heartbeat(self, member: Member, beat: Heartbeat, *, now: float) -> None:
        if member.is_gone:  # sent before it left
            return
        if beat.state != member.state or beat.state_s:
            member.enter(beat.state, since=now - beat.state_s)
        member.serving, member.seconds = WeightId(*beat.serving), beat.seconds
        member.num_running, member.paused_s = beat.num_running, beat.paused_s
        member.num_tokens = beat.num_tokens
        member.counted.append((now, beat.num_tokens))

    def leave(self, member: Member, *, now: float) -> None:
        """It said that it ends: it is not waited for, and not missed."""
        member.is_gone = member.heard_end = True
        member.end("left", since=now)

    def replace(self, name: str, successor: Member, *, now: float) -> None:
        """`successor` has taken over from the learner of this name, which may be itself."""
        for member in self.named(name):
            member.is_gone = True
            member.end("replaced", since=now)
        successor.alive, successor.is_gone = True, False
        if successor.state == "replaced":
            successor.enter("back", since=now)

    def newly_dead(self, *, now: float) -> list[Member]:
        """Members that have been silent for too long since the last call."""
        dead = [
            member
            for member in self.by_name.values()
            if member.alive and member.role != "monitor" and now - member.last_seen > self.silence_s
        ]
        for member in dead:
            member.end("dead", since=member.last_seen)
        self._forget(now)
        return dead

    def newly_back(self) -> list[Member]:
        """Members that were thought dead and have been heard since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def excuse(self, *, now: float) -> None:
        """This process itself stood still: nobody is dead for not having been heard."""
        for member in self.by_name.values():
            if member.alive:
                member.last_seen = now

    def excuse_silence(self, seconds: float, *, now: float) -> None:
        """Nobody could be heard for so long: that does not count as silence."""
        for member in self.by_name.values():
            if member.alive:
                member.last_seen = min(now, member.last_seen + seconds)

    def generators(self) -> list[Member]:
        return [member for member in self.by_name.values() if member.role == "generator"]

    def learners(self) -> list[Member]:
        """Learners that have neither left nor been replaced."""
        everybody = self.by_name.values()
        return [member for member in everybody if member.role == "learner" and not member.is_gone]

    def named(self, name: str) -> list[Member]:
        """The member of this name, if it is known."""
        return [self.by_name[name]] if name in self.by_name else []

    def alive(self) -> list[Member]:
        """Generators that are there."""
        return [member for member in self.generators() if member.alive]

    def tokens_per_s(self) -> float:
        """Speed of all generators together."""
        return sum(member.tokens_per_s for member in self.generators())

    def _forget(self, now: float) -> None:
        """Whoever only looked, and those that went long ago."""
        everybody = list(self.by_name.values())
        gone = sorted((m for m in everybody if not m.alive), key=lambda member: member.last_seen)
        monitors = [m for m in everybody if m.role == "monitor"]
        silent = [m for m in monitors if now - m.last_seen > self.silence_s]
        for member in [*gone[:-MAX_GONE], *silent]:
            del self.by_name[member.name]
            for peer in self._peers(member):
                del self._by_peer[peer]

    def _connect(self, peer: bytes, member: Member) -> None:
        self._by_peer.pop(peer, None)
        self._by_peer[peer] = member
        for old in self._peers(member)[:-MAX_CONNECTIONS]:
            del self._by_peer[old]

    def _peers(self, member: Member) -> list[bytes]:
        return [peer for peer, whose in self._by_peer.items() if whose is member]

    def _seen(self, member: Member, now: float) -> None:
        member.last_seen = now
        if not member.alive and not member.is_gone:
            member.alive = True
            member.enter("back", since=now)
            if member.role != "monitor":
                self._returned.append(member)
