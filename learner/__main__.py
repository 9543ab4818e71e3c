"""`python -P -m learner CONFIG [--connect ADDRESS]`, once for each rank.

Under torch.distributed.run it is one of several ranks; started plainly it is the only one. Exit
codes: 0 the run ended well, 1 it failed, 2 a mistake that the user can mend. SIGTERM ends it at
once: a checkpoint is whole or not there, so nothing needs to be cleaned up.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from asyncrl.config.load import load_resolved
from asyncrl.parent import end_with_parent
from asyncrl.run_dir import RunDir
from asyncrl.transport import RefusedError, Unreachable
from learner.loop import Learner
from learner.ranks import start_ranks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="learner", description="One rank of the learner.")
    parser.add_argument("config", type=Path, help="resolved configuration in the run directory")
    parser.add_argument("--connect", metavar="ADDRESS", help="the buffer, if not network.buffer")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)  # no rank outlives the torch launcher that started it
    try:
        config = load_resolved(options.config)
        ranks = start_ranks()
        _log_to_stderr(logging.INFO if ranks.is_lead else logging.WARNING)
        address = options.connect or config.network.buffer
        learner = Learner(config, RunDir(options.config.parent), address=address, ranks=ranks)
    except ValueError as error:
        return _fail(2, str(error))
    except Exception as error:
        return _explain(error)
    try:
        return learner.run()
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Says why this rank ends: in one line where that says it all, else with the traceback."""
    if isinstance(error, RefusedError):
        newer = "a newer learner took over this run: " if error.code == "fenced" else ""
        return _fail(1, newer + str(error))
    if isinstance(error, Unreachable):
        return _fail(1, str(error))
    return _fail(1, "".join(traceback.format_exception(error)))


def _fail(code: int, message: str) -> int:
    print(f"learner: {message}", file=sys.stderr)
    return code


def _log_to_stderr(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s learner %(message)s", datefmt="%H:%M:%S")


if __name__ == "__main__":
    code = main()
    if code != 0:
        sys.stderr.flush()
        os._exit(code)  # other ranks may hang in a collective: no destructor may wait for them
    dist.destroy_process_group()
