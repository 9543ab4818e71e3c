"""What survives at each level of buffer.durability, and what is said where nothing does."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_peers import Generator, make_config, rows
from serving_buffer import play, run_to_end, serving_run
from test_buffer_process import address_of, begin, buffer_process
from test_journal import payload_of, row

from asyncrl.config import Config
from asyncrl.journal import Journal, fates
from asyncrl.journal.memory import MemoryJournal
from asyncrl.journal.segments import CHECKSUM_BYTES
from asyncrl.journal.tables import Change
from asyncrl.launch.status import journal_says
from asyncrl.messages import Checkpointed
from asyncrl.report.reading import read_run
from asyncrl.report.summary import outcome, prompts_text
from buffer.room import open_journal
from buffer.run import Run


def memory_run(run_dir: Path, config: Config, *, train: int) -> Run:
    journal = open_journal(run_dir, config)
    assert isinstance(journal, MemoryJournal)
    return Run(config, train=rows(train), val=[], journal=journal, now=time.monotonic())


def test_with_durability_none_a_run_comes_to_its_end_and_leaves_no_books(tmp_path: Path) -> None:
    config = make_config(buffer__durability="none", max_staleness=1)

    async def scenario() -> None:
        run = memory_run(tmp_path, config, train=12)
        async with serving_run(run, max_wait_s=0.3) as here:
            learner, end = await run_to_end(here)
            assert not end.failed
            assert sorted(learner.trained_ids()) == [(0, n) for n in range(12)]
        run.books.journal.close()

    play(scenario())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.lock", "journal.none"]
    with pytest.raises(ValueError, match=r"there is no journal .* nothing is kept"):
        fates(tmp_path)


def test_with_durability_none_checkpoints_free_the_memory_of_older_groups(tmp_path: Path) -> None:
    config = make_config(buffer__durability="none", max_staleness=1)

    async def scenario() -> None:
        run = memory_run(tmp_path, config, train=40)
        async with serving_run(run, max_wait_s=0.3) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for step in range(3):
                for lease in await generator.lease(4):
                    await generator.submit(lease)
                await learner.fetch(step)
                await learner.commit()
                await generator.beat()
            one = len(learner.batches[0][1][0])
            assert abs(run.books.journal.num_bytes - 12 * one) < 12
            await learner.ask(Checkpointed(inc=learner.inc, versions=[2, 3]))
            assert abs(run.books.journal.num_bytes - 4 * one) < 4
            assert (await learner.fetch(2)).type == "batch"
        run.books.journal.close()

    play(scenario())


def test_a_run_whose_books_have_ended_with_its_buffer_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "version-00000002").mkdir(parents=True)
    config = make_config(buffer__durability="none")
    open_journal(tmp_path, config).close()  # nothing was handed out: nothing is lost
    run = memory_run(tmp_path, config, train=12)

    async def hand_out() -> None:
        async with serving_run(run, max_wait_s=0.3) as here:
            assert await here.generator().lease(1)

    play(hand_out())
    run.books.journal.close()
    for durability in ("none", "process", "full"):
        with pytest.raises(ValueError) as refusal:
            open_journal(tmp_path, make_config(buffer__durability=durability))
        assert "its books ended with its buffer, as buffer.durability was none" in str(
            refusal.value
        )
        assert f"checkpoint.resume={tmp_path}/checkpoints/version-00000002" in str(refusal.value)


def test_a_stopped_run_that_kept_nothing_is_told_how_another_begins_from_it(tmp_path: Path) -> None:
    run = memory_run(tmp_path, make_config(buffer__durability="none", max_staleness=1), train=12)

    async def scenario() -> None:
        async with serving_run(run, max_wait_s=0.3) as here:
            learner = here.learner()
            await learner.register()
            worker = asyncio.create_task(here.generator().work())
            await learner.train(stop_at=1)
            here.server.drain("SIGINT")
            await learner.commit()
            end = await learner.end()
            assert end.stopped
            assert "it cannot go on, as nothing is kept" in end.reason
            assert "with another run_name and checkpoint.resume=RUN/checkpoints/" in end.reason
            assert "resume=auto" not in end.reason
            await worker

    play(scenario())


@pytest.mark.e2e
def test_a_killed_buffer_that_kept_nothing_ends_with_code_2_and_what_to_do(tmp_path: Path) -> None:
    config = begin(tmp_path, make_config(buffer__durability="none"))

    async def hand_out(address: str) -> None:
        generator = Generator(address, "generator-0").fits(config)
        assert len(await generator.lease(4)) == 4
        journal = (await generator.status())["journal"]
        assert (journal["durability"], journal["num_bytes"]) == ("none", 0)
        await generator.close()

    with buffer_process(tmp_path) as process:
        asyncio.run(asyncio.wait_for(hand_out(address_of(tmp_path, process)), 30))
        assert "nothing is kept of what became of its prompts" in journal_says(tmp_path)
        assert outcome(read_run(tmp_path)).startswith("not known: nothing is kept")
        assert prompts_text(read_run(tmp_path)) == "not known"
    with buffer_process(tmp_path) as process:
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "error: the run in" in stderr
    assert "there is no checkpoint in it to begin from, so start from the model" in stderr
    assert "Traceback" not in stderr


def test_a_run_with_a_journal_is_not_gone_on_with_without_one(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with pytest.raises(ValueError, match="has a journal, which buffer.durability=none would not"):
        open_journal(tmp_path, make_config(buffer__durability="none"))


def test_keeping_payloads_for_ever_in_memory_alone_is_refused(tmp_path: Path) -> None:
    config = make_config(buffer__durability="none", buffer__keep_payloads="always")
    with pytest.raises(ValueError, match=r"keep_payloads: always, but buffer\.durability=none"):
        open_journal(tmp_path, config)


def test_a_fork_frees_the_payloads_of_groups_that_are_generated_anew(tmp_path: Path) -> None:
    journal = MemoryJournal(tmp_path)
    ref = journal.append(b"12345")
    journal.write(Change(groups=(row(0, ref=ref),)))
    assert (journal.num_bytes, journal.read(ref)) == (5, b"12345")
    journal.write(Change(groups=(row(0, state="waiting"),)))
    assert journal.num_bytes == 0
    journal.close()


def test_with_durability_full_all_is_synced_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and directories as the disk has them are noted at each fsync of this process."""
    synced: dict[str, Any] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_dir = path.is_dir()
        synced[str(path)] = {p.name for p in path.iterdir()} if is_dir else path.stat().st_size

    monkeypatch.setattr(os, "fsync", fsync)
    journal = Journal(tmp_path, durability="full", segment_bytes=5_000)
    assert {"journal.sqlite", "segments"} <= synced[str(tmp_path)]
    for number in range(40):
        ref = journal.append(payload_of(number))
        journal.write(Change(groups=(row(number, ref=ref),))).result(timeout=5)
        segment = tmp_path / "segments" / f"{ref.segment:06d}"
        assert synced[str(segment)] >= ref.offset + ref.length
        assert segment.name in synced[str(tmp_path / "segments")]
    assert ref.segment > 3
    assert journal._database._sql.execute("PRAGMA synchronous").fetchone() == (2,)
    journal.close()


def test_without_full_nothing_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("fsync"))
    journal = Journal(tmp_path)
    ref = journal.append(payload_of(1))
    journal.write(Change(groups=(row(1, ref=ref),))).result(timeout=5)
    assert journal._database._sql.execute("PRAGMA synchronous").fetchone() == (1,)
    journal.close()


def test_after_a_restart_closed_segments_can_go_before_anything_is_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    ref = journal.append(bytes(100))
    journal.write(Change(groups=(row(0, ref=ref, state="trained", step=0),))).result(timeout=5)
    journal.close()
    again = Journal(tmp_path, segment_bytes=100)
    assert again.num_bytes == 100 + CHECKSUM_BYTES
    again.retain(from_step=1, settled=[]).result(timeout=5)
    assert again.num_bytes == 0
    assert list((tmp_path / "segments").iterdir()) == []
    again.close()


def wal_bytes(run_dir: Path) -> int:
    return (run_dir / "journal.sqlite-wal").stat().st_size


def test_a_reader_in_the_middle_of_its_query_stalls_no_write_and_leaves_no_large_log(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    for number in range(1000):
        journal.write(Change(groups=(row(number),)))
    journal.write(Change()).result(timeout=5)
    reader = sqlite3.connect(f"file:{tmp_path / 'journal.sqlite'}?mode=ro", uri=True)
    reader.execute("BEGIN")
    assert reader.execute("SELECT COUNT(*) FROM groups").fetchone() == (1000,)

    slowest, text = 0.0, "x" * 20_000
    for number in range(1500):
        began = time.monotonic()
        journal.write(Change(meta={f"{number % 50}": text})).result(timeout=5)
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 1.0
    assert wal_bytes(tmp_path) > 20 << 20  # what the reader holds
    assert reader.execute("SELECT COUNT(*) FROM groups").fetchone() == (1000,)
    reader.close()
    for number in range(300):
        journal.write(Change(meta={f"{number % 50}": text})).result(timeout=5)
    assert wal_bytes(tmp_path) <= 17 << 20
    journal.close()


def test_readers_that_come_and_go_keep_the_log_small(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(600):
        change = Change(groups=(row(number % 50),), meta={"x": "y" * 20_000})
        journal.write(change).result(timeout=5)
        assert fates(tmp_path)["ready"] == min(number + 1, 50)
    assert wal_bytes(tmp_path) < 8 << 20
    journal.close()
