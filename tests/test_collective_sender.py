"""The collective sender with a real buffer and real gloo groups; generators are scripted: they
follow the protocol, or break it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_peers import Generator, make_config
from serving_buffer import Serving, play, serving

from asyncrl.config.schema import WeightsSection
from asyncrl.manifest import Layout, Manifest, check_tensor
from asyncrl.messages import Hello, Message, Ready, Register, Staged, WatchWeights
from asyncrl.process_groups import Group, GroupError, Seat
from asyncrl.thread_client import ThreadClient
from asyncrl.types import WeightId
from asyncrl.wire import Frame, Packet, view
from learner.collective_sender import CollectiveSender
from learner.snapshots import Snapshot
from learner.weights_out import Publisher

STALL_S = 2.0
SPECS = [("a", ("float32", (300, 7))), ("b", ("bfloat16", (5,))), ("c", ("bfloat16", (64, 64)))]


class FakeLine:
    """The sender's way to the buffer, from a thread."""

    def __init__(self, client: ThreadClient) -> None:
        self._client = client

    def ask(self, message: Message) -> Future[Packet]:
        return self._client.call_soon(message, deadline_s=20)

    def tell(self, message: Message, frames: tuple[Frame, ...] = ()) -> Packet | None:
        return self._client.call(message, frames=frames, deadline_s=20)


class Trainer:
    """Publishes versions whose every byte is known."""

    def __init__(self, address: str, config: WeightsSection) -> None:
        hello = Hello(role="learner", member="learner", run_id=None, host="here", pid=1)
        self.client = ThreadClient(address, hello=hello)
        self.client.connect(deadline_s=10)
        self.client.call(Register(checkpoint_version=0, config_digest="x"), deadline_s=10)
        self.sender = CollectiveSender(
            config, host="127.0.0.1", device=torch.device("cpu"), buffer=FakeLine(self.client)
        )
        self.publisher = Publisher(config, self.sender, dtype=torch.float32)

    def publish(self, version: int) -> None:
        """Hands over a snapshot as Publisher.snapshot does, without a policy."""
        slot = self.publisher._take_slot()
        assert slot is not None
        fill(slot, version)
        with self.publisher._state:
            self.publisher._pending = slot
            self.publisher._tell()

    def close(self) -> None:
        self.publisher.close(drain_s=0)
        self.client.close()


def fill(slot: Snapshot, version: int) -> None:
    layout = Layout.of(SPECS)  # type: ignore[arg-type]
    if slot.flat is None:
        slot.flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        slot.tensors = layout.tensors(slot.flat)
    for number, tensor in enumerate(slot.tensors.values()):
        tensor.fill_(100 * version + number)
    slot.weights = WeightId(1, version)


class Follower:
    """A generator that does what the protocol says with weights, and nothing else."""

    def __init__(self, peer: Generator) -> None:
        self.peer = peer
        self.has: list[WeightId] = []
        self.newest = WeightId(0, 0)
        self.joins = True

    async def follow(self, *, until: int) -> None:
        """Takes what is offered until it has a version >= `until`."""
        while self.newest.version < until:
            packet = await self.peer.packet(WatchWeights(have=list(self.newest)))
            if packet.message.transport == "collective":
                await self.take(Manifest.parse(view(packet.frames[0])))

    async def take(self, manifest: Manifest) -> None:
        inc, version = manifest.weights
        while True:
            seat = await self.peer.ask(Ready(inc=inc, version=version, devices=["cpu"]))
            if seat.is_over:
                return
            if seat.roster:
                break
        if not self.joins:
            await asyncio.Event().wait()
        error, is_lost = await asyncio.to_thread(self.receive, manifest, seat)
        await self.peer.ask(
            Staged(inc=inc, version=version, roster=seat.roster, error=error, is_lost=is_lost)
        )
        if not error:
            self.newest = manifest.weights
            self.has.append(self.newest)

    def receive(self, manifest: Manifest, seat: Any) -> tuple[str, bool]:
        layout = Layout.of_manifest(manifest)
        flat = torch.empty(layout.num_bytes, dtype=torch.uint8)
        prefix = f"weights-{manifest.weights}-{seat.roster}"
        place = Seat(seat.host, seat.port, prefix, seat.rank, seat.size, seat.backend)
        try:
            group = Group(place, device=torch.device("cpu"), join_s=STALL_S, stall_s=STALL_S)
            for start in range(0, len(flat), seat.bucket_bytes):
                group.broadcast(flat[start : start + seat.bucket_bytes])
            group.close()
        except GroupError as error:
            return str(error), True
        for name, entry in manifest.entries().items():
            check_tensor(name, entry, layout.tensors(flat)[name], where="the test")
        return "", False


@asynccontextmanager
async def scene(tmp_path: Path, **weights: Any) -> AsyncIterator[tuple[Serving, Trainer]]:
    config = WeightsSection(
        transport="collective", stall_timeout_s=STALL_S, bucket_bytes=1 << 16, **weights
    )
    async with serving(tmp_path, make_config()) as here:
        here.run.books.training.position = 1000  # any version may be published
        trainer = await asyncio.to_thread(Trainer, here.server.address, config)
        here.run.books.training.position = 1000
        try:
            yield here, trainer
        finally:
            await asyncio.to_thread(trainer.close)


def test_every_generator_gets_every_byte_of_the_newest_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            followers = [Follower(here.generator(f"generator-{i}")) for i in range(3)]
            following = [asyncio.create_task(f.follow(until=5)) for f in followers]
            for version in range(1, 6):
                trainer.publish(version)
                await asyncio.sleep(0.05)
            await asyncio.gather(*following)
            for follower in followers:
                assert follower.has == sorted(set(follower.has))
                assert follower.has[-1] == WeightId(1, 5)

    play(scenario())


def test_a_joiner_is_sent_the_newest_version_although_nothing_new_is_trained(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            trainer.publish(3)
            for name in ("early", "late", "later"):
                follower = Follower(here.generator(name))
                await follower.follow(until=3)
                assert follower.has == [WeightId(1, 3)]

    play(scenario())


def test_a_generator_that_never_comes_costs_the_others_one_stall(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            good, bad = (Follower(here.generator(name)) for name in ("good", "bad"))
            bad.joins = False
            stuck = asyncio.create_task(bad.follow(until=1))
            following = asyncio.create_task(good.follow(until=1))
            trainer.publish(1)
            await following
            assert good.has == [WeightId(1, 1)]
            lost = trainer.sender.metrics()["num_lost"]
            again = asyncio.create_task(good.follow(until=2))
            trainer.publish(2)
            await again
            assert trainer.sender.metrics()["num_lost"] == lost, "it was waited for again"
            stuck.cancel()

    play(scenario())


def test_a_buffer_that_forgot_the_offer_is_offered_it_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            trainer.publish(1)
            await Follower(here.generator("first")).follow(until=1)
            here.run.transfers.withdraw()
            second = Follower(here.generator("second"))
            await second.follow(until=1)
            assert second.has == [WeightId(1, 1)]

    play(scenario())


def test_when_every_generator_refuses_the_publisher_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            peer = here.generator("generator")
            trainer.publish(1)
            while (await peer.ask(WatchWeights(have=[0, 0]))).transport != "collective":
                pass
            await peer.ask(Ready(inc=1, version=1, error="tensor x is missing"))
            while "tensor x is missing" not in trainer.publisher.trouble():
                await asyncio.sleep(0.01)

    play(scenario())


def test_nothing_is_left_of_broadcasts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            follower = Follower(here.generator("generator"))
            trainer.publish(1)
            await follower.follow(until=1)
            while "broadcast" in {thread.name for thread in threading.enumerate()}:
                await asyncio.sleep(0.01)
            before = num_open()
            for version in range(2, 12):
                trainer.publish(version)
                await follower.follow(until=version)
            while "broadcast" in {thread.name for thread in threading.enumerate()}:
                await asyncio.sleep(0.01)
            assert num_open() <= before + 4

    play(scenario())


def num_open() -> int:
    """Files and threads of this process."""
    return sum(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("fd", "task"))


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_is_not_of_this_machine_is_refused_with_the_setting(host: str) -> None:
    with pytest.raises(ValueError, match=r"weights\.host"):
        CollectiveSender(
            WeightsSection(),
            host=host,
            device=torch.device("cpu"),
            buffer=FakeLine(None),  # type: ignore[arg-type]
        )


def test_nccl_without_a_gpu_is_refused_with_the_setting() -> None:
    with pytest.raises(ValueError, match=r"weights\.backend"):
        CollectiveSender(
            WeightsSection(backend="nccl"),
            host="127.0.0.1",
            device=torch.device("cpu"),
            buffer=FakeLine(None),  # type: ignore[arg-type]
        )


async def lose(peer: Generator) -> None:
    """Takes a seat for version 1, and loses it."""
    seat = await peer.ask(Ready(inc=1, version=1))
    while not seat.roster:
        seat = await peer.ask(Ready(inc=1, version=1))
    await peer.ask(Staged(inc=1, version=1, roster=seat.roster, error="broken", is_lost=True))


def test_generators_that_are_lost_and_ask_no_more_are_no_reason_to_give_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            trainer.publish(1)
            await lose(here.generator("lost"))
            while trainer.sender.failing_since is None:
                await asyncio.sleep(0.01)
            while trainer.sender.failing_since is not None:
                await asyncio.sleep(0.01)

    play(scenario())


def test_who_is_lost_is_no_reason_to_give_up_where_another_has_the_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as (here, trainer):
            trainer.publish(1)
            await Follower(here.generator("good")).follow(until=1)
            await lose(here.generator("lost"))
            while trainer.publisher.num_failed == 0:
                await asyncio.sleep(0.01)
            assert trainer.sender.failing_since is None
            assert trainer.publisher.trouble() == ""

    play(scenario())
