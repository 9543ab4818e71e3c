"""A run directory with known numbers, written without running anything.

Six steps of two groups of two responses. The learner was killed after step 3 and came back an hour
later from the checkpoint of version 2, so steps 2 and 3 are in metrics.jsonl twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from asyncrl.journal import Journal
from asyncrl.journal.tables import BeatRow, Change, EvalRow, GroupRow, ServedRow, StepRow
from asyncrl.types import GroupId, Rollout, RolloutGroup
from asyncrl.wire import encode_group

STEPS, GROUPS, BOUND = 6, 2, 2
BEGAN = 1_700_000_000.0
PAUSE_S = 3600.0
STEP_S = 10.0
REWARDS = [0.1 * (step + 1) for step in range(STEPS)]
STALENESS = [0, 1, 2, 2, 1, 0]
"""Of all tokens of each step."""
TOKENS = 6
"""Of each response."""


def write_run(directory: Path, *, model: Path | str = "no/model") -> Path:
    """Returns the run directory, DIRECTORY/known."""
    path = directory / "known"
    path.mkdir()
    tree = {
        "max_steps": STEPS,
        "max_staleness": BOUND,
        "prompts_per_step": GROUPS,
        "group_size": 2,
        "algorithm": "grpo",
        "model": {"path": str(model)},
    }
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records()))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "torn')
    journal = Journal(path)
    change = Change(
        groups=tuple(group_rows(journal)),
        steps=tuple(step_row(step) for step in range(STEPS)),
        served=tuple(served_rows()),
        evals=(EvalRow(0, json.dumps({"step": 0, "values": {"accuracy": 0.25}})),),
        beats=tuple(beats()),
        meta={"committed": str(STEPS), "not_issued": "5"},
    )
    journal.write(change).result()
    journal.close()
    return path


def records() -> Iterator[dict[str, Any]]:
    """metrics.jsonl: (attempt, step) 1: 0 1 2 3, 2: 2 3 (replayed) 4 5."""
    yield eval_record(0, accuracy=0.25, at=BEGAN + 1, attempt=1)
    for attempt, step in [(1, 0), (1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4), (2, 5)]:
        at = BEGAN + STEP_S * (step + 1) + (PAUSE_S if attempt == 2 else 0)
        shared = {"step": step, "time": at, "attempt": attempt}
        yield shared | {f"buffer/{name}": value for name, value in buffer_values(step).items()}
        yield shared | train_values(step) | {"train/replayed": float(attempt == 2 and step < 4)}
    yield eval_record(6, accuracy=0.75, at=BEGAN + PAUSE_S + 65, attempt=2)


def eval_record(version: int, *, accuracy: float, at: float, attempt: int) -> dict[str, Any]:
    return {
        "step": version,
        "time": at,
        "attempt": attempt,
        "eval/version": version,
        "eval/accuracy": accuracy,
        "eval/count": 16,
        "eval/temperature": 1.0,
        "eval/duration_s": 1.0,
    }


def buffer_values(step: int) -> dict[str, float]:
    return {"reward_mean": REWARDS[step], "num_arrived": 3, "generator_tokens_per_s": 40.0 + step}


def train_values(step: int) -> dict[str, float]:
    return {
        "train/num_tokens": 100.0,
        "train/tokens_per_s": 10.0,
        "train/skipped": 0.0,
        "staleness/mean": float(STALENESS[step]),
        "staleness/max": float(STALENESS[step]),
        f"staleness/tokens_{STALENESS[step]}": 24.0,
        "time/step_s": STEP_S,
        "time/wait_batch_s": 4.0,
        "time/forward_backward_s": 5.0,
        "time/snapshot_s": 1.0,
    }


def step_row(step: int) -> StepRow:
    record = {"name": "buffer", "step": step, "values": buffer_values(step)}
    at = BEGAN + STEP_S * step
    return StepRow(step, GROUPS, BOUND, "", json.dumps(record), at)


def served_rows() -> Iterator[ServedRow]:
    """Two generators take versions 1, 2, 4 and 5; the second life of the learner publishes 4 once
    more, to one of them, whose buffer does not know since when it could be had."""
    for version in (1, 2, 4, 5):
        for number, name in enumerate(("generator-0-aaaa", "generator-1-cccc")):
            at = BEGAN + STEP_S * version + number
            yield ServedRow(1, version, name, at, 1.0 + number, update_seconds(transfer_s=0.5))
    late = BEGAN + PAUSE_S + 45
    yield ServedRow(2, 4, "generator-0-bbbb", late, None, update_seconds(transfer_s=0.25))


def update_seconds(*, transfer_s: float) -> str:
    """0.03 s of rendezvous and verification, 0.1 s of pause."""
    phases = {"rendezvous": 0.01, "transfer": transfer_s, "verify": 0.02, "wait": 0.0}
    swap = {"pause": 0.02, "load": 0.07, "reset": 0.0, "resume": 0.01}
    return json.dumps({**phases, **swap, "stage": 0.03 + transfer_s, "paused": 0.1})


def group_rows(journal: Journal) -> Iterator[GroupRow]:
    """Twelve trained, then one filtered, one that never finished, one whose text is deleted."""
    for number in range(STEPS * GROUPS):
        step = number // GROUPS
        yield group_row(journal, number, state="trained", step=step)
    yield group_row(journal, 12, state="filtered", reason="all rewards are 0")
    failed = group_row(journal, 13, state="quarantined", reason="failed 3 times")
    yield failed._replace(segment=None, offset=None, length=None, accepted_attempt=None)
    deleted = group_row(journal, 14, state="filtered", reason="all rewards are 0")
    yield deleted._replace(segment=None)


def group_row(
    journal: Journal, number: int, *, state: str, step: int | None = None, reason: str = ""
) -> GroupRow:
    version = step - STALENESS[step] if step is not None else 3
    ref = journal.append(encode_group(rollout_group(number, version, scored=not reason)))
    return GroupRow(
        number=number,
        epoch=0,
        position=number,
        state=state,
        attempt=0,
        strikes=0,
        seed_k=0,
        valid_attempt=0,
        member="generator-0-aaaa",
        version=version,
        started=1,
        step=step,
        accepted_attempt=0,
        segment=ref.segment,
        offset=ref.offset,
        length=ref.length,
        token_versions=json.dumps({version: 2 * TOKENS}),
        reason=reason,
        reward=0.0 if reason else 0.5,
        leased_at=BEGAN,
        finished_at=BEGAN + 5,
    )


def rollout_group(number: int, version: int, *, scored: bool) -> RolloutGroup:
    """Two responses, the second of two versions; token ids are number, number + 1, ..."""
    rollouts = []
    for sample in range(2):
        versions = np.full(TOKENS, version, np.int32)
        versions[TOKENS - sample :] += 1
        rollouts.append(
            Rollout(
                token_ids=np.arange(number, number + TOKENS, dtype=np.int32),
                logprobs=np.full(TOKENS, -1.0, np.float32),
                versions=versions,
                loss_mask=np.ones(TOKENS, bool),
                finish_reason="stop",
                reward=float(sample) if scored else 0.0,
                reward_parts={"format": 0.5},
            )
        )
    return RolloutGroup(
        GroupId(0, number), 0, "known", np.arange(4, dtype=np.int32), 1.0, 1, tuple(rollouts)
    )


def beats() -> Iterator[BeatRow]:
    """Of each ten seconds a generator works seven and waits three; each life starts for five."""
    for life, member, begin in [
        (0, "generator-0-aaaa", BEGAN),
        (1, "generator-0-bbbb", BEGAN + PAUSE_S + 20),
        (0, "generator-1-cccc", BEGAN + 5),
    ]:
        for i in range(4):
            seconds = {"start": 5.0, "generating": 7.0 * i, "waiting for leases": 3.0 * i}
            at = begin + 5 + 10 * i
            yield BeatRow(
                at, member, "generator", "generating", json.dumps(seconds), 70 * i, i + life
            )
