"""The learner's processes on one machine, started by torch's own launcher.

`python -P -m asyncrl.launch.ranks [--nnodes ...] --nproc-per-node N CONFIG [ARGUMENTS]` runs N
learners as ranks and ends when they have. It ends with the code of the first rank that failed, and
that rank's own words are the last in the log. A rank that outlives this process is killed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from asyncrl.launch.children import role_command
from asyncrl.parent import end_with_parent

_SHUTDOWN_S = "3"
"""Time that ranks have to end after a signal or the failure of another; then SIGKILL."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines that the learner runs on, and which of them this one is.

    Raises ValueError when they do not fit together.
    """

    count: int = 1
    this: int = 0
    master: str | None = None
    """HOST:PORT of machine 0, where it listens for the others."""

    def __post_init__(self) -> None:
        if self.this >= self.count:
            raise ValueError(
                f"--node-rank {self.this} with --nnodes {self.count}: machines are numbered from 0 "
                f"to {self.count - 1}"
            )
        if self.count == 1:
            return
        host, _, port = (self.master or "").rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(
                f"--nnodes {self.count} needs --master HOST:PORT, an address of machine 0 and a "
                f"free port on it, got {self.master!r}"
            )

    def torch_arguments(self) -> list[str]:
        """For torch's launcher. Several machines meet statically: the ranks of machine 0 come
        first, so the lead is there."""
        if self.count == 1:
            return ["--standalone"]
        host, _, port = (self.master or "").rpartition(":")
        place = [f"--nnodes={self.count}", f"--node-rank={self.this}"]
        return [*place, f"--master-addr={host.strip('[]')}", f"--master-port={port}"]


def learner_command(ranks: int, *arguments: str, nodes: Nodes | None = None) -> tuple[str, ...]:
    """The learner: the only rank is started plainly, several by this module."""
    nodes = nodes or Nodes()
    if ranks == 1 and nodes.count == 1:
        return role_command("learner", *arguments)
    launcher = "asyncrl.launch.ranks"
    places = [f"--nproc-per-node={ranks}", *nodes.torch_arguments()]
    return role_command(launcher, *places, *arguments)


def main() -> int:
    if sys.argv[1] == "--rank-of":
        return _become_rank(int(sys.argv[2]), sys.argv[3:])
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)  # until there are ranks; then torch passes signals on to them
    split = next(i for i, text in enumerate(sys.argv) if i and not text.startswith("--"))
    rank = role_command("asyncrl.launch.ranks", "--rank-of", str(os.getpid()), *sys.argv[split:])
    options = [*sys.argv[1:split], f"--shutdown-timeout={_SHUTDOWN_S}", "--no-python"]
    try:
        run(parse_args([*options, *rank]))
    except ChildFailedError as error:
        return exit_code(error.failures.values())
    except SignalException as ended:
        return 128 + int(ended.sigval)
    return 0


class Failure(Protocol):
    """A rank that failed, as torch's launcher tells it."""

    exitcode: int
    timestamp: int
    """When that was seen, seconds."""


def exit_code(failures: Iterable[Failure]) -> int:
    """The exit code of the first rank that failed. Of several at once, one that was killed is the
    cause of the others' errors; those that the launcher itself ended after that do not count."""
    in_order = sorted(failures, key=lambda failure: failure.timestamp)
    first = in_order[0]
    at_once = [f.exitcode for f in in_order if f.timestamp <= first.timestamp + 1]
    killed = [code for code in at_once if code < 0 and code != -signal.SIGTERM]
    code = killed[0] if killed else first.exitcode
    return code if code > 0 else 128 - code


def _become_rank(parent: int, arguments: list[str]) -> int:
    end_with_parent(signal.SIGKILL, parent=parent)
    command = role_command("learner", *arguments)
    os.execv(command[0], command)


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
