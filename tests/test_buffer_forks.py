"""A learner that comes back changed, prompts that cannot be helped, and groups that do not fit."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_peers import Learner, make_config, make_group
from serving_buffer import play, serving

from asyncrl.journal import fates
from asyncrl.messages import Failed, Lease, Published, Register
from asyncrl.types import GroupId, RolloutGroup
from asyncrl.wire import encode_group
from buffer.status import status_values


async def register(learner: Learner, version: int, digest: str) -> None:
    reply = await learner.ask(Register(checkpoint_version=version, config_digest=digest))
    learner.inc, learner.version, learner.committed = reply.inc, version, reply.committed


def test_a_changed_learner_gets_its_batches_again_and_newer_groups_are_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        config = make_config(max_staleness=2, max_steps=6)
        async with serving(tmp_path, config, train=40) as here:
            learner, generator = here.learner("learner-a"), here.generator()
            await register(learner, 0, "one")
            for version in range(3):
                for lease in await generator.lease(4):
                    await generator.submit(lease)
                await learner.fetch(version)
                await learner.commit()
                await generator.beat()
            ready, flying, granted = await generator.lease(3)
            await generator.submit(ready)
            await generator.start(flying)
            await generator.status()  # behind `start`, which is not answered

            changed = here.learner("learner-b")
            await register(changed, 1, "two")
            values = status_values(here.run, now=0.0)
            assert values["forks"] == 1
            assert values["counts"] == {"trained": 4, "assigned": 8, "waiting": 2, "leased": 1}
            assert (await generator.submit(flying)).verdict == "superseded"
            assert (await generator.submit(granted)).verdict == "accepted"
            again = await generator.lease(2)
            assert [lease.group for lease in again] == [ready.group, flying.group]
            for lease in again:
                await generator.submit(lease)
            worker = asyncio.create_task(generator.work())
            await changed.train()
            await worker
            for step in (1, 2):
                assert changed.batches[step][1] == learner.batches[step][1]
        assert fates(tmp_path) == {"trained": 24, "not_issued": 16}

    with caplog.at_level(logging.WARNING):
        play(scenario())
    assert "fork: the learner comes back at version 1 with another training" in caplog.text
    assert "2 groups without one that newer versions began are generated anew" in caplog.text


def test_the_same_configuration_is_no_fork(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), train=40) as here:
            for name in ("learner-a", "learner-b"):
                await register(here.learner(name), 0, "one")
            assert status_values(here.run, now=0.0)["forks"] == 0

    play(scenario())


def test_a_second_digest_of_a_version_counts_as_a_fork_also_after_a_restart(
    tmp_path: Path,
) -> None:
    async def first_life() -> None:
        async with serving(tmp_path, make_config()) as here:
            for name, digest in (("learner-a", "x"), ("learner-b", "x"), ("learner-c", "y")):
                learner = here.learner(name)
                await learner.register()
                for _ in range(2):  # sent twice
                    message = Published(
                        inc=learner.inc, version=0, transport="disk", location="/w", digest=digest
                    )
                    await learner.ask(message)
            assert status_values(here.run, now=0.0)["forks"] == 1

    async def second_life() -> None:
        async with serving(tmp_path, make_config()) as here:
            assert status_values(here.run, now=0.0)["forks"] == 1

    play(first_life())
    play(second_life())


def hopeless(lease: Lease) -> Failed:
    return Failed(
        kind=lease.kind,
        group=lease.group,
        attempt=lease.attempt,
        reason="the prompt has 2000 tokens, 1024 are allowed",
        content=True,
        hopeless=True,
    )


def test_a_hopeless_prompt_is_dropped_at_once_and_others_take_its_place(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make_config(max_steps=2, buffer__max_filtered_in_a_row=2)
        async with serving(tmp_path, config, train=20) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for _ in range(4):
                [lease] = await generator.lease(1)
                assert (await generator.ask(hopeless(lease))).verdict == "accepted"
                assert (await generator.ask(hopeless(lease))).verdict == "superseded"
            worker = asyncio.create_task(generator.work())
            end = await learner.train()
            await worker
            assert end is not None and not end.failed
            assert learner.trained_ids() == [GroupId(0, i) for i in range(4, 12)]
            assert learner.records[0].name == "buffer"
            assert learner.records[0].values["num_failed"] == 4
        assert fates(tmp_path) == {"dropped": 4, "trained": 8, "not_issued": 8}

    play(scenario())


def test_a_run_whose_prompts_are_all_hopeless_ends_and_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), train=5) as here:
            learner, generator = here.learner(), here.generator()
            await learner.register()
            for _ in range(5):
                [lease] = await generator.lease(1)
                await generator.ask(hopeless(lease))
            end = await learner.end()
            assert end.failed
            assert "the data gave no step" in end.reason
            assert "5 prompts were dropped" in end.reason
            assert "2000 tokens, 1024 are allowed" in end.reason
        assert fates(tmp_path) == {"dropped": 5}

    play(scenario())


def test_a_hopeless_evaluation_row_is_given_up_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), val=2) as here:
            generator = here.generator()
            bad, good = await generator.lease(2)
            assert (await generator.ask(hopeless(bad))).verdict == "accepted"
            await generator.submit(good)
            [result] = status_values(here.run, now=0.0)["evals"]
            assert (result["num_rows"], result["num_rows_missing"]) == (2, 1)

    play(scenario())


def spoilt(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    fields = {name: getattr(group, name) for name in RolloutGroup.__slots__}
    return RolloutGroup(**(fields | changes))


@pytest.mark.parametrize("kind", ["train", "eval"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7, leased at"),
        ({"inc": 3}, "weights of learner number 3, the current one is 1"),
        ({"prompt_ids": np.array([1, -1], np.int32)}, "the prompt has no tokens, or one that is"),
        ({"prompt_ids": np.array([], np.int32)}, "the prompt has no tokens"),
    ],
)
def test_a_group_that_does_not_fit_its_lease_is_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), val=int(kind == "eval")) as here:
            await here.learner().register()
            generator = here.generator()
            [lease] = await generator.lease(1)
            assert lease.kind == kind
            group = spoilt(make_group(lease, version=0), **changes)
            verdict = await generator.submit_frame(lease, encode_group(group))
            assert verdict.verdict == "invalid"
            assert words in verdict.reason
            assert (await generator.submit(lease)).verdict != "invalid"

    play(scenario())


def test_a_negative_token_id_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            generator = here.generator()
            [lease] = await generator.lease(1)
            group = make_group(lease, version=0)
            group.rollouts[1].token_ids[0] = -5
            verdict = await generator.submit_frame(lease, encode_group(group))
            assert verdict.reason == "rollout 1 has a token id of -5"

    play(scenario())
