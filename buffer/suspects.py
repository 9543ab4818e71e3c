"""Generators that broke a broadcast, or may have: these are sent weights in ever smaller rosters
until one goes well, those alone, and the more rarely the more they break."""

from __future__ import annotations

from collections.abc import Collection, Container

PATIENCE_S = (10.0, 640.0)
"""A suspect is passed over for others for so long, and twice as long each time that it breaks
another broadcast, up to a most: others lose little to it, and it is sent weights all the same."""


class Suspects:
    """By name. Whoever gets a whole version is none any more."""

    def __init__(self) -> None:
        self._broken: dict[str, int] = {}
        """Broadcasts in a row that each of them broke; 0 for one that is only doubted."""
        self._passed_over: dict[str, float] = {}
        """Since when one that lacks weights waits for its turn."""

    def __contains__(self, name: str) -> bool:
        return name in self._broken

    def broke(self, name: str) -> None:
        self._broken[name] = self._broken.get(name, 0) + 1

    def lost(self, name: str, *, is_alone: bool) -> None:
        """It was in a broadcast that was lost by nobody's fault, as far as anybody knows: each of
        its members is doubted, until it is in one that goes well."""
        if is_alone:
            self.broke(name)
        else:
            self._broken.setdefault(name, 0)

    def went_well(self, name: str) -> None:
        self._broken.pop(name, None)

    def tried(self, names: Collection[str]) -> None:
        """They are in a broadcast."""
        for name in names:
            self._passed_over.pop(name, None)

    def stayed_away(self, names: Collection[str]) -> None:
        """It was their turn, and they did not come: they wait for another one."""
        for name in names:
            self._broken[name] = max(1, self._broken[name])
        self.tried(names)

    def keep(self, names: Container[str]) -> None:
        """Nobody else is known any more."""
        self._broken = {name: n for name, n in self._broken.items() if name in names}
        self._passed_over = {n: since for n, since in self._passed_over.items() if n in names}

    def due(
        self, names: Collection[str], *, is_alone: bool, are_others_ready: bool, now: float
    ) -> list[str]:
        """Those of `names` whose turn it is: they are only doubted, or alone (nobody else is sent
        weights), or it is their first try again and nobody else is ready, or they were passed over
        for long enough. Whoever waits for longest is first."""
        due = []
        for name in names:
            if name not in self._broken:
                continue
            waited_s = now - self._passed_over.setdefault(name, now)
            num_broken = self._broken[name]
            is_first_try = num_broken == 1 and not are_others_ready
            if num_broken == 0 or is_alone or is_first_try or waited_s >= self._patience_s(name):
                due.append(name)
        return sorted(due, key=self._passed_over.__getitem__)

    def together(self, due: list[str]) -> list[str]:
        """Which of these, whose turn it is, are sent weights in one broadcast. Of those that are
        only doubted it is half, so that few broadcasts tell which of them it was; any other
        goes alone."""
        doubted = [name for name in due if self._broken[name] == 0]
        return doubted[: max(1, len(doubted) // 2)] or due[:1]

    def _patience_s(self, name: str) -> float:
        first, longest = PATIENCE_S
        return min(first * 2.0 ** min(self._broken[name] - 1, 16), longest)
