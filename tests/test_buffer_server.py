"""The buffer over real sockets, with scripted generators and learners."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_peers import Peer, make_config, make_group, rows
from serving_buffer import Serving, play, run_to_end, serving, serving_run

from asyncrl.client import RefusedError
from asyncrl.journal import Journal, fates
from asyncrl.messages import (
    Checkpointed,
    Commit,
    End,
    Failed,
    Fetch,
    LeaseRequest,
    Published,
    Register,
    Waiting,
)
from asyncrl.types import GroupId, RolloutGroup
from asyncrl.wire import encode, encode_group
from buffer.prompts import MAX_ROW_BYTES
from buffer.run import Run
from buffer.status import status_values

MIB = 1 << 20
SIZES = (MIB, MIB, MIB * 5 // 2, MAX_ROW_BYTES - 100, MIB, MIB)
"""Characters of prompts; the first three together are over generation.REPLY_BYTES."""


@pytest.mark.parametrize("max_steps", [1, 2, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_run_ends_after_max_steps_within_its_bound(
    tmp_path: Path, max_steps: int, max_staleness: int
) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=max_steps, max_staleness=max_staleness)
        async with serving(tmp_path, config, train=40) as here:
            learner, end = await run_to_end(here)
            assert not end.failed
            assert sorted(learner.batches) == list(range(max_steps))
            assert learner.max_staleness() <= max_staleness
            assert await here.task == 0
        assert fates(tmp_path) == {"trained": 4 * max_steps, "not_issued": 40 - 4 * max_steps}

    play(scenario())


@pytest.mark.parametrize(
    ("last_batch", "sizes", "expected"),
    [
        ("train", [4, 4, 2], {"trained": 10}),
        ("drop", [4, 4], {"trained": 8, "dropped": 2}),
        ("wrap", [4, 4, 4], {"trained": 12}),
    ],
)
def test_end_of_the_data_closes_the_last_batch_as_told(
    tmp_path: Path, last_batch: str, sizes: list[int], expected: dict[str, int]
) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=100, max_staleness=2, data__last_batch=last_batch)
        async with serving(tmp_path, config, train=10) as here:
            learner, end = await run_to_end(here)
            assert [len(frames) for _, frames in learner.batches.values()] == sizes
            assert "data exhausted" in end.reason and not end.failed
            assert await here.task == 0
        assert fates(tmp_path) == expected

    play(scenario())


def test_synchronous_batches_hold_the_prompts_in_order_and_only_fresh_tokens(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=3)) as here:
            learner, _ = await run_to_end(here)
            assert learner.trained_ids() == [GroupId(0, i) for i in range(12)]
            for step in range(3):
                versions = {int(r.versions[0]) for g in learner.groups(step) for r in g.rollouts}
                assert versions == {step}

    play(scenario())


def test_groups_without_spread_are_filtered_and_replaced(tmp_path: Path) -> None:
    def reward_of(id: GroupId, sample: int) -> float:
        return 1.0 if id.position % 3 == 0 else float(sample)

    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=2, max_staleness=1)) as here:
            learner = here.learner()
            await learner.register()
            generator = here.generator(reward_of=reward_of)
            worker = asyncio.create_task(generator.work(slots=1))
            await learner.train()
            await worker
            expected = [i for i in range(12) if i % 3][:8]
            assert [id.position for id in learner.trained_ids()] == expected
            record = learner.records[0].values
            assert record["num_filtered"] >= 2 and 0.5 < record["reward_mean"] < 1
        assert fates(tmp_path) == {"trained": 8, "filtered": 4}

    play(scenario())


def test_a_run_without_usable_groups_stops_and_shows_the_solve_rates(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(buffer__max_filtered_in_a_row=5)
        async with serving(tmp_path, config, train=40) as here:
            learner = here.learner()
            await learner.register()
            worker = asyncio.create_task(here.generator(reward_of=lambda id, sample: 0.0).work())
            end = await learner.train()
            await worker
            assert end is not None and end.failed
            assert "5 groups in a row" in end.reason and "0.0: 5" in end.reason
            assert await here.task == 1
        found = fates(tmp_path)
        assert found["filtered"] == 5 and sum(found.values()) == 40

    play(scenario())


def test_a_wait_says_in_numbers_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            first: Waiting = await learner.ask(Fetch(inc=1, step=0))
            assert first.reason == (
                "step 0: need 4 groups, have 0, 0 in flight; no generator is connected"
            )
            leases = await generator.lease(3)
            await generator.start(leases[0])
            await generator.submit(leases[1])
            second: Waiting = await learner.ask(Fetch(inc=1, step=0))
            assert "need 4 groups, have 1, 2 in flight, oldest 0 s" in second.reason
            assert "group 0/0 at generator-0" in second.reason
            status = await here.monitor().status()
            assert status["waiting_for"] == second.reason
            assert status["counts"] == {"leased": 2, "ready": 1}
            assert sum(status["counts"].values()) == status["admitted"]

    play(scenario())


def test_dead_generators_leases_go_to_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1), max_wait_s=5) as here:
            dead, other = here.generator("generator-0"), here.generator("generator-1")
            lost = await dead.lease(4)
            assert len(lost) == 4
            began = time.monotonic()
            asking = asyncio.create_task(other.lease(4))
            while not asking.done():
                await other.beat()
                await asyncio.sleep(0.1)
            again = asking.result()
            assert [lease.group for lease in again] == [lease.group for lease in lost]
            assert [lease.attempt for lease in again] == [1] * 4
            assert [lease.seed_k for lease in again] == [0] * 4
            assert 0.9 <= time.monotonic() - began < 3
            assert (await other.submit(again[0])).verdict == "accepted"
            assert (await dead.submit(lost[0])).verdict == "superseded"
            assert (await dead.submit(lost[1])).verdict == "accepted"
            assert (await other.submit(again[1])).verdict == "superseded"

    play(scenario())


def test_a_prompt_that_fails_by_its_content_is_quarantined_and_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(buffer__max_attempts=2)
        async with serving(tmp_path, config) as here:
            generator = here.generator()
            for attempt in range(2):
                [lease] = await generator.lease(1)
                assert lease.group == [0, 0]
                assert (lease.attempt, lease.seed_k) == (attempt, attempt)
                await generator.ask(
                    Failed(
                        kind="train",
                        group=lease.group,
                        attempt=lease.attempt,
                        reason="bad prompt",
                        content=True,
                    )
                )
            leases = await generator.lease(9)
            assert [lease.group for lease in leases] == [[0, 1], [0, 2], [0, 3], [0, 4]]
            assert status_values(here.run, now=0)["counts"] == {"quarantined": 1, "leased": 4}

    play(scenario())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda g: g.rollouts[0].logprobs.fill(np.nan), "not finite"),
        (lambda g: g.rollouts[1].versions.fill(3), "newest published one is 0"),
    ],
)
def test_invalid_groups_are_refused_and_leased_again(
    tmp_path: Path, spoil: Any, words: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator = here.generator()
            [lease] = await generator.lease(1)
            group: RolloutGroup = make_group(lease, version=0)
            spoil(group)
            verdict = await generator.submit_frame(lease, encode_group(group))
            assert verdict.verdict == "invalid" and words in verdict.reason
            assert (await generator.submit_frame(lease, b"rubbish")).verdict == "invalid"
            [again] = await generator.lease(1)
            assert (again.group, again.attempt) == (lease.group, 1)

    play(scenario())


def test_nobody_but_its_holder_can_spoil_a_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(buffer__max_attempts=1)) as here:
            holder, stranger = here.generator(), here.generator("stranger")
            [lease] = await holder.lease(1)
            assert (await stranger.submit_frame(lease, b"rubbish")).verdict == "invalid"
            assert status_values(here.run, now=0)["counts"] == {"leased": 1}
            assert (await holder.submit_frame(lease, b"rubbish")).verdict == "invalid"
            assert status_values(here.run, now=0)["counts"] == {"quarantined": 1}

    play(scenario())


def test_a_lease_needs_a_generator_that_serves_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), train=40) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(9):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.commit()
            assert await generator.lease(9) == []
            await generator.beat()
            assert [lease.min_version for lease in await generator.lease(9)] == [1] * 4

    play(scenario())


def test_a_learner_that_comes_back_gets_the_same_batches_and_fences_the_old_one(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=5, max_staleness=2), train=40) as here:
            first = here.learner("learner-a")
            await first.register()
            worker = asyncio.create_task(here.generator().work())
            await first.train(stop_at=3)
            second = here.learner("learner-b")
            registered = await second.register(1)
            assert (registered.inc, registered.committed) == (2, 3)
            with pytest.raises(RefusedError) as refused:
                await first.ask(Commit(inc=1, version=4, metrics={}))
            assert refused.value.code == "fenced"
            await second.train()
            await worker
            for step in (1, 2, 3):
                assert second.batches[step][1] == first.batches[step][1]
                assert second.batches[step][0].replayed == (step < 3)
            assert sorted(second.batches) == [1, 2, 3, 4]
        assert fates(tmp_path)["trained"] == 20

    play(scenario())


def test_registration_is_refused_when_batches_are_gone_or_the_checkpoint_is_ahead(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=8)
        async with serving(tmp_path, config, train=40, segment_bytes=300) as here:
            learner = here.learner()
            await learner.register()
            worker = asyncio.create_task(here.generator().work())
            await learner.train(stop_at=5)
            segments = len(list((tmp_path / "segments").iterdir()))
            await learner.ask(Checkpointed(inc=1, versions=[3, 5]))
            worker.cancel()
            other = here.learner("learner-1")
            with pytest.raises(
                RefusedError, match="deleted: resume from a checkpoint of version 3"
            ):
                await other.register(2)
            with pytest.raises(RefusedError, match="another run"):
                await other.register(7)
            await other.register(3)
            await other.fetch(3)
            assert other.batches[3][1] == learner.batches[3][1]
            await other.ask(Checkpointed(inc=2, versions=[3]))
            assert len(list((tmp_path / "segments").iterdir())) < segments - 5

    play(scenario())


def test_evaluations_come_first_and_last_and_are_pinned(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=4, max_staleness=1, eval__every=2, eval__samples=2)
        async with serving(tmp_path, config, train=40, val=3) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            leases = await generator.lease(4)
            assert [lease.kind for lease in leases] == ["eval"] * 3 + ["train"]
            assert leases[0].temperature == 0.0
            for lease in leases:
                await generator.submit(lease)
            worker = asyncio.create_task(generator.work())
            await learner.train()
            await worker
            evals = [record for record in learner.records if record.name == "eval"]
            assert [record.step for record in evals] == [0, 2, 4]
            assert [record.values["accuracy"] for record in evals] == [0.5] * 3
            assert [record.values["count"] for record in evals] == [6] * 3
            assert evals[2].values["oldest_token_version"] == 4
            assert evals[2].values["accuracy/words"] == 0.5
            assert await here.task == 0

    play(scenario())


def test_evaluation_ends_with_what_is_there_when_its_time_is_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=1, eval__timeout_s=1.0)
        async with serving(tmp_path, config, val=3) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            leases = await generator.lease(7)
            for lease in leases[1:]:
                await generator.submit(lease)
            worker = asyncio.create_task(generator.work())
            end = await learner.train()
            await worker
            assert end is not None and not end.failed
            first = next(record for record in learner.records if record.name == "eval")
            assert (first.values["num_rows"], first.values["num_rows_missing"]) == (3, 1)

    play(scenario())


def test_hello_comes_first_and_must_name_this_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            stranger = Peer(here.server.address, "generator", "stranger", run_id="run-2")
            here.peers.append(stranger)
            with pytest.raises(RefusedError, match="is of run run-2, this buffer serves run-1"):
                await stranger.ask(LeaseRequest(slots=1, serving=[0, 0]))
            generator = here.generator()
            with pytest.raises(RefusedError, match="a generator, cannot ask for register"):
                await generator.ask(Register(checkpoint_version=0, config_digest=""))
            impostor = Peer(here.server.address, "learner", generator.name)
            here.peers.append(impostor)
            with pytest.raises(RefusedError, match="is a generator of this run, not a learner"):
                await impostor.ask(Register(checkpoint_version=0, config_digest=""))

    play(scenario())


def test_a_second_digest_of_a_version_is_told_as_a_fork(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            learner = here.learner()
            for digest in ("one", "two"):
                await learner.register()
                message = Published(
                    inc=learner.inc, version=0, transport="disk", location="/w", digest=digest
                )
                await learner.ask(message)
                learner = here.learner("learner-1")

    with caplog.at_level(logging.WARNING):
        play(scenario())
    assert "fork: version 0 of learner number 2 has digest two" in caplog.text


def test_a_version_that_was_never_committed_cannot_be_published(tmp_path: Path) -> None:
    config = make_config(max_steps=2)

    async def scenario() -> None:
        async with serving(tmp_path, config) as here:
            learner = here.learner()
            await learner.register()
            with pytest.raises(RefusedError, match="version 7 is published by .* at version 0"):
                await learner.publish(7)
            assert here.run.books.training.newest_version == 0
            work = asyncio.create_task(here.generator().work())
            assert await learner.train() is not None  # and a right one gets the run to its end
            assert here.run.books.training.newest_version == 2
            await work

    play(scenario())


def test_buffer_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    config = make_config(max_steps=6, max_staleness=2)
    batches = {}

    async def first_half() -> None:
        async with serving(tmp_path, config, train=40) as here:
            learner = here.learner()
            await learner.register()
            worker = asyncio.create_task(here.generator().work())
            await learner.train(stop_at=3)
            worker.cancel()
            batches.update(learner.batches)

    async def second_half() -> None:
        async with serving(tmp_path, config, train=40) as here:
            learner = here.learner("learner-1")
            assert (await learner.register(2)).committed == 3
            worker = asyncio.create_task(here.generator("generator-1").work())
            await learner.train()
            await worker
            assert learner.batches[2][1] == batches[2][1]
            assert learner.batches[3][1] == batches[3][1]
            assert learner.max_staleness() <= 2

    play(first_half())
    play(second_half())
    assert fates(tmp_path) == {"trained": 24, "not_issued": 16}


def test_a_learner_that_dies_after_the_end_replays_what_its_checkpoint_lacks(
    tmp_path: Path,
) -> None:
    config = make_config(max_steps=3, max_staleness=1)

    async def first_life() -> None:
        async with serving(tmp_path, config, train=20) as here:
            await run_to_end(here)

    async def second_life() -> None:
        async with serving(tmp_path, config, train=20) as here:
            await asyncio.sleep(0.5)  # the end is not declared over the head of the learner
            learner = here.learner("learner-1")
            await learner.register(1)
            end = await learner.train()
            assert end is not None
            assert "max_steps" in end.reason
            assert sorted(learner.batches) == [1, 2]
            assert await here.task == 0

    play(first_life())
    play(second_life())


def test_a_learner_that_comes_back_while_others_hear_of_the_end_is_waited_for(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=3, max_staleness=1), train=20) as here:
            slow = here.generator("slow")
            await slow.status()  # is there, and has not heard
            await run_to_end(here)
            learner = here.learner("learner-1")
            await learner.register(1)
            assert not (await slow.beat()).done
            assert await learner.train() is not None
            assert sorted(learner.batches) == [1, 2]
            assert (await slow.beat()).done
            assert await here.task == 0

    play(scenario())


def test_a_learner_that_dies_during_the_last_evaluation_is_waited_for(tmp_path: Path) -> None:
    config = make_config(max_steps=2, eval__every=0, eval__before_training=False)

    async def scenario() -> None:
        async with serving(tmp_path, config, train=8, val=1) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for step in range(2):
                for lease in await generator.lease(4):
                    await generator.submit(lease)
                await learner.fetch(step)
                await learner.commit()
                await generator.beat()
            await learner.leave()
            (row,) = await generator.lease(1)
            assert row.kind == "eval"
            await generator.submit(row)
            await asyncio.sleep(0.3)
            assert here.run.end is None, "nobody has the last checkpoint yet"
            again = here.learner("learner-1")
            await again.register(1)
            assert (await again.train()) is not None
            assert sorted(again.batches) == [1]

    play(scenario())


def test_a_learner_that_dies_over_its_last_checkpoint_finds_the_buffer_when_it_comes_back(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1), train=4) as here:
            first, generator = here.learner("learner-0"), here.generator()
            await first.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await first.fetch(0)
            await first.commit()
            assert isinstance(await first.fetch(1), End)
            assert (await generator.beat()).done
            await first.leave()  # as a signal makes it, before all is written
            await asyncio.sleep(1.0)
            assert not here.task.done()
            again = here.learner("learner-1")
            await again.register(0)
            assert isinstance(await again.train(), End)
            assert await asyncio.wait_for(here.task, 5) == 0

    play(scenario())


def test_a_run_whose_last_checkpoint_is_never_written_has_not_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(max_steps=1), train=4) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for lease in await generator.lease(4):
                await generator.submit(lease)
            await learner.fetch(0)
            await learner.commit()
            assert isinstance(await learner.fetch(1), End)
            assert (await generator.beat()).done
            await learner.leave()
            assert await asyncio.wait_for(here.task, 10) == 1

    monkeypatch.setattr("buffer.ending.RETURN_S", 0.5)
    play(scenario())


async def train_and_die(here: Serving, *, steps: int) -> None:
    """All is trained, and the learner is killed before it can say that all is written."""
    learner = here.learner()
    await learner.register()
    worker = asyncio.create_task(here.generator().work())
    for step in range(steps):
        await learner.fetch(step)
        await learner.commit()
    assert isinstance(await learner.fetch(steps), End)
    await worker


def test_a_restarted_buffer_ends_a_trained_run_whose_learner_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(max_steps=2)

    async def first_life() -> None:
        async with serving(tmp_path, config) as here:
            await train_and_die(here, steps=2)

    async def second_life() -> None:
        async with serving(tmp_path, config) as here:
            assert await asyncio.wait_for(here.task, 10) == 0
            assert here.run.end is not None
            assert "max_steps" in here.run.end.reason

    play(first_life())
    monkeypatch.setattr("buffer.ending.RETURN_S", 0.5)
    monkeypatch.setattr("buffer.ending.LEAVE_S", 0.5)
    play(second_life())
    assert fates(tmp_path) == {"trained": 8, "not_issued": 4}


def test_a_buffer_that_is_started_again_after_all_is_done_leaves_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(max_steps=2, network__heartbeat_s=0.1)

    async def first_life() -> None:
        async with serving(tmp_path, config) as here:
            await run_to_end(here)
            assert await asyncio.wait_for(here.task, 10) == 0

    async def second_life() -> None:
        async with serving(tmp_path, config) as here:
            assert await asyncio.wait_for(here.task, 5) == 0

    async def with_a_learner() -> None:
        async with serving(tmp_path, config) as here:
            await asyncio.sleep(0)
            learner = here.learner("learner-1")
            await learner.register(2)
            assert isinstance(await learner.fetch(2), End)
            assert not here.run.books.training.is_done  # it may write its checkpoint once more

    play(first_life())
    caplog.set_level(logging.INFO)
    play(second_life())
    assert "the run has ended: all 2 steps of max_steps are trained" in caplog.text
    play(with_a_learner())


def test_a_buffer_that_waits_for_a_learner_to_end_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(max_steps=2)

    async def first_life() -> None:
        async with serving(tmp_path, config) as here:
            await train_and_die(here, steps=2)

    async def second_life() -> None:
        async with serving(tmp_path, config) as here:
            while "start it again" not in caplog.text:
                await asyncio.sleep(0.01)
            assert here.run.end is None

    play(first_life())
    play(second_life())
    [told] = [text for text in caplog.messages if "start it again" in text]
    assert "all 2 steps are assigned, the learner stands at version 2" in told


def test_one_reply_carries_no_more_large_rows_than_fit(tmp_path: Path) -> None:
    data = [{"prompt": "x" * size, "source": "s", "answer": "", "extra": {}} for size in SIZES]

    async def scenario() -> None:
        journal = Journal(tmp_path)
        config = make_config(prompts_per_step=len(SIZES))
        run = Run(config, train=data, val=[], journal=journal, now=time.monotonic())
        async with serving_run(run, max_wait_s=0.3) as here:
            generator = here.generator()
            given = [[x.group[1] for x in await generator.lease(9)] for _ in range(4)]
            assert given == [[0, 1, 2], [3], [4, 5], []]
        journal.close()

    play(scenario())


@pytest.mark.parametrize("spoilt", ["train", "val"])
def test_a_row_too_large_to_send_is_told_before_anything_is_leased(
    tmp_path: Path, spoilt: str
) -> None:
    data = {"train": rows(8), "val": rows(2)}
    data[spoilt][1]["answer"] = "x" * MAX_ROW_BYTES
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match=rf"data.{spoilt}_files: row 1 has \d+ bytes"):
        Run(make_config(), train=data["train"], val=data["val"], journal=journal, now=0.0)
    journal.close()


def test_requests_sent_twice_get_the_same_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator, learner = here.generator(), here.learner()
            for peer in (generator, learner):
                await peer.status()  # says hello
            request = LeaseRequest(slots=2, serving=[0, 0])
            register = Register(checkpoint_version=0, config_digest="")
            for peer, message in ((generator, request), (learner, register)):
                for _ in range(3):
                    await peer.client._socket.send_multipart(encode(message, id=1000))
            await asyncio.sleep(0.3)
            status = await here.monitor().status()
            assert status["counts"] == {"leased": 2}
            assert status["inc"] == 1

    play(scenario())


def test_a_stopped_generator_that_comes_back_is_served_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator = here.generator()
            [before] = await generator.lease(1)
            await asyncio.sleep(1.6)
            assert not here.run.members.by_name["generator-0"].alive
            [again] = await generator.lease(1)
            assert (again.group, again.attempt) == (before.group, 1)
            assert here.run.members.by_name["generator-0"].alive

    play(scenario())


def test_rubbish_in_a_heartbeat_breaks_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator = here.generator()
            await generator.beat(held=[[], [1], [1, 2, 3, 4], [9, 9, 9]])
            assert len(await generator.lease(1)) == 1

    play(scenario())


def test_a_begun_run_refuses_other_data_and_another_batch_size(tmp_path: Path) -> None:
    async def begin() -> None:
        async with serving(tmp_path, make_config()) as here:
            await here.generator().lease()

    play(begin())
    same, other = make_config(), make_config(prompts_per_step=8)
    changed = [row | {"answer": "7"} for row in rows(12)]
    data_differ = r"data.train_files .*was [0-9a-f]{32}, now it is [0-9a-f]{32}: .*resume=PATH"
    for config, data, words in (
        (same, rows(13), data_differ),
        (same, rows(12)[::-1], data_differ),
        (same, changed, data_differ),
        (other, rows(12), r"prompts_per_step of this run was 4, now it is 8: .*resume=PATH"),
    ):
        journal = Journal(tmp_path)
        with pytest.raises(ValueError, match=words):
            Run(config, train=data, val=[], journal=journal, now=0.0)
        journal.close()
