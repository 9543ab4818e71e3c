"""A buffer process under load for minutes: its disk stays under the cap, its memory is flat."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_peers import Generator, make_config, make_group, mixed
from test_buffer_process import address_of, begin, buffer_process
from test_journal_room import SavingLearner, disk_bytes

from asyncrl.config import Config
from asyncrl.journal.cap import largest_group_bytes
from asyncrl.messages import Lease, Verdict
from asyncrl.wire import encode_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class LongGenerator(Generator):
    """Its responses have their full length."""

    def __init__(self, address: str, name: str, *, length: int) -> None:
        super().__init__(address, name)
        self.length = length

    async def submit(self, lease: Lease, *, version: int | None = None) -> Verdict:
        group = make_group(
            lease,
            version=self.serving.version,
            inc=self.serving.inc,
            reward_of=mixed,
            length=self.length,
        )
        return await self.submit_frame(lease, encode_group(group))


class WatchingLearner(SavingLearner):
    """Notes disk and memory of the buffer after each step, and forgets the batches."""

    def __init__(self, address: str, *, run_dir: Path, pid: int, keep_last: int) -> None:
        super().__init__(address, "learner-0", keep_last=keep_last)
        self.run_dir, self.pid = run_dir, pid
        self.disk: list[int] = []
        self.rss_mb: list[float] = []

    async def commit(self) -> bool:
        self.batches.clear()
        self.disk.append(disk_bytes(self.run_dir))
        self.rss_mb.append(rss_mb(self.pid))
        return await super().commit()


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no VmRSS")


def train_under_load(run_dir: Path, config: Config, *, steps: int, length: int) -> WatchingLearner:
    config = begin(run_dir, config)

    async def scenario(pid: int, address: str) -> WatchingLearner:
        learner = WatchingLearner(
            address, run_dir=run_dir, pid=pid, keep_last=config.checkpoint.keep_last
        )
        generators = [LongGenerator(address, f"generator-{i}", length=length) for i in range(2)]
        for peer in (learner, *generators):
            peer.fits(config)
        workers = [asyncio.create_task(generator.work(slots=2)) for generator in generators]
        await learner.register()
        await learner.train(stop_at=steps)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for peer in (learner, *generators):
            await peer.close()
        return learner

    with buffer_process(run_dir) as process:
        address = address_of(run_dir, process)
        return asyncio.run(asyncio.wait_for(scenario(process.pid, address), 300))


def test_20_gigabytes_through_a_cap_of_1_leave_the_disk_under_it(tmp_path: Path) -> None:
    length, size = 100_000, 4
    config = make_config(
        max_staleness=2,
        max_epochs=100,
        group_size=size,
        prompts_per_step=8,
        data__max_response_length=length,
        data__max_prompt_length=8,
        learner__max_tokens_per_microbatch=1 << 20,
        buffer__max_journal_gb=1.0,
        checkpoint__every=0,
    )
    steps = -(-20_000_000_000 // (8 * largest_group_bytes(config)))
    began = time.monotonic()
    learner = train_under_load(tmp_path, config, steps=steps, length=length)
    moved = steps * 8 * size * 13 * length
    print(
        f"{moved / 1e9:.1f} GB in {steps} steps and {time.monotonic() - began:.0f} s: disk at most "
        f"{max(learner.disk) / 1e9:.3f} GB, {len(learner.saved)} checkpoints asked for, "
        f"RSS {learner.rss_mb[10]:.0f} MB after 10 steps, at most {max(learner.rss_mb):.0f} MB"
    )
    assert moved > 19.9e9
    assert 0.4e9 < max(learner.disk) <= 1.0e9


@pytest.mark.parametrize("durability", ["process", "none"])
def test_the_memory_of_the_buffer_is_flat_over_300_steps(tmp_path: Path, durability: Any) -> None:
    """Groups of 1 MB, four a step, with a checkpoint whenever 0.25 GB are in use."""
    length, size, steps = 9_600, 8, 300
    config = make_config(
        max_staleness=1,
        max_epochs=100,
        group_size=size,
        data__max_response_length=length,
        data__max_prompt_length=8,
        buffer__max_journal_gb=0.5 if durability == "process" else 0.05,
        buffer__durability=durability,
        checkpoint__every=0,
    )
    assert 0.99e6 < largest_group_bytes(config) < 1.01e6
    (tmp_path / "segments").mkdir()
    learner = train_under_load(tmp_path, config, steps=steps, length=length)
    rss = np.array(learner.rss_mb[100:])
    slope = float(np.polyfit(np.arange(len(rss)), rss, 1)[0])
    print(
        f"durability {durability}: RSS {learner.rss_mb[0]:.1f} MB at first, "
        f"{learner.rss_mb[99]:.1f} MB after 100 steps, {learner.rss_mb[-1]:.1f} MB after {steps}, "
        f"{slope:+.4f} MB a step over the last 200"
    )
    assert abs(slope) < 0.05
