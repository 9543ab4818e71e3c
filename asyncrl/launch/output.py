"""What a command prints: user text as it is, and standard output that may be full or gone."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from rich.console import Console


class OutputError(Exception):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}")
        self.reader_is_gone = error.errno == errno.EPIPE


class Output(io.TextIOBase):
    """A text stream that may fail. What is lost with it is the caller's to say: a failure raises
    OutputError, or, where nobody needs the text (`is_needed` false), the rest is thrown away."""

    def __init__(self, stream: TextIO, *, is_needed: bool) -> None:
        self._stream: TextIO = stream._stream if isinstance(stream, Output) else stream
        self._is_needed = is_needed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            return self._fail(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _fail(self, error: OSError) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is still in the buffer must go somewhere
        os.close(nowhere)
        if self._is_needed:
            raise OutputError(error)
        return 0


def plain_console(*, stderr: bool = False, is_needed: bool = True) -> Console:
    """A console that prints brackets in names as brackets, and colours nothing by itself."""
    stream = sys.stderr if stderr else sys.stdout
    file = cast("TextIO", stream if is_needed else Output(stream, is_needed=False))
    return Console(file=file, markup=False, emoji=False, highlight=False)


@contextmanager
def checked_output() -> Iterator[None]:
    """Ends the process with one message and 1 when standard output fails, and without a word when
    nobody reads it any more, as SIGPIPE would."""
    stream = sys.stdout
    sys.stdout = Output(stream, is_needed=True)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if error.reader_is_gone:
            sys.exit(128 + signal.SIGPIPE)
        print(f"asyncrl-launch: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        sys.stdout = stream
