"""Writing so that nobody reads half, and so that what was written stays."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Writes a text file that no reader can see half."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
