"""Which rollouts a report shows: the best, the worst, the oldest, and what was not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from asyncrl.journal.tables import GroupRow
from asyncrl.report.reading import RunRecords
from asyncrl.report.rollouts import Decode, ShownGroup, ShownRollout, show, text_decoder

RECENT = 200
"""Only the newest groups of each kind are looked at: a long run has a great many."""
EACH = 2


class Sample(NamedTuple):
    """One response worth looking at, and why."""

    title: str
    group: ShownGroup
    rollout: ShownRollout | None
    """None: the group never had one, or it is deleted."""


def choose(run: RunRecords) -> list[Sample]:
    """A few samples of each kind that the run has."""
    text = text_decoder(run)
    return [*_trained(run, text), *_untrained(run, text)]


def _trained(run: RunRecords, text: Decode) -> Iterator[Sample]:
    groups = _shown(run, text, [g for g in run.groups if g.step is not None])
    pairs = [(g, r) for g in groups for r in g.rollouts if r.reward is not None]
    ranked: list[tuple[str, Callable[[tuple[ShownGroup, ShownRollout]], float]]] = [
        ("best of the last steps", lambda pair: -(pair[1].reward or 0.0)),
        ("worst of the last steps", lambda pair: pair[1].reward or 0.0),
        ("oldest of the last steps", lambda pair: -(pair[0].staleness or 0)),
    ]
    for title, key in ranked:
        seen: set[str] = set()
        for group, rollout in sorted(pairs, key=key):
            if group.group not in seen and len(seen) < EACH:
                seen.add(group.group)
                yield Sample(title, group, rollout)


def _untrained(run: RunRecords, text: Decode) -> Iterator[Sample]:
    kinds: dict[tuple[str, str], list[GroupRow]] = {}
    for row in run.groups:
        if row.step is None and row.reason:
            kinds.setdefault((row.state, row.reason), []).append(row)
    for (state, reason), rows in sorted(kinds.items(), key=lambda item: -len(item[1]))[:4]:
        for group in _shown(run, text, rows[-EACH:]):
            rollout = group.rollouts[0] if group.rollouts else None
            yield Sample(f"{state}: {reason}", group, rollout)


def _shown(run: RunRecords, text: Decode, rows: Sequence[GroupRow]) -> list[ShownGroup]:
    newest = sorted(rows, key=lambda row: (row.step if row.step is not None else -1, row.number))
    return [show(run, row, text) for row in reversed(newest[-RECENT:])]
