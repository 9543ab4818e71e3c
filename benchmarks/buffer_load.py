"""Producers and one consumer that keep a buffer process busy, as cheaply as can be.

They speak the wire protocol over real sockets, but generate and train nothing: what a producer
submits is encoded before it has a lease, and the consumer reads no array. All live on one thread;
their share of the time is that of this process.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import zmq
from encoded_groups import Frames

from asyncrl.config import Config
from asyncrl.handshake import member_settings
from asyncrl.messages import (
    Batch,
    Checkpointed,
    Commit,
    Committed,
    Fetch,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Leases,
    Message,
    Published,
    Refused,
    Register,
    Registered,
    Role,
    Started,
    Submit,
    Verdict,
    Waiting,
    WatchWeights,
    Weights,
)
from asyncrl.types import WeightId
from asyncrl.wire import decode, encode

CHECKPOINT_EVERY = 5
"""Versions between checkpoints, after which the buffer deletes what is older."""


class Connection:
    """One DEALER socket to the buffer."""

    def __init__(self, address: str, config: Config, role: Role, name: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._num_requests = 0
        settings = member_settings(config, role)
        self.ask(Hello.here(role, name=name, run_id=None, settings=settings))
        self.socket.poll(10_000)
        self.replies()

    def ask(self, message: Message, *frames: bytes) -> int:
        """Sends a request and returns its number."""
        self._num_requests += 1
        self._send(message, self._num_requests, frames)
        return self._num_requests

    def tell(self, message: Message) -> None:
        self._send(message, 0, ())

    def replies(self) -> list[tuple[Any, int]]:
        """What has come: each reply, and the bytes of the frames behind it."""
        found = []
        while int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            header, *frames = self.socket.recv_multipart(copy=False)
            message = decode([header.bytes]).message
            if isinstance(message, Refused):
                raise SystemExit(f"the buffer refused: {message.reason}")
            found.append((message, sum(len(frame) for frame in frames)))
        return found

    def _send(self, message: Message, id: int, frames: tuple[bytes, ...]) -> None:
        self.socket.send_multipart(encode(message, id=id, frames=frames), copy=False)


class Producer:
    """Asks for leases, says that it has started and submits; serves new weights at once."""

    def __init__(
        self, address: str, config: Config, name: str, *, slots: int, frames: Frames
    ) -> None:
        self.connection = Connection(address, config, "generator", name)
        self.is_paused = True
        self.num_in_flight = 0
        self._slots = slots
        self._frames = frames
        self._is_asking = False
        self._serving = WeightId(0, 0)
        self._watch()

    def read(self) -> None:
        for message, _ in self.connection.replies():
            if isinstance(message, Leases):
                self._is_asking = False
                for lease in message.leases:
                    self._submit(lease)
            elif isinstance(message, Verdict):
                if message.verdict != "accepted":
                    raise SystemExit(f"a group was not accepted: {message}")
                self.num_in_flight -= 1
            elif isinstance(message, Weights):
                self._serving = WeightId(message.inc, message.version)
                self.connection.ask(Heartbeat(state="generating", serving=[*self._serving]))
                self._watch()
        self.ask()

    def ask(self) -> None:
        """Asks for as many leases as it has free slots."""
        free = self._slots - self.num_in_flight
        if free and not self._is_asking and not self.is_paused:
            self._is_asking = True
            self.connection.ask(LeaseRequest(slots=free, serving=[*self._serving]))

    def _submit(self, lease: Lease) -> None:
        name: dict[str, Any] = {"kind": lease.kind, "group": lease.group, "attempt": lease.attempt}
        self.connection.tell(Started(**name, version=self._serving.version))
        frame = self._frames.of(lease.group, lease.attempt, self._serving)
        self.connection.ask(Submit(**name), frame)
        self.num_in_flight += 1

    def _watch(self) -> None:
        self.connection.ask(WatchWeights(have=[*self._serving]))


class Consumer:
    """A learner whose steps take no time: fetches ahead, commits, publishes."""

    def __init__(self, address: str, config: Config) -> None:
        self.connection = Connection(address, config, "learner", "learner")
        self.is_paused = True
        self.version = 0
        """Committed."""
        self.num_bytes = 0
        """Of all groups of committed steps."""
        self._inc = 0
        self._fetched: deque[int] = deque()
        """Bytes of the batches that are not committed yet."""
        self._next_step = 0
        self._is_asking = False
        self.connection.ask(Register(checkpoint_version=0, config_digest="bench"))

    def read(self) -> None:
        for message, num_bytes in self.connection.replies():
            if isinstance(message, Registered):
                self._inc = message.inc
            elif isinstance(message, Batch):
                self._fetched.append(num_bytes)
                self._is_asking, self._next_step = False, message.step + 1
                metrics: dict[str, float] = {}
                commit = Commit(inc=self._inc, version=message.step + 1, metrics=metrics)
                self.connection.ask(commit)
            elif isinstance(message, Waiting):
                self._is_asking = False
            elif isinstance(message, Committed):
                self._committed()
        self.ask()

    def ask(self) -> None:
        """Fetches the next batch while the one before is being committed."""
        if self._inc and not self._is_asking and not self.is_paused:
            self._is_asking = True
            self.connection.ask(Fetch(inc=self._inc, step=self._next_step))

    def _committed(self) -> None:
        self.version += 1
        self.num_bytes += self._fetched.popleft()
        published = Published(
            inc=self._inc,
            version=self.version,
            transport="disk",
            location="/w",
            digest=f"{self.version}",
        )
        self.connection.ask(published)
        if self.version % CHECKPOINT_EVERY == 0:
            self.connection.ask(Checkpointed(inc=self._inc, versions=[self.version]))


class Load:
    """Producers and a consumer on one buffer; between two windows they rest."""

    def __init__(
        self, address: str, config: Config, *, producers: int, slots: int, frames: Frames
    ) -> None:
        """`slots`: groups in flight, of all producers together."""
        self.consumer = Consumer(address, config)
        self.producers = [
            Producer(address, config, f"generator-{i}", slots=slots // producers, frames=frames)
            for i in range(producers)
        ]
        self._poller = zmq.Poller()
        peers: list[Producer | Consumer] = [self.consumer, *self.producers]
        self._by_socket = {peer.connection.socket: peer for peer in peers}
        for socket in self._by_socket:
            self._poller.register(socket, zmq.POLLIN)

    def run(self, *, warm_steps: int, seconds: float) -> tuple[int, int, float]:
        """Steps and bytes that were submitted, fetched and committed, and the seconds they took:
        from the end of `warm_steps` to the first commit after `seconds`."""
        self._pause(False)
        warm_at = self.consumer.version + warm_steps
        while self.consumer.version < warm_at:
            self._turn()
        began, version, num_bytes = time.perf_counter(), self.consumer.version, 0
        num_bytes = self.consumer.num_bytes
        took = 0.0
        while took < seconds or self.consumer.version == version:
            self._turn()
            took = time.perf_counter() - began
        steps = self.consumer.version - version
        moved = self.consumer.num_bytes - num_bytes
        self._pause(True)
        while any(producer.num_in_flight for producer in self.producers):
            self._turn()
        return steps, moved, took

    def close(self) -> None:
        for socket in self._by_socket:
            socket.close()

    def _pause(self, is_paused: bool) -> None:
        for peer in self._by_socket.values():
            peer.is_paused = is_paused
            peer.ask()

    def _turn(self) -> None:
        ready = self._poller.poll(10_000)
        if not ready:
            raise SystemExit("the buffer has not answered for 10 s")
        for socket, _ in ready:
            self._by_socket[socket].read()
