"""What to make of a program's end, and how to tell a person about it."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Literal

DRAINED = 128 + signal.SIGINT
"""Exit code of a buffer that was asked to stop and whose learner has saved its work."""

_ERROR = re.compile(r"(?:^|[\]:] )((?:\w+\.)*\w*(?:Error|Exception|Failure)): \S")


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program of the run ended, and when."""

    role: str
    code: int
    """Exit code; negative for a signal, as of subprocess."""
    has_worked: bool
    """Generator: it has sampled tokens."""
    run_is_over: bool
    """The run has ended, or is being stopped: nobody is started again."""
    is_needed: bool
    """A generator is needed while the run goes on, the buffer until the learner has ended well, the
    learner until it has itself."""

    @property
    def signal(self) -> int | None:
        """The signal that ended it: killed, or it says so with its exit code."""
        if self.code < 0:
            return -self.code
        return self.code - 128 if 128 < self.code < 128 + signal.NSIG else None


Verdict = Literal["well", "again", "failed"]


def judge(ending: Ending) -> Verdict:
    """Whether a program ended well, is to be started again, or ends the run.

    What was killed is started again; so is a generator that failed after it had worked. Whatever
    fails by itself at its start, and a learner or buffer that fails, would fail again.
    """
    if ending.code == 0 or (ending.role == "buffer" and ending.code == DRAINED):
        return "well"
    if not ending.is_needed and (ending.role == "generator" or ending.signal is not None):
        return "well"
    if ending.run_is_over:
        return "failed"
    if ending.signal is not None:
        return "again"
    is_mishap = ending.role == "generator" and ending.code != 2 and ending.has_worked
    return "again" if is_mishap else "failed"


def how_it_ended(ending: Ending) -> str:
    if ending.signal is None:
        return f"ended with exit code {ending.code}"
    try:
        name = signal.Signals(ending.signal).name
    except ValueError:
        name = f"signal {ending.signal}"
    return f"was ended by {name}"


def telling_lines(log: str, *, count: int = 15) -> list[str]:
    """The lines of a log that say why its program ended: the last ones, and before them the errors
    that do not show in them, the first being the likely cause of the rest."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tail = lines[-count:]
    earlier = [line for line in lines[:-count] if _ERROR.search(line) and line not in tail]
    chosen = list(dict.fromkeys(earlier))[:3]
    return [*chosen, *(["..."] if chosen else []), *tail]
