"""Joins the run that a buffer serves, on the lead: the connection, signs of life, the farewell.

Imports no torch, so that a buffer that is not there, or refuses, is told before torch is loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from asyncrl.client import RefusedError, Unreachable
from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.handshake import member_settings
from asyncrl.heartbeat import HeartbeatThread
from asyncrl.messages import Heartbeat, Hello, Leave
from asyncrl.run_dir import RunDir
from asyncrl.thread_client import ThreadClient

log = logging.getLogger(__name__)

LEAVE_S = 1.0
"""How long this side's own farewell may take when it ends before the run does."""
DONE_S = 10.0
"""The same when all its work is done: the buffer stays until it has heard so."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The lead's connection: requests, and signs of life beside them."""

    client: ThreadClient
    signs: HeartbeatThread


def join(config: Config, run_dir: RunDir, *, address: str, clock: PhaseClock) -> Connection:
    """The lead's connection, after the buffer's welcome. From then on it gives signs of life.

    Waits network.wait_for_buffer_s. Raises Unreachable, and RefusedError when this learner does
    not fit the run.
    """
    settings = member_settings(config, "learner")
    run_id = run_dir.read_run_id()
    hello = Hello.here("learner", name="learner", run_id=run_id, settings=settings)
    client = ThreadClient(address, hello=hello)
    client.heed_line(lambda is_up: _on_line(clock, is_up))
    welcome = client.connect(deadline_s=config.network.wait_for_buffer_s)

    def look() -> Heartbeat:
        seconds, state_s = clock.total(), clock.phase_s()
        return Heartbeat(state="starting", state_s=state_s, seconds=seconds, serving=[0, 0])

    signs = HeartbeatThread(
        address,
        hello=client.hello,
        interval_s=welcome.heartbeat_s,
        look=look,
        on_done=lambda: None,  # the answer to a Fetch says why as well
    )
    signs.start()
    return Connection(client, signs)


def _on_line(clock: PhaseClock, is_up: bool) -> None:
    """Without a buffer nobody waits for a batch, but for the buffer."""
    without, with_buffer = "wait_buffer", "wait_batch"
    clock.instead(without if is_up else with_buffer, with_buffer if is_up else without)


def leave(client: ThreadClient, reason: str, *, is_done: bool = False) -> None:
    """Says why this learner ends, from any thread, and whether its work is done. A buffer that
    does not hear it in time notices by itself, later."""
    patience_s = DONE_S if is_done else LEAVE_S
    message = Leave(reason=reason, is_done=is_done)
    try:
        client.call_soon(message, deadline_s=patience_s).result(timeout=patience_s)
    except (Unreachable, RefusedError, TimeoutError) as error:
        log.debug("no farewell: %s", error)
