"""A generator that breaks broadcasts of weights, started as a program:

    python -P tests/faulty_generator.py FAULT@VERSION CONFIG --connect ADDRESS --name NAME

`raise`, `kill` (SIGKILL to itself) and `stop` (SIGSTOP) come when the third bucket of the first
broadcast of VERSION or a later one is there, `absent` instead of joining it. Each happens once and
is said on standard error, before it happens. `slow` makes every broadcast of those versions take
two seconds; `tell` only says that the third bucket is there, of each.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # run from anywhere, as `-P` leaves it out

import torch

from asyncrl import process_groups

THIRD = 3
SLOW_S = 2.0
FAULT, _, FROM = sys.argv.pop(1).partition("@")


class FaultyGroup(process_groups.Group):
    """What generators join by."""

    is_done = False

    def __init__(self, seat: process_groups.Seat, **options: Any) -> None:
        version = int(seat.prefix.split("-")[1].split(".")[1])
        self.is_concerned = version >= int(FROM)
        self.num_buckets = 0
        self.began = time.monotonic()
        if FAULT == "absent" and self._is_time():
            self._say()
            threading.Event().wait()
        super().__init__(seat, **options)

    def broadcast(self, data: torch.Tensor) -> None:
        super().broadcast(data)
        self.num_buckets += 1
        if FAULT == "slow" and self.is_concerned:
            left_s = SLOW_S - (time.monotonic() - self.began)
            time.sleep(max(0.0, left_s) / 10)  # of dozens of buckets
        elif FAULT in ("raise", "kill", "stop") and self.num_buckets == THIRD and self._is_time():
            self._say()
            self._break()
        elif FAULT == "tell" and self.num_buckets == THIRD and self.is_concerned:
            self._say()

    def _is_time(self) -> bool:
        """Once."""
        is_time = self.is_concerned and not FaultyGroup.is_done
        FaultyGroup.is_done = FaultyGroup.is_done or is_time
        return is_time

    def _say(self) -> None:
        print(f"planted: {FAULT}", file=sys.stderr, flush=True)

    def _break(self) -> None:
        if FAULT == "raise":
            raise RuntimeError("the receiver is broken")
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    process_groups.Group = FaultyGroup  # type: ignore[misc]
    from asyncrl.end_now import end_now
    from generators.__main__ import main

    code = main()
    sys.stderr.flush()
    end_now(code)
