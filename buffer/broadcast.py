"""One broadcast of weights as the buffer knows it: who is in it, where they meet, who is done."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.messages import OpenGroup, Seat
from asyncrl.types import WeightId


@dataclass(slots=True)
class Broadcast:
    """One roster, from its closing until the next one is closed."""

    number: int
    weights: WeightId
    members: dict[str, list[str]]
    """Devices by generator, in the order of their ranks."""
    place: OpenGroup | None = None
    staged: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    has_culprit: bool = False
    """One of those that failed did so by an error of its own."""

    def has_reported(self, name: str) -> bool:
        return name in self.staged or name in self.failed

    def unreported(self) -> list[str]:
        return [name for name in self.members if not self.has_reported(name)]

    def is_lost_by_all(self) -> bool:
        """Nobody has got the version, everybody says so, and nobody owns up: one of them may be
        unable to reach another."""
        return not (self.staged or self.unreported() or self.has_culprit)

    def seat(self, name: str) -> Seat | None:
        """None before the sender listens."""
        if self.place is None:
            return None
        names = list(self.members)
        before = names[: names.index(name)]
        return Seat(
            roster=self.number,
            host=self.place.host,
            port=self.place.port,
            backend=self.place.backend,
            bucket_bytes=self.place.bucket_bytes,
            rank=1 + sum(len(self.members[other]) for other in before),
            size=1 + sum(map(len, self.members.values())),
        )
