"""`python -P -m buffer CONFIG`: the buffer of one run, started first and ended last.

SIGINT once: the run is drained, the learner ends its step and everybody leaves (130). SIGTERM, or
SIGINT again: the buffer alone ends, at once (143); members wait for it to be started again.

Exit codes: 0 the run ended well, 1 it failed, 2 a mistake that the user can mend, 130 and 143 as
above (the run can go on).
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import signal
import sys
import time
from pathlib import Path

from asyncrl.address import Address
from asyncrl.config import Config
from asyncrl.config.load import load_resolved, save_resolved
from asyncrl.disk import write_whole
from asyncrl.full_disk import causes, why_full
from asyncrl.handshake import buffer_settings
from asyncrl.journal.database import JournalLocked
from asyncrl.run_dir import RunDir
from asyncrl.tasks.rows import load_rows
from buffer.history import earlier_beats
from buffer.loop_clock import LoopClock
from buffer.room import open_journal
from buffer.run import Run
from buffer.server import BufferServer

_ENDING = (signal.SIGTERM, signal.SIGINT)
TERMINATED = 143
"""Exit code after SIGTERM, or a second SIGINT (128 + 15)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m buffer", description=__doc__)
    parser.add_argument("config", help="resolved config.yaml in the run directory")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s buffer %(levelname)s %(message)s")
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to drain
    clock = LoopClock()
    try:
        config = load_resolved(Path(arguments.config))
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
            return runner.run(_serve(config, RunDir(Path(arguments.config).parent), clock))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        locked = next((str(e) for e in causes(error) if isinstance(e, JournalLocked)), None)
        mendable = locked or why_full(error, Path(arguments.config).parent)
        if mendable is None:
            raise
        print(f"error: {mendable}", file=sys.stderr)
        return 1
    finally:
        _ignore_signals()


async def _serve(config: Config, run_dir: RunDir, clock: LoopClock) -> int:
    rows = await asyncio.to_thread(load_rows, config)
    journal = open_journal(run_dir.path, config)
    try:
        run = Run(config, train=rows.train, val=rows.val, journal=journal, now=time.monotonic())
        for row in earlier_beats(run_dir.path):
            run.watch.history.lives.add(row)
        await asyncio.wrap_future(run.save(now=time.monotonic()))  # what it was begun with
        server = _listen(run, config.network.buffer, run_dir, clock)
        stopped = _obey_signals(server)
        save_resolved(config, run_dir.config)
        write_whole(run_dir.buffer_address, server.address)
        logging.info("listening on %s", server.address)
        code = await _serve_to_end(server)
        if run.end is not None and run.end.stopped:
            logging.info(run.end.reason)
    finally:
        journal.close()
    return TERMINATED if stopped.is_set() else code


async def _serve_to_end(server: BufferServer) -> int:
    """From here on no error is the user's: a ValueError, too, ends in a traceback."""
    try:
        return await server.serve()
    except Exception as error:
        raise RuntimeError("the buffer has failed") from error


def _listen(run: Run, address: str, run_dir: RunDir, clock: LoopClock) -> BufferServer:
    """A restarted buffer comes back where the others look for it, also after a port of 0."""
    before = run_dir.buffer_address
    if Address.parse(address).port == 0 and before.exists():
        address = before.read_text().strip()
    return BufferServer(
        run,
        address,
        run_id=run_dir.make_run_id(),
        run_name=run_dir.path.name,
        settings=buffer_settings(run.config),
        clock=clock,
    )


def _obey_signals(server: BufferServer) -> asyncio.Event:
    """Returns what is set once the buffer is to end at once.

    Python's own handlers, which stay when the loop is closed: a further signal does not cut short
    what the end still has to do.
    """
    loop, stopped, draining = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def stop() -> None:
        stopped.set()
        server.stop()

    def drain() -> None:
        if draining.is_set():
            stop()
        draining.set()
        server.drain("SIGINT")

    def obey(number: int, frame: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop if number == signal.SIGTERM else drain)

    for number in _ENDING:
        signal.signal(number, obey)
    return stopped


def _ignore_signals() -> None:
    """From here on the exit code is decided."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
