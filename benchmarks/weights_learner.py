"""The learner's side of the benchmark of weights: a real buffer, and a learner that only publishes.

The buffer takes no version that is not committed, so steps are committed beforehand, of groups that
somebody made up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from buffer_load import Producer
from encoded_groups import Frames, write_data

from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.load import save_resolved
from asyncrl.config.schema import WeightsSection
from asyncrl.messages import Batch
from asyncrl.run_dir import RunDir
from asyncrl.types import WeightId
from asyncrl.weights_dir import write_version
from generators.engine import Source
from learner.buffer_line import BufferLine
from learner.collective_sender import CollectiveSender
from learner.disk_sender import DiskSender
from learner.joining import join
from learner.policy import DTYPES, load_policy
from learner.ranks import start_ranks
from learner.weights_out import Publisher, Sender

GROUP_TOKENS = 8


class _Feeder(Producer):
    """Submits groups, and follows no weights: nobody waits for it."""

    def _watch(self) -> None:
        """Not asked."""


class PublishingLearner:
    """One rank, with `num_versions` versions to publish."""

    def __init__(self, config: Config, run_dir: RunDir, address: str, *, num_versions: int) -> None:
        self.config, self.run_dir = config, run_dir
        self.ranks = start_ranks()
        connection = join(config, run_dir, address=address, clock=PhaseClock("start"))
        self.line = BufferLine(connection, ranks=self.ranks, patience_s=30.0)
        self.inc = self.line.register(checkpoint_version=0, config_digest="bench").inc
        with feeding(address, config):
            for step in range(num_versions):
                self._commit(step)
        self.policy = load_policy(config, self.ranks)
        self.num_bytes = sum(2 * parameter.numel() for _, parameter in self.policy.masters())
        """Of one version, in bfloat16."""
        self.version = 0
        """Newest that was published."""

    @contextmanager
    def publisher(self, transport: str, *, max_bytes_per_s: int | None) -> Iterator[Publisher]:
        """Slowed down, a version comes in ten broadcasts at least, so that it comes slowly."""
        weights = self.config.weights
        if max_bytes_per_s is not None:
            bucket_bytes = min(weights.bucket_bytes, max(1 << 16, self.num_bytes // 10))
            slowed = {"max_bytes_per_s": max_bytes_per_s, "bucket_bytes": bucket_bytes}
            weights = weights.model_copy(update=slowed)
        sender = self._sender(transport, weights)
        publisher = Publisher(weights, sender, dtype=DTYPES[self.config.model.dtype])
        try:
            yield publisher
        finally:
            publisher.close(drain_s=0.0)

    def publish(self, publisher: Publisher) -> WeightId:
        self.version += 1
        weights = WeightId(self.inc, self.version)
        publisher.snapshot(self.policy, weights)
        return weights

    def write(self, root: Path) -> Source:
        """The next version as files, which the buffer does not hear of."""
        self.version += 1
        weights, dtype = WeightId(self.inc, self.version), DTYPES[self.config.model.dtype]
        tensors = dict(self.policy.gather(dtype))
        bucket_bytes = self.config.weights.bucket_bytes
        written = write_version(root, weights, tensors, bucket_bytes=bucket_bytes)
        return Source(weights=weights, location=str(written.location))

    def close(self) -> None:
        self.line.close("measured")

    def _sender(self, transport: str, weights: WeightsSection) -> Sender:
        if transport == "disk":
            root = self.run_dir.weights(self.config)
            return DiskSender(weights, root, announce=self.line.announce)
        return CollectiveSender(
            weights, host="127.0.0.1", device=self.ranks.device, buffer=self.line
        )

    def _commit(self, step: int) -> None:
        self.line.fetch(step)
        while not isinstance(self.line.next_reply().message, Batch):
            pass
        self.line.commit(step + 1, {})


@contextmanager
def feeding(address: str, config: Config) -> Iterator[None]:
    """Groups come in as fast as they are leased."""
    is_over = threading.Event()

    def feed() -> None:
        frames = Frames(num_tokens=GROUP_TOKENS, group_size=config.group_size)
        producer = _Feeder(address, config, "feeder", slots=8, frames=frames)
        producer.is_paused = False
        producer.ask()
        while not is_over.is_set():
            if producer.connection.socket.poll(20, zmq.POLLIN):
                producer.read()
        producer.connection.socket.close()

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def running_buffer(run_dir: RunDir, config: Config) -> Iterator[str]:
    """`python -P -m buffer` in that directory; its address."""
    write_data(Path(str(config.data.train_files[0])), num_rows=1000)
    save_resolved(config, run_dir.config)
    with (run_dir.path / "log").open("w") as log:
        command = [sys.executable, "-P", "-m", "buffer", str(run_dir.config)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        process = subprocess.Popen(command, stderr=log, env=environment)
    try:
        ends = time.monotonic() + 30
        while not run_dir.buffer_address.exists():
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit((run_dir.path / "log").read_text())
            time.sleep(0.02)
        yield run_dir.buffer_address.read_text().strip()
    finally:
        process.kill()
        process.wait()
