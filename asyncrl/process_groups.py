"""Process groups beside torch's default one: one for each transfer of weights, made by hand.

The sender listens (`Meeting`), says over an authenticated channel where, and every member joins by
its rank. Everything here blocks, and nothing can be interrupted: what a dead or stopped member does
is an error at its deadline. So callers use threads that they can do without (Disposable).
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from asyncrl.address import Address
from asyncrl.backends import Backend
from asyncrl.nccl import make_nccl

T = TypeVar("T")

POLL_S = 0.005
CONNECT_S = 1.0
"""The least that a member of a loaded machine gets for one try to connect."""


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
    backend: Backend


class Meeting:
    """The sender's store, on one interface of this machine, at a port that the system chooses.
    Close it when the group is made or given up."""

    def __init__(self, host: str, *, timeout_s: float) -> None:
        """`host`: an address of this machine, or a name of one. Members that have come wait at most
        `timeout_s` for an answer. Raises OSError when it is none, or stands for all interfaces."""
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(str(where[0]).partition("%")[0]).is_unspecified:
            raise OSError(errno.EADDRNOTAVAIL, "it stands for all interfaces")
        listener = socket.create_server((str(where[0]), 0), family=family)
        self.host, self.port = str(where[0]), int(listener.getsockname()[1])
        self.store: TCPStore | None = TCPStore(
            self.host,
            self.port,
            None,
            True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def close(self) -> None:
        """Port and thread are gone when the sender's group is closed too. May be called twice."""
        self.store = None


class Group:
    """One member's end of a group. Close it in a thread that may hang."""

    def __init__(
        self,
        seat: Seat,
        *,
        device: torch.device,
        join_s: float,
        stall_s: float,
        store: TCPStore | None = None,
    ) -> None:
        """Waits until all members are there, at most `join_s`; connecting to one that has died just
        then may take as long again, and 5 s at least. No later operation takes longer than
        `stall_s`. The sender passes its own `store`. Raises GroupError that names who is missing.
        """
        self.device = device
        self._is_sender = seat.rank == 0
        self._stall = timedelta(seconds=stall_s)
        # Training and decoding go on in the device's own stream: nothing here may wait for them,
        # nor they for a member that stands still.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            self._group: Any = _join(seat, store, join_s, self._stall)
        except (RuntimeError, OSError) as error:
            problem = f"not everybody came to {seat.prefix}: {_in_words(error)}"
        else:
            return
        del store  # an error is kept for longer than a port may be
        raise GroupError(problem)

    def broadcast(self, data: torch.Tensor) -> None:
        """From rank 0 to all others: `data` (uint8, contiguous) is read there and written here.
        What the sender has on the host crosses to the group's device first. It is all there when
        this returns. Raises GroupError."""
        assert data.dtype == torch.uint8 and data.is_contiguous(), (data.dtype, data.stride())
        assert self._is_sender or data.device.type == self.device.type, data.device
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._stall
        try:
            if self._stream is not None and data.is_cuda:
                # Memory is handed out again while what used it before may still be under way.
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):  # nothing without a stream, as on CPUs
                data = data.to(self.device)
                self._group.broadcast([data], options).wait(self._stall)
                if self._stream is not None:
                    self._stream.synchronize()
        except RuntimeError as error:
            raise GroupError(
                f"a member of the group is gone or stands still: {_in_words(error)}"
            ) from None

    def abort(self) -> None:
        """Ends operations under way where the backend can (NCCL); others end at their deadline."""
        if self.device.type == "cuda":
            self._group.abort()

    def close(self) -> None:
        """May take as long as an operation. May be called twice."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.shutdown()


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
        """What the call returned, or, once, what it raised. TimeoutError when it has not ended: it
        goes on by itself."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"no end within {timeout_s:g} s")
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it would hold all that its frames hold
        return self._result  # type: ignore[return-value]


def host_towards(address: Address | str) -> str:
    """The address of this machine on the interface that leads to `address` (tcp://HOST:PORT).
    Raises OSError without a route. Nothing is sent."""
    target = Address.parse(address) if isinstance(address, str) else address
    family, _, _, _, where = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def _join(seat: Seat, store: TCPStore | None, join_s: float, stall: timedelta) -> Any:
    """The process group. Raises RuntimeError or OSError."""
    ends = time.monotonic() + join_s
    shared = PrefixStore(seat.prefix, _connect(seat, join_s) if store is None else store)
    _meet(seat, shared, ends)
    if seat.backend == "nccl":
        return make_nccl(shared, seat.rank, seat.size, stall)
    return _make_gloo(seat, shared, max(0.0, ends - time.monotonic()))


def _connect(seat: Seat, join_s: float) -> TCPStore:
    # A store would try a closed port again and again, and write a stack trace for each try.
    socket.create_connection((seat.host, seat.port), timeout=join_s).close()
    return TCPStore(seat.host, seat.port, None, False, timeout=timedelta(seconds=join_s))


def _meet(seat: Seat, store: Any, ends: float) -> None:
    """Until the sender has seen everybody. Backends look for the others by themselves, but at the
    address of one that has given up they wait five times as long as they are told to."""
    store.set(f"here/{seat.rank}", "")
    missing = list(range(1, seat.size)) if seat.rank == 0 else []
    while missing or seat.rank != 0:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if not missing and (seat.rank == 0 or store.check(["all"])):
            break
        if time.monotonic() > ends:
            who = ", ".join(map(str, missing))
            raise RuntimeError(
                f"rank {who} of {seat.size} is missing" if who else "the sender waits for others"
            )
        time.sleep(POLL_S)
    if seat.rank == 0:
        store.set("all", "")


def _make_gloo(seat: Seat, store: Any, left_s: float) -> Any:
    options = ProcessGroupGloo._Options()
    own = seat.host if seat.rank == 0 else host_towards(Address(seat.host, seat.port))
    options._devices = [ProcessGroupGloo.create_device(hostname=own)]
    options._timeout = timedelta(seconds=max(left_s / 5, CONNECT_S))  # gloo connects 5 times
    options._threads = 1
    return ProcessGroupGloo(store, seat.rank, seat.size, options)


def _in_words(error: Exception) -> str:
    """What a backend says, without the places in its source and its advice."""
    first = str(error).strip().partition("\n")[0]
    return re.sub(r"\[/\S+\] ?", "", first).partition(". This is typically")[0]
