"""Groups with their text and fate, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.journal.tables import GroupRow
from asyncrl.report.reading import RunRecords
from asyncrl.types import Rollout, RolloutGroup
from asyncrl.versions import staleness
from asyncrl.wire import decode_group

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """One response."""

    text: str
    reward: float | None
    reward_parts: dict[str, float]
    finish_reason: str
    num_tokens: int
    versions: dict[int, int]
    """Tokens that each version sampled, oldest first."""


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """One prompt group: what was asked and answered, and what became of it."""

    group: str
    """EPOCH/POSITION."""
    fate: str
    reason: str
    step: int | None
    staleness: int | None
    """In its step: that of its oldest token."""
    generator: str
    attempt: int
    prompt: str
    rollouts: tuple[ShownRollout, ...]
    note: str
    """Why there is no text; empty where there is."""

    @property
    def reward_mean(self) -> float | None:
        """Of the scored responses; None where there are none."""
        rewards = [r.reward for r in self.rollouts if r.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None


def show(run: RunRecords, row: GroupRow, text: Decode) -> ShownGroup:
    """A group with its rollouts, as far as they are stored. `text` turns token ids into text."""
    group, note = _stored(run, row)
    is_trained = row.step is not None and row.version is not None
    return ShownGroup(
        group=f"{row.epoch}/{row.position}",
        fate=row.state,
        reason=row.reason,
        step=row.step,
        staleness=staleness(row.step, row.version) if is_trained else None,  # type: ignore[arg-type]
        generator=row.member,
        attempt=row.attempt if row.accepted_attempt is None else row.accepted_attempt,
        prompt=text(group.prompt_ids.tolist()) if group else "",
        rollouts=tuple(_rollout(r, text) for r in group.rollouts) if group else (),
        note=note,
    )


def text_decoder(run: RunRecords) -> Decode:
    """Token ids to text by the tokenizer of the run's model; without it, the ids themselves."""
    found = find_decoder(run.setting("model.path"))
    return found or (lambda ids: "ids " + " ".join(map(str, ids)))


def find_decoder(model: str | None) -> Decode | None:
    """Token ids to text, special tokens included; None where this model directory has no
    tokenizer.json."""
    file = Path(str(model)) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def version_spans(versions: dict[int, int]) -> str:
    """As `v5 x12, v6 x30`."""
    return ", ".join(f"v{version} x{count}" for version, count in versions.items())


def why_not_stored(row: GroupRow) -> str:
    """Why the journal has no rollouts of this group."""
    if row.accepted_attempt is None:
        return "no text: no group was finished" + ("" if row.reason else " yet")
    if row.length is None:
        return "text not kept: it was filtered when the journal had little room"
    if row.segment is None:
        return "text deleted: older than the oldest checkpoint"
    return f"text missing: segments/{row.segment:06d} is not there"


def _stored(run: RunRecords, row: GroupRow) -> tuple[RolloutGroup | None, str]:
    """The group as it was submitted, or why it is not there."""
    try:
        data = run.payload(row)
        return (decode_group(data), "") if data is not None else (None, why_not_stored(row))
    except ValueError as error:
        return None, f"the stored group cannot be read: {error}"


def _rollout(rollout: Rollout, text: Decode) -> ShownRollout:
    sampled = rollout.versions[rollout.loss_mask].tolist()
    return ShownRollout(
        text=text(rollout.token_ids.tolist()),
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        finish_reason=rollout.finish_reason,
        num_tokens=len(rollout.token_ids),
        versions=dict(sorted(Counter(sampled).items())),
    )
