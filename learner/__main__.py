"""`python -P -m learner CONFIG [--connect ADDRESS | --replay RUN_DIRECTORY | --compare DIRECTORY]`,
once for each rank.

Under torch.distributed.run it is one of several ranks; started plainly it is the only one.

Exit codes: 0 the run ended well, or was stopped and can go on; 1 it failed; 2 a mistake that the
user can mend; 143 after SIGTERM and 130 after SIGINT, which end it at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.client import RefusedError, Unreachable
from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.load import load_resolved
from asyncrl.end_now import end_now
from asyncrl.full_disk import why_full
from asyncrl.journal.recorded import RecordedRun
from asyncrl.run_dir import RunDir
from learner.joining import Connection, join, leave
from learner.signals import EndOnSignals

if TYPE_CHECKING:
    from learner.buffer_line import BufferLine
    from learner.ranks import Ranks
    from learner.sides import Line, Outlet
    from learner.weights_out import Sender


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="learner", description="One rank of the learner.")
    parser.add_argument("config", type=Path, help="resolved configuration in the run directory")
    parser.add_argument("--connect", metavar="ADDRESS", help="the buffer, if not network.buffer")
    parser.add_argument("--replay", metavar="RUN_DIRECTORY", type=Path, help="a recorded run")
    parser.add_argument("--compare", metavar="DIRECTORY", type=Path, help="sampled groups, no run")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    clock = PhaseClock("start")
    rank = int(os.environ.get("RANK", "0"))
    _log_to_stderr(logging.INFO if rank == 0 else logging.WARNING)
    run_dir = RunDir(options.config.parent)
    try:
        config = load_resolved(options.config)
        if options.compare is not None:
            return _compare(config, options.compare)
        signals = EndOnSignals(run_dir.weights(config) if rank == 0 else None)
        address = options.connect or config.network.buffer
        joins = rank == 0 and options.replay is None
        joined = join(config, run_dir, address=address, clock=clock) if joins else None
    except (ValueError, Unreachable, RefusedError) as error:
        is_mendable = not isinstance(error, RefusedError) or error.is_misfit
        return _end(2 if is_mendable else 1, str(error))
    if joined is not None:
        signals.say_goodbye = partial(leave, joined.client)
    if options.replay is not None:
        return _learn(config, run_dir, partial(replay_sides, options.replay), clock, signals)
    return _learn(config, run_dir, partial(live_sides, joined), clock, signals)


def _compare(config: Config, directory: Path) -> int:
    from learner.compare import compare

    compare(config, directory)
    return 0


def live_sides(
    connection: Connection | None, config: Config, run_dir: RunDir, ranks: Ranks
) -> tuple[Line, Outlet]:
    """The two sides of a learner that a buffer serves; `connection`: the lead's."""
    from learner.buffer_line import BufferLine
    from learner.policy import DTYPES
    from learner.weights_out import Publisher

    line = BufferLine(connection, ranks=ranks, patience_s=config.network.buffer_timeout_s)
    sender = _make_sender(config, run_dir, line, ranks) if ranks.is_lead else None
    return line, Publisher(config.weights, sender, dtype=DTYPES[config.model.dtype])


def _make_sender(config: Config, run_dir: RunDir, line: BufferLine, ranks: Ranks) -> Sender:
    """The lead's, of the transport that the configuration says."""
    from asyncrl.process_groups import host_towards
    from learner.collective_sender import CollectiveSender
    from learner.disk_sender import DiskSender

    if config.transport == "disk":
        return DiskSender(config.weights, run_dir.weights(config), announce=line.announce)
    host = config.weights.host or host_towards(line.address)
    return CollectiveSender(config.weights, host=host, device=ranks.device, buffer=line)


def replay_sides(
    directory: Path, config: Config, run_dir: RunDir, ranks: Ranks
) -> tuple[Line, Outlet]:
    """The two sides of a learner that trains the run in `directory` once more."""
    from learner.policy import DTYPES
    from learner.replay import DigestCheck, JournalLine

    recorded, dtype = RecordedRun(directory), DTYPES[config.model.dtype]
    line = JournalLine(recorded, ranks=ranks, max_steps=config.max_steps)
    return line, DigestCheck(recorded, dtype=dtype, is_lead=ranks.is_lead)


def _learn(
    config: Config,
    run_dir: RunDir,
    sides: Callable[[Config, RunDir, Ranks], tuple[Line, Outlet]],
    clock: PhaseClock,
    signals: EndOnSignals,
) -> int:
    from learner.buffer_line import RunIsOver
    from learner.loop import Learner  # torch takes seconds: what can fail without it has not
    from learner.parity import NotSamePolicy
    from learner.ranks import start_ranks

    has_started = False
    try:
        ranks = start_ranks()
        line, outlet = sides(config, run_dir, ranks)
        signals.stop_publishing = partial(outlet.close, drain_s=0.0)
        learner = Learner(config, run_dir, line=line, outlet=outlet, ranks=ranks, clock=clock)
        learner.take_over()
        has_started = True
        return learner.run()
    except RunIsOver as over:
        return _end(0, str(over))
    except Exception as error:
        signals.hold()
        signals.say_goodbye(f"{type(error).__name__}: {error}")
        signals.hold()  # of several ranks another one may have had the signal first
        is_mendable = isinstance(error, NotSamePolicy) or not has_started
        if is_mendable and isinstance(error, ValueError):
            return _end(2, str(error))
        if isinstance(error, RefusedError):
            newer = "a newer learner took over this run: " if error.code == "fenced" else ""
            return _end(2 if error.is_misfit else 1, newer + str(error))
        if isinstance(error, Unreachable):
            return _end(1, str(error))
        told = why_full(error, run_dir.path) or "".join(traceback.format_exception(error))
        return _end(1, told)


def _end(code: int, message: str) -> int:
    rank = os.environ.get("RANK")
    print(f"learner{f' rank {rank}' if rank else ''}: {message}", file=sys.stderr)
    return code


def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s learner %(message)s", datefmt="%H:%M:%S")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    if code != 0:
        end_now(code)  # other ranks may hang in a collective: no destructor may wait for them
    import torch.distributed as dist

    dist.destroy_process_group()
    end_now(0)  # a thread may be in a broadcast: it would abort the program as it is torn down
