"""Leases that are their generators' no longer, until those have heard of it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from asyncrl.types import GroupId


class LeaseId(NamedTuple):
    """One attempt at a group, by one generator."""

    group: GroupId
    attempt: int
    member: str


class VoidLeases:
    """Those that were taken from each generator since it last asked."""

    def __init__(self) -> None:
        self._by_member: dict[str, list[LeaseId]] = {}

    def add(self, lease: LeaseId) -> None:
        self._by_member.setdefault(lease.member, []).append(lease)

    def take(self, member: str) -> list[LeaseId]:
        """What this generator has not been told yet."""
        return self._by_member.pop(member, [])

    def forget_others(self, there: Collection[str]) -> None:
        """Keeps those of the generators that are `there`. One that comes back hears with its first
        heartbeat what it holds and must not."""
        for member in self._by_member.keys() - set(there):
            del self._by_member[member]
