"""Writing so that nobody reads half, and so that what was written stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_REMOVALS = 5


def write_whole(file: Path, text: str) -> None:
    """Writes a text file that no reader can see half."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def replaceable(file: Path) -> Path:
    """Where a finished file goes that is to be found at `file`, a name that the user gave: where a
    symbolic link points to, if it is one. Raises ValueError when something is there that is no
    regular file, or no directory to hold it."""
    target = Path(os.path.realpath(file))
    try:
        if not target.parent.is_dir():
            raise ValueError(f"{file} cannot be written: make the directory {target.parent} first")
        if file.exists() and not file.is_file():
            raise ValueError(
                f"{file} is no regular file, and is not replaced: give the name of a file, which "
                "may be there or not"
            )
    except OSError as error:
        raise ValueError(f"{file} cannot be looked at: {error.strerror}") from None
    return target


def remove_whole(directory: Path) -> None:
    """Removes a directory, if it is there, in which somebody may be writing just now: it loses its
    name first, so that nothing is written into it any more, and goes again where it was made anew
    meanwhile."""
    aside = directory.with_name(f".{directory.name}.{os.getpid()}")
    for _ in range(_REMOVALS):
        try:
            directory.rename(aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def gone_on_failure(directory: Path) -> Iterator[None]:
    """Whatever ends the block early, a directory that was being written takes no room then."""
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
