"""`python -P -m learner CONFIG [--connect ADDRESS]`, once for each rank.

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
from functools import partial
from pathlib import Path

from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.load import load_resolved
from asyncrl.run_dir import RunDir
from asyncrl.transport import RefusedError, Unreachable
from learner.buffer_line import Connection, RunIsOver, join, leave
from learner.signals import EndOnSignals


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="learner", description="One rank of the learner.")
    parser.add_argument("config", type=Path, help="resolved configuration in the run directory")
    parser.add_argument("--connect", metavar="ADDRESS", help="the buffer, if not network.buffer")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    clock = PhaseClock("start")
    rank = int(os.environ.get("RANK", "0"))
    _log_to_stderr(logging.INFO if rank == 0 else logging.WARNING)
    run_dir = RunDir(options.config.parent)
    try:
        config = load_resolved(options.config)
        signals = EndOnSignals(run_dir.weights(config) if rank == 0 else None)
        address = options.connect or config.network.buffer
        joined = join(config, run_dir, address=address, clock=clock) if rank == 0 else None
    except (ValueError, Unreachable, RefusedError) as error:
        is_mendable = not isinstance(error, RefusedError) or error.is_misfit
        return _end(2 if is_mendable else 1, str(error))
    if joined is not None:
        signals.say_goodbye = partial(leave, joined.client)
    return _learn(config, run_dir, joined, clock, signals)


def _learn(
    config: Config,
    run_dir: RunDir,
    connection: Connection | None,
    clock: PhaseClock,
    signals: EndOnSignals,
) -> int:
    from learner.loop import Learner  # torch takes seconds: what can fail without it has not
    from learner.ranks import start_ranks

    has_started = False
    try:
        ranks = start_ranks()
        learner = Learner(config, run_dir, connection=connection, ranks=ranks, clock=clock)
        learner.take_over()
        has_started = True
        return learner.run()
    except RunIsOver as over:
        return _end(0, str(over))
    except Exception as error:
        signals.hold()
        signals.say_goodbye(f"{type(error).__name__}: {error}")
        if not has_started and isinstance(error, ValueError):
            return _end(2, str(error))
        if isinstance(error, RefusedError):
            newer = "a newer learner took over this run: " if error.code == "fenced" else ""
            return _end(2 if error.is_misfit else 1, newer + str(error))
        if isinstance(error, Unreachable):
            return _end(1, str(error))
        return _end(1, "".join(traceback.format_exception(error)))


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
        os._exit(code)  # other ranks may hang in a collective: no destructor may wait for them
    import torch.distributed as dist

    dist.destroy_process_group()
