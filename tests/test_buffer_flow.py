"""Nothing grows without bound, and nothing is dropped: slow learners, disks that stand still,
greedy senders. Real sockets, and a pipe in the place of a file."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import make_config, rows
from serving_buffer import Serving, play, serving, serving_run

from asyncrl import transport
from asyncrl.client import Client
from asyncrl.journal import Journal, fates
from asyncrl.journal.segments import MAX_AT_ONCE
from asyncrl.journal.tables import Change
from asyncrl.messages import Hello, Ok, Submit
from asyncrl.transport import Server
from asyncrl.types import GroupId
from asyncrl.wire import Packet, view
from buffer.groups import State
from buffer.loop_clock import LoopClock
from buffer.run import Run

MIB = 1 << 20
HELLO = Hello(role="monitor", member="monitor-1", run_id=None, host="here", pid=1)


class StandingDisk:
    """A file that takes nothing until `drain` lets it: a named pipe without a reader."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.mkfifo(path)

    async def drain(self) -> None:
        """Takes all until the writer closes it."""

        def read() -> None:
            with self._path.open("rb") as pipe:
                while pipe.read(MIB):
                    pass

        self._reading = asyncio.create_task(asyncio.to_thread(read))


def test_a_slow_learner_makes_generators_wait_and_every_group_is_trained(tmp_path: Path) -> None:
    config = make_config(max_steps=6, max_staleness=2, prompts_per_step=4)
    most = (config.max_staleness + 1) * config.prompts_per_step

    async def scenario() -> None:
        async with serving(tmp_path, config, train=40) as here:
            highest = [0]
            watching = asyncio.create_task(watch_outstanding(here, highest))
            generators = [here.generator(f"generator-{i}") for i in range(8)]
            workers = [asyncio.create_task(each.work(slots=64)) for each in generators]
            learner = here.learner()
            await learner.register()
            while here.run.books.ledger.groups.counts[State.READY] < most:
                await asyncio.sleep(0.01)
            extra = here.generator("generator-8")
            assert await extra.lease(64) == []  # waits, and gets nothing
            assert (await learner.status())["step"] == 0
            await learner.train()
            await asyncio.gather(*workers)
            watching.cancel()
            assert highest[0] == most
            trained = learner.trained_ids()
            assert sorted(trained) == [GroupId(0, i) for i in range(24)]
            verdicts = {v.verdict for each in generators for v in each.verdicts}
            assert verdicts == {"accepted"}
        assert fates(tmp_path) == {"trained": 24, "not_issued": 16}

    play(scenario())


async def watch_outstanding(here: Serving, highest: list[int]) -> None:
    while True:
        highest[0] = max(highest[0], len(here.run.books.ledger.policy.outstanding))
        await asyncio.sleep(0)


def test_while_the_disk_stands_still_submits_wait_and_signs_of_life_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.client.RESEND_S", 0.1)  # each submit comes several times
    config = make_config(max_steps=1, max_staleness=1, prompts_per_step=4)

    async def scenario() -> None:
        async with serving(tmp_path, config, train=40, segment_bytes=1 << 30) as here:
            learner, generator, other = here.learner(), here.generator(), here.generator("other")
            await learner.register()
            disk = StandingDisk(tmp_path / "segments" / "000001")
            leases = await generator.lease(4)
            submits = [asyncio.create_task(generator.submit(lease)) for lease in leases]
            while here.run.books.ledger.groups.counts[State.READY] < 4:
                await asyncio.sleep(0.01)
            fetching = asyncio.create_task(learner.fetch(0))
            for _ in range(5):
                began = time.monotonic()
                await generator.beat()
                await other.beat()
                assert (await other.status())["admitted"] == 4
                assert time.monotonic() - began < 0.5
                await asyncio.sleep(0.1)
            assert not any(submit.done() for submit in submits) and not fetching.done()
            await disk.drain()
            assert [(await submit).verdict for submit in submits] == ["accepted"] * 4
            await fetching
            assert learner.trained_ids() == [GroupId(0, i) for i in range(4)]

    play(scenario())


def test_nobody_is_dead_for_what_the_buffer_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_HELD_BYTES", 1)
    config = make_config(max_steps=1, prompts_per_step=2, network__heartbeat_s=0.1)

    async def scenario() -> None:
        async with serving(tmp_path, config, segment_bytes=1 << 30) as here:
            learner, generator, silent = here.learner(), here.generator(), here.generator("silent")
            await learner.register()
            leases = [*await generator.lease(1), *await silent.lease(1)]
            disk = StandingDisk(tmp_path / "segments" / "000001")
            submit = asyncio.create_task(generator.submit(leases[0]))
            while here.run.books.ledger.groups.counts[State.READY] < 1:
                await asyncio.sleep(0.01)
            beats = asyncio.create_task(generator.beat_for_ever())
            await asyncio.sleep(1.0)  # ten heartbeats
            members = here.run.members.by_name
            dead = [each.name for each in members.values() if not each.alive]
            held = here.run.books.ledger.held(leases[1].group_id, 0, by="silent")
            was_done = submit.done()
            await disk.drain()
            assert not was_done and not dead and held is not None
            assert (await submit).verdict == "accepted"
            while members["silent"].alive:  # it is heard no more, and dies now
                await asyncio.sleep(0.01)
            assert members["generator-0"].alive
            beats.cancel()

    play(scenario())


def test_a_request_that_is_sent_again_while_it_is_being_answered_is_not_begun_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.client.RESEND_S", 0.02)
    begun: list[int] = []
    may_answer = asyncio.Event()

    async def handle(peer: bytes, packet: Packet) -> Any:
        begun.append(packet.id)
        if isinstance(packet.message, Submit):
            await may_answer.wait()
        return Ok()

    async def scenario() -> None:
        async with listening(handle) as client:
            slow = asyncio.create_task(submit(client, b"x"))
            await asyncio.sleep(0.2)  # ten times sent
            await client.call(HELLO, deadline_s=5)  # what was sent before has arrived
            assert begun == [1, 2]
            may_answer.set()
            await slow

    play(scenario())


def test_frames_of_unanswered_requests_are_bounded_and_the_rest_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_HELD_BYTES", 3 * MIB)
    begun: list[int] = []
    may_answer = asyncio.Event()

    async def handle(peer: bytes, packet: Packet) -> Any:
        begun.append(packet.id)
        await may_answer.wait()
        return Ok()

    async def scenario() -> None:
        async with listening(handle) as client:
            calls = [asyncio.create_task(submit(client, bytes(MIB))) for _ in range(20)]
            while len(begun) < 4:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # the others have had their time
            assert len(begun) == 4
            may_answer.set()
            await asyncio.gather(*calls)
            assert set(begun) == set(range(1, 21))  # a client may resend while it connects

    play(scenario())


def test_many_payloads_are_written_at_once_and_read_back(tmp_path: Path) -> None:
    payloads = [bytes([i % 251]) * (i % 7) for i in range(2 * MAX_AT_ONCE + 5)]
    journal = Journal(tmp_path, segment_bytes=3000)
    refs = [journal.append(payload) for payload in payloads]
    journal.write(Change()).result(timeout=10)
    journal.close()
    assert len({ref.segment for ref in refs}) > 2
    again = Journal(tmp_path)
    assert [bytes(view(again.read(ref))) for ref in refs] == payloads
    again.close()


def test_the_record_of_a_step_says_how_long_the_loop_was_held_up(tmp_path: Path) -> None:
    clock = LoopClock()

    async def scenario() -> None:
        config = make_config(max_steps=2)
        journal = Journal(tmp_path)
        run = Run(config, train=rows(12), val=[], journal=journal, now=time.monotonic())
        async with serving_run(run, max_wait_s=0.3, clock=clock) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            worker = asyncio.create_task(generator.work())
            await learner.fetch(0)
            await learner.commit()
            time.sleep(0.2)  # nobody gets to run
            await learner.train()
            await worker
        journal.close()
        records = [record for record in learner.records if record.name == "buffer"]
        lags = {record.step: record.values["loop_lag_ms"] for record in records}
        assert 0 < lags[0] < 200 <= lags[1]

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))


async def submit(client: Client, frame: bytes) -> Packet:
    message = Submit(kind="train", group=[0, 0], attempt=0)
    return await client.call(message, frames=(frame,), deadline_s=20)


@asynccontextmanager
async def listening(handler: transport.Handler) -> AsyncIterator[Client]:
    """A client of a server with this handler."""
    server = Server("tcp://127.0.0.1:0", handler)
    reading = asyncio.create_task(server.serve())
    client = Client(server.address, hello=HELLO)
    try:
        yield client
    finally:
        await client.close()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await server.close()
