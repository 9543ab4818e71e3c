"""A disk that takes no more is the user's to mend: one message, whoever finds it first."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SAID = tuple(os.strerror(number) for number in sorted(_FULL))
"""How libraries tell it that raise errors of their own (safetensors)."""


def why_full(error: BaseException, directory: Path) -> str | None:
    """What to tell a person when `error`, or what caused it, is that the disk of `directory`, or of
    the file that the error names, is full. None for any other error."""
    for cause in causes(error):
        if _is_full(cause):
            named = getattr(cause, "filename", None)
            where = Path(os.fsdecode(named)) if named else directory
            return (
                f"the disk is full: {where} cannot be written ({cause}); {_free(where)}. Make room "
                "and start this program again: the run goes on with checkpoint.resume=auto"
            )
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(text in str(error) for text in _SAID)


def _free(path: Path) -> str:
    """Of the file system that holds `path`, which may not be there itself."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free"
