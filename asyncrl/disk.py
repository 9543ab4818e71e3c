"""Writing so that nobody reads half, and so that what was written stays."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Writes a text file that no reader can see half."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def remove_whole(directory: Path) -> None:
    """Removes a directory, if it is there, in which somebody may be writing just now: it loses its
    name first, so that nothing is written into it any more."""
    aside = directory.with_name(f".{directory.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
