"""The rows of a run: read once, checked at once, the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.schema import Config, DataKeys, ReasoningGym
from asyncrl.tasks.files import read_rows
from asyncrl.types import Row

_NUM_SHOWN = 20
"""Bad rows listed one by one; of more only the number is told."""


@dataclass(frozen=True, slots=True)
class Rows:
    """`train` and `val` in the order of the configuration; see asyncrl.types.Row."""

    train: list[Row]
    val: list[Row]


def load_rows(config: Config) -> Rows:
    """Reads and checks all data of a run. Raises ValueError that names file, row and field.

    No text is both trained and evaluated where both come from reasoning-gym; files are used as
    they are.
    """
    data = config.data
    train = _load(data.train_files, data.keys, "data.train_files", held_out=False)
    if data.last_batch == "drop" and len(train) < config.prompts_per_step:
        raise ValueError(
            f"data.train_files: {len(train)} rows do not fill one step of prompts_per_step "
            f"{config.prompts_per_step}, and data.last_batch 'drop' would train none of them: use "
            "'train' or 'wrap', or a smaller prompts_per_step"
        )
    val = _load(data.val_files, data.keys, "data.val_files", held_out=True)
    return Rows(train, val)


def _load(
    sources: list[str | ReasoningGym], keys: DataKeys, name: str, *, held_out: bool
) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    for source in sources:
        if isinstance(source, str):
            good, bad = read_rows(source, keys)
            rows, problems = rows + good, problems + bad
        else:
            # Imported where it is wanted: reasoning-gym takes two seconds.
            from asyncrl.tasks.reasoning_gym import make_rows

            rows += make_rows(source, held_out=held_out)
    if problems:
        more = len(problems) - _NUM_SHOWN
        tail = [f"and {more} more"] if more > 0 else []
        lines = "\n  ".join(problems[:_NUM_SHOWN] + tail)
        raise ValueError(f"{name}: bad rows ({len(problems)}):\n  {lines}")
    return rows
