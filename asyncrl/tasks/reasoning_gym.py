"""Rows and rewards from reasoning-gym: procedural tasks, seeded, each with its own scorer.

A row carries what makes it (`task`, `config`, `seed`, `index` in `extra`); the reward function
makes the entry again from that and asks the task's own `score_answer`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from asyncrl.config.fields import nearest
from asyncrl.config.schema import ReasoningGym
from asyncrl.types import Row

_EXACT = 0.99
"""Tasks give part marks below this; at or above it the answer is right."""


def make_rows(source: ReasoningGym, *, held_out: bool) -> list[Row]:
    """The rows of a source, in the order in which its seed makes them, `size` of them.

    A fifth of all texts of a task, chosen by their hash, is held out: training rows (`held_out`
    False) never have such a text, validation rows always do. Both are otherwise distributed as the
    task makes them, repetitions included. Raises ValueError for an unknown task, parameters that
    it does not take, and a task with too few different texts for that.
    """
    num_tries = 20 * source.size + 1000
    dataset = _dataset(source.reasoning_gym, source.params, source.seed, num_tries)
    rows: list[Row] = []
    for index in range(num_tries):
        if len(rows) == source.size:
            return rows
        row = _row(source, num_tries, index, dataset)
        if is_held_out(row["prompt"]) == held_out:
            rows.append(row)
    side = "held out" if held_out else "to be trained"
    raise ValueError(
        f"reasoning-gym task {source.reasoning_gym} with {source.params} gave only {len(rows)} "
        f"rows {side} in {num_tries} tries, {source.size} are wanted: a fifth of the texts, by "
        "hash, is for evaluation alone. Make the task wider"
    )


def is_held_out(text: str) -> bool:
    """Whether a text belongs to the fifth that is never trained, in any run with any seed."""
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 5 == 0


def score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """The task's own score of the stripped response, 0 to 1, part marks included."""
    dataset = _rebuild(
        extra_info["task"],
        json.dumps(extra_info["config"], sort_keys=True),
        extra_info["seed"],
    )
    return float(dataset.score_answer(solution_str.strip(), entry=dataset[extra_info["index"]]))


def exact(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """1 for a right answer, else 0: no part marks for an answer with words around it."""
    return float(score(data_source, solution_str, ground_truth, extra_info) >= _EXACT)


@functools.lru_cache(maxsize=64)
def _rebuild(task: str, config: str, seed: int) -> Any:
    return create_dataset(task, **json.loads(config), seed=seed)


def _row(source: ReasoningGym, size: int, index: int, dataset: Any) -> Row:
    try:
        entry = dataset[index]
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"reasoning-gym task {source.reasoning_gym}: item {index} of {size} cannot be made: "
            f"{error}"
        ) from None
    return {
        "prompt": entry["question"],
        "source": f"reasoning_gym/{source.reasoning_gym}",
        "answer": entry["answer"],
        "extra": {
            "task": source.reasoning_gym,
            "config": {**source.params, "size": size},
            "seed": source.seed,
            "index": index,
        },
    }


def _dataset(task: str, params: dict[str, Any], seed: int, size: int) -> Any:
    if task not in DATASETS:
        raise ValueError(f"reasoning_gym: there is no task {task!r}{nearest(task, DATASETS)}")
    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for name in params:
        if name not in known:
            raise ValueError(
                f"reasoning_gym task {task}: there is no parameter {name!r}{nearest(name, known)} "
                f"(known: {', '.join(sorted(known))})"
            )
    try:
        return create_dataset(task, **params, seed=seed, size=size)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning_gym task {task} refuses {params}: {error}") from None
