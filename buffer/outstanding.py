"""The outstanding groups: admitted, in no batch yet, and without a fate. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Place:
    """Where one outstanding group stands."""

    version: int | None = None
    """That of its oldest token; before it has one, the min_version of its lease. None as long as
    nobody generates it."""
    finished: bool = False
    blank: bool = False
    """Finished with nothing to train: it takes a place in its batch and no more."""


_WAITING = Place()


class Outstanding:
    """Groups by admission number, in that order; and how many are in flight or finished by version.

    An unknown number raises RuntimeError.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._order = sorted(numbers)
        self._places = dict.fromkeys(self._order, _WAITING)
        self.flying: Counter[int] = Counter()
        """Groups that are leased and not finished, by version."""
        self.finished: Counter[int] = Counter()
        """Finished groups by version, blank ones included."""
        self.num_blank = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    @property
    def numbers(self) -> tuple[int, ...]:
        """All, in order of admission."""
        return tuple(self._order)

    @property
    def first(self) -> int:
        """The one that was admitted first; there must be one."""
        return self._order[0]

    def place(self, number: int) -> Place:
        if number not in self._places:
            raise RuntimeError(f"group number {number} is not outstanding")
        return self._places[number]

    def index(self, number: int) -> int:
        """How many were admitted before it."""
        self.place(number)
        return bisect_left(self._order, number)

    def heads(self, count: int, *, without: Collection[int] = ()) -> list[int]:
        """The first `count` (or all that there are), leaving some out."""
        if not without:
            return self._order[:count]
        return list(islice((n for n in self._order if n not in without), count))

    def add(self, number: int) -> None:
        """One that is admitted after all others."""
        self._order.append(number)
        self._places[number] = _WAITING

    def put(self, number: int, place: Place) -> None:
        """It stands elsewhere from now on."""
        self._count(self.place(number), -1)
        self._places[number] = place
        self._count(place, +1)

    def release(self, number: int) -> None:
        """Nobody generates it any more."""
        self.put(number, _WAITING)

    def remove(self, number: int) -> None:
        self.release(number)
        del self._order[self.index(number)]
        del self._places[number]

    def finished_by_age(self) -> list[int]:
        """Finished groups: the oldest version first, then in order of admission."""
        found = [
            (place.version or 0, number) for number, place in self._places.items() if place.finished
        ]
        return [number for _, number in sorted(found)]

    def flying_until(self, version: int) -> list[int]:
        """Groups in flight whose version is this one or an older one."""
        return [
            number
            for number, place in self._places.items()
            if not place.finished and place.version is not None and place.version <= version
        ]

    def _count(self, place: Place, change: int) -> None:
        if place.version is None:
            return
        self.num_blank += change * place.blank
        counts = self.finished if place.finished else self.flying
        counts[place.version] += change
        if not counts[place.version]:
            del counts[place.version]
