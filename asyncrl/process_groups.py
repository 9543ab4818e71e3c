"""Process groups beside torch's default one: one for each transfer of weights, made by hand.

The sender listens (`Meeting`), says over an authenticated channel where, and every member joins by
its rank. Everything here blocks, and nothing can be interrupted: what a dead or stopped member does
is an error at its deadline. So callers use threads that they can do without (Disposable).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.address import Address

T = TypeVar("T")


class GroupError(RuntimeError):
    """The group could not be made, or a member of it is gone: nothing more comes through it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a group: where to meet, and as whom."""

    host: str
    port: int
    prefix: str
    """Unique for each group, so that nobody meets those of another one."""
    rank: int
    """0 sends."""
    size: int
    backend: str
    """gloo or nccl."""


class Meeting:
    """The sender's store, on one interface of this machine, at a port that the system chooses."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        """Raises OSError when `host` is not an address of this machine."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self.host, self.port = host, int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            self.port,
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class Group:
    """One member's end of a group. Close it in a thread that may hang."""

    def __init__(
        self,
        seat: Seat,
        *,
        device: torch.device,
        join_s: float,
        stall_s: float,
        store: Any = None,
    ) -> None:
        """Waits until all members are there, at most `join_s`; later on no operation takes longer
        than `stall_s`. The sender passes its own `store`. Raises GroupError."""
        self.device = device
        self._stall = timedelta(seconds=stall_s)
        try:
            self._group = _make(seat, store, join_s, self._stall)
        except RuntimeError as error:
            raise GroupError(f"not everybody came to {seat.prefix}: {error}") from None

    def broadcast(self, data: torch.Tensor) -> None:
        """From rank 0 to all others: `data` (uint8, on the group's device) is read there and
        written here. Raises GroupError."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._stall
        try:
            self._group.broadcast([data], options).wait(self._stall)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except RuntimeError as error:
            raise GroupError(f"a member of the group is gone or stands still: {error}") from None

    def abort(self) -> None:
        """Ends operations under way where the backend can (NCCL); others end at their deadline."""
        abort = getattr(self._group, "abort", None)
        if self.device.type == "cuda" and abort is not None:
            abort()

    def close(self) -> None:
        """May take as long as an operation."""
        del self._group


class Disposable(Generic[T]):
    """One call in a daemon thread that nobody has to wait for."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self._ended = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:
                self._error = error
            self._ended.set()

        threading.Thread(target=run, name=name, daemon=True).start()

    def result(self, *, timeout_s: float) -> T:
        """What the call returned, or what it raised. TimeoutError when it has not ended: it goes
        on by itself."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"no end within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


def host_towards(address: Address | str) -> str:
    """The address of this machine on the interface that leads to `address` (tcp://HOST:PORT).
    Raises OSError without a route. Nothing is sent."""
    target = Address.parse(address) if isinstance(address, str) else address
    family, _, _, _, where = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _make(seat: Seat, store: Any, join_s: float, stall: timedelta) -> Any:
    if store is None:
        store = TCPStore(seat.host, seat.port, None, False, timeout=timedelta(seconds=join_s))
    prefixed = PrefixStore(seat.prefix, store)
    if seat.backend == "nccl":
        return _make_nccl(seat, prefixed, stall)
    options = ProcessGroupGloo._Options()
    own = host_towards(Address(seat.host, seat.port))
    options._devices = [ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=join_s)
    options._threads = 1
    return ProcessGroupGloo(prefixed, seat.rank, seat.size, options)


def _make_nccl(seat: Seat, store: Any, stall: timedelta) -> Any:
    """Without the watchdog's habit of ending the process: a lost transfer is tried again."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = stall
    return ProcessGroupNCCL(store, seat.rank, seat.size, options)
