"""Who may write the journal of a run directory: one process at a time, and nobody in the directory
of a run whose books have ended with its buffer."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from asyncrl.disk import write_whole

_MARK = "journal.none"
"""Lies in the directory of a run whose books are in the memory of its buffer alone."""
NOTHING_KEPT = (
    "nothing is kept of what became of its prompts (buffer.durability is none); its buffer alone "
    "knows, as long as it runs"
)


def note_nothing_kept(directory: Path) -> None:
    """From now on a run in this directory cannot go on when its buffer has ended."""
    write_whole(directory / _MARK, f"{NOTHING_KEPT}\n")


def is_nothing_kept(directory: Path) -> bool:
    """Whether the books of a run in this directory are, or were, in memory alone."""
    return (directory / _MARK).exists()


def refuse_lost_books(directory: Path) -> None:
    """Raises ValueError in the directory of a run whose books have ended with its buffer."""
    if not is_nothing_kept(directory):
        return
    checkpoints = sorted((directory / "checkpoints").glob("version-*"))
    way = (
        f"checkpoint.resume={checkpoints[-1]} begins a new run from its newest checkpoint"
        if checkpoints
        else "there is no checkpoint in it to begin from, so start from the model"
    )
    raise ValueError(
        f"the run in {directory} cannot go on: its books ended with its buffer, as "
        f"buffer.durability was none. Take another run_name; {way}. With "
        "buffer.durability=process a run outlives its buffer"
    )


def how_to_go_on(durability: str, *, name: str | None) -> str:
    """What to do about a run of this name that was stopped, as buffer.durability lets it."""
    if durability == "none":
        return (
            "it cannot go on, as nothing is kept of its prompts (buffer.durability is none): a new "
            "run begins from its newest checkpoint with another run_name and "
            "checkpoint.resume=RUN/checkpoints/version-..."
        )
    settings = f"run_name={name} checkpoint.resume=auto" if name else "checkpoint.resume=auto"
    return f"go on with the same command and {settings}"


def take_lock(directory: Path) -> IO[bytes]:
    """Held until it is closed. Raises ValueError when another process holds it."""
    file = (directory / "journal.lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(
            f"another buffer has the journal in {directory} open: end it first"
        ) from None
    return file
