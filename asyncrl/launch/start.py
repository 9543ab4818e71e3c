"""`asyncrl-launch` begins here: from its first lines on, a signal ends it without a traceback.

Everything else is imported after that. Commands that start processes put handlers of their own in
place (signals.py); what a command becomes by os.exec starts with the default ones. SIGUSR1 writes
the stacks of all threads to stderr.
"""

from __future__ import annotations

import faulthandler
import os
import signal


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    from asyncrl.launch import cli
    from asyncrl.launch.output import checked_output

    with checked_output():
        cli.main()


def _end(number: int, frame: object) -> None:
    os._exit(128 + number)
