"""Arithmetic of policy versions and seeds: pure integers, no clock and no state.

Step s turns version s into s + 1. The staleness of a token trained in step s is s - its version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping


def last_step(version: int, max_staleness: int) -> int:
    """The last step that may train tokens sampled by `version` (the deadline of rule H)."""
    return version + max_staleness


def oldest_trainable(step: int, max_staleness: int) -> int:
    """The oldest version whose tokens step `step` may still train: the inverse of `last_step`."""
    return max(0, step - last_step(0, max_staleness))


def bound_in_words(*, max_staleness: int, groups_per_step: int, group_size: int, order: str) -> str:
    """The worst case of a run: how much is ahead of the learner, and how old it may become."""
    num_groups = (max_staleness + 1) * groups_per_step
    ahead = f"{num_groups} prompts ({num_groups * group_size} responses)"
    if max_staleness == 0:
        return f"max_staleness 0: lock-step, at most {ahead} at once, no token older than its step"
    age = "1 version" if max_staleness == 1 else f"{max_staleness} versions"
    return (
        f"max_staleness {max_staleness}, order {order}: at most {ahead} are out or waiting to be "
        f"trained, no token is more than {age} old when it is trained"
    )


def staleness(step: int, version: int) -> int:
    """Age, in versions, that tokens of `version` have when step `step` trains them."""
    return step - version


def room_left(
    begun: Mapping[int, int], *, next_pick: int, groups_per_step: int, max_staleness: int
) -> Iterator[tuple[int, int]]:
    """For each version of `begun`, in order: how many more groups of it or older ones there may be.

    `begun` has the number of groups in flight or finished by version; `next_pick` is n, the number
    of groups assigned so far. Up to and including step d, (d + 1) * B groups are trained in all, so
    n and those that no step after d may train must not be more. Rule H: none is negative.
    """
    num_due = next_pick
    for version in sorted(begun):
        num_due += begun[version]
        room = (last_step(version, max_staleness) + 1) * groups_per_step
        yield version, room - num_due


def sample_seed(run_seed: int, kind: str, epoch: int, position: int, sample: int, k: int) -> int:
    """Seed of one sample, the same on every generator: 63 bits, from a hash of its names.

    `k` rises only after a failure that the content caused, so that a group leased a second time
    because a machine died gives the same samples.
    """
    names = f"{run_seed}|{kind}|{epoch}|{position}|{sample}|{k}"
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
