"""Arithmetic of policy versions and seeds: pure integers, no clock and no state.

Step s turns version s into s + 1. The staleness of a token trained in step s is s - its version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def last_step(version: int, max_staleness: int) -> int:
    """The last step that may train tokens sampled by `version` (the deadline of rule H)."""
    return version + max_staleness


def oldest_trainable(step: int, max_staleness: int) -> int:
    """The oldest version whose tokens step `step` may still train: the inverse of `last_step`."""
    return max(0, step - last_step(0, max_staleness))


def staleness(step: int, version: int) -> int:
    """Age, in versions, that tokens of `version` have when step `step` trains them."""
    return step - version


def meets_rule_h(deadlines: Iterable[int], *, next_pick: int, groups_per_step: int) -> bool:
    """Rule H: the outstanding groups, in order of deadline, all reach a step in time.

    `deadlines` are the last steps at which each outstanding group may be trained, in any order.
    `next_pick` is n = a * B + p, the number of groups assigned so far. The j-th group in deadline
    order is trained at step floor((n + j) / B) at the latest.
    """
    ordered = sorted(deadlines)
    return all((next_pick + j) // groups_per_step <= d for j, d in enumerate(ordered))


def sample_seed(run_seed: int, kind: str, epoch: int, position: int, sample: int, k: int) -> int:
    """Seed of one sample, the same on every generator: 63 bits, from a hash of its names.

    `k` rises only after a failure that the content caused, so that a group leased a second time
    because a machine died gives the same samples.
    """
    names = f"{run_seed}|{kind}|{epoch}|{position}|{sample}|{k}"
    digest = hashlib.blake2b(names.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
