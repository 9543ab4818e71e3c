"""`asyncrl-launch status`: what a run does now, as its buffer says, on one screen."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from asyncrl.address import Address
from asyncrl.client import RefusedError, Unreachable
from asyncrl.journal.claim import NOTHING_KEPT, is_nothing_kept
from asyncrl.launch.status_screen import screen
from asyncrl.messages import Hello, StatusRequest
from asyncrl.report.reading import find_run, read_run
from asyncrl.report.summary import fates_text, outcome
from asyncrl.run_dir import RunDir
from asyncrl.thread_client import ThreadClient

ANSWER_S = 3.0
"""How long the buffer may take to answer. It answers at once unless it is gone or stopped."""

Values = dict[str, Any]


def show_status(
    run: str | None, *, connect: str | None, as_json: bool, watch_s: float | None
) -> int:
    """Asks the buffer of `run`, or the one at `connect`, and prints what it says; with `watch_s`
    again and again until the run has ended. Returns the exit code.

    Raises ValueError when there is no such run, or when nobody answers.
    """
    path = find_run(run) if run is not None else None
    address = _address(path, connect)
    run_id = RunDir(path).read_run_id() if path is not None else None
    client = ThreadClient(address, hello=Hello.here("monitor", name="status", run_id=run_id))
    try:
        name = _connect(client, address, path)
        while True:
            values = _ask(client)
            if values is None:
                print(f"the buffer of {name} at {address} answers no more", file=sys.stderr)
                return 2 if watch_s is None else 0
            _print({"run": name, **values}, as_json=as_json, is_watched=watch_s is not None)
            if watch_s is None or values.get("ended"):
                return 0
            time.sleep(watch_s)
    finally:
        client.close()


def _address(path: Path | None, connect: str | None) -> str:
    if connect is not None:
        Address.parse(connect)
        return connect
    if path is None:
        raise ValueError(
            "status of which run? Name its directory, or give --connect tcp://HOST:PORT"
        )
    run_dir = RunDir(path)
    file = run_dir.buffer_address
    if run_dir.replay_of.exists():
        raise ValueError(
            f"{path} is a replay of a recorded run: no buffer knows of it. What it has trained is "
            f"in {run_dir.metrics}, and asyncrl-launch report draws it"
        )
    if not file.exists():
        raise ValueError(f"{path}: no buffer has listened here yet. {journal_says(path)}")
    return str(Address.parse(file.read_text().strip()))


def _connect(client: ThreadClient, address: str, path: Path | None) -> str:
    """The name of the run that is served there. ValueError when it does not answer or refuses."""
    try:
        return client.connect(deadline_s=ANSWER_S).run_name
    except RefusedError as error:
        problem = f"the buffer at {address} refuses: {error}."
    except Unreachable:
        problem = f"no buffer answers at {address} within {ANSWER_S:g} s."
    raise ValueError(f"{problem} {journal_says(path)}" if path is not None else problem)


def _ask(client: ThreadClient) -> Values | None:
    """None when the buffer is gone."""
    try:
        values: Values = client.call(StatusRequest(), deadline_s=ANSWER_S).message.values
    except (Unreachable, RefusedError):
        return None
    return values


def _print(values: Values, *, as_json: bool, is_watched: bool) -> None:
    if as_json:
        print(json.dumps(values), flush=True)
        return
    console = Console(markup=False, emoji=False)
    if is_watched:
        console.clear()
    console.print(screen(values, width=console.width))


def journal_says(path: Path) -> str:
    """How far a run got and whether it has ended, from the files that it left."""
    run = read_run(path)
    if is_nothing_kept(path):
        return f"Of this run {NOTHING_KEPT}."
    if not run.groups:
        return "Its journal holds nothing yet; what its programs said is in logs/."
    times = [beat.at for beat in run.beats] + [group.finished_at or 0.0 for group in run.groups]
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(times)))
    return (
        f"Its journal says: {outcome(run)}; prompts: {fates_text(run.fates)}; "
        f"the last sign of life is of {last}."
    )
