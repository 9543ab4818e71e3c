"""What the buffer's path is compared with: the same bytes written, and the same bytes echoed."""

from __future__ import annotations

import itertools
import multiprocessing
import sqlite3
import struct
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from asyncrl.journal.tables import TABLES

SEGMENT_BYTES = 64 << 20
ROWS_PER_GROUP = 5
"""Rows that the journal writes for a group: leased, started, finished, assigned, trained."""
KEPT_SEGMENTS = 8


class BareWrites:
    """Payloads appended to segment files and rows to SQLite, by a bare loop on one thread."""

    def __init__(self, directory: Path, *, payloads: Sequence[bytes]) -> None:
        directory.mkdir()
        self._directory = directory
        self._payloads = itertools.cycle(payloads)
        self._database = sqlite3.connect(directory / "bare.sqlite", isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(TABLES)
        (num_columns,) = self._database.execute(
            "SELECT COUNT(*) FROM pragma_table_info('groups')"
        ).fetchone()
        self._insert = f"INSERT OR REPLACE INTO groups VALUES({','.join('?' * num_columns)})"
        self._rest = ("x",) * (num_columns - 3)
        self._num_groups = 0
        self._segment = 0
        self._left = 0
        self._file: Any = None

    def run(self, *, seconds: float, groups_per_transaction: float) -> tuple[int, float]:
        """Groups written and the seconds they took."""
        began, before = time.perf_counter(), self._num_groups
        took, owed = 0.0, 0.0
        while took < seconds:
            owed += groups_per_transaction
            self._transaction(int(owed))
            owed -= int(owed)
            took = time.perf_counter() - began
        return self._num_groups - before, took

    def close(self) -> None:
        self._database.close()
        if self._file is not None:
            self._file.close()

    def _transaction(self, num_groups: int) -> None:
        numbers = range(self._num_groups, self._num_groups + num_groups)
        for _ in numbers:
            self._append()
        self._database.execute("BEGIN")
        for _ in range(ROWS_PER_GROUP):
            rows = [(number, 0, number, *self._rest) for number in numbers]
            self._database.executemany(self._insert, rows)
        self._database.execute("COMMIT")
        self._num_groups += num_groups

    def _append(self) -> None:
        payload = next(self._payloads)
        if self._left < len(payload):
            self._segment, self._left = self._segment + 1, SEGMENT_BYTES
            if self._file is not None:
                self._file.close()
            self._file = (self._directory / f"{self._segment}").open("wb", buffering=0)
            (self._directory / f"{self._segment - KEPT_SEGMENTS}").unlink(missing_ok=True)
        self._file.write(payload)
        self._left -= len(payload)


def num_transactions(run_dir: Path) -> int:
    """Transactions of a journal so far, from the header of SQLite's shared index of its WAL."""
    with (run_dir / "journal.sqlite-shm").open("rb") as file:
        (changes,) = struct.unpack("=8xI", file.read(12))
    return int(changes)


class Echo:
    """A ROUTER in a process of its own that sends back what DEALERs send."""

    def __init__(self, *, producers: int, payloads: Sequence[bytes]) -> None:
        """As many groups in flight as there are payloads."""
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(there,), daemon=True
        )
        self._process.start()
        address = here.recv()
        self._payloads = itertools.cycle(payloads)
        self._slots = len(payloads) // producers
        self._sockets: list[zmq.Socket[bytes]] = [
            zmq.Context.instance().socket(zmq.DEALER) for _ in range(producers)
        ]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)

    def run(self, *, seconds: float) -> tuple[int, float]:
        """Groups echoed and the seconds they took."""
        began = time.perf_counter()
        took, count, in_flight = 0.0, 0, 0
        to_send = deque(socket for socket in self._sockets for _ in range(self._slots))
        while to_send or in_flight:
            while to_send:
                to_send.popleft().send(next(self._payloads), copy=False)
                in_flight += 1
            for socket, _ in self._poller.poll():
                while int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
                    socket.recv(copy=False)
                    count, in_flight = count + 1, in_flight - 1
                    took = time.perf_counter() - began
                    if took < seconds:
                        to_send.append(socket)
        return count, took

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._process.terminate()
        self._process.join()


def _echo(there: Connection) -> None:
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    there.send(router.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
    while True:
        router.send_multipart(router.recv_multipart(copy=False), copy=False)
