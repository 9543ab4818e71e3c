"""Whole runs whose generators and learner break broadcasts of weights: nobody else notices much."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from role_runs import Program, Shells, shells
from transfer_runs import (
    applied,
    check_increasing,
    drain,
    is_stopped,
    least_open,
    median_working_s,
    newest_applied,
    read_rows,
    start_faulty,
    versions_of_tokens,
    write_transfer_config,
)

pytestmark = pytest.mark.e2e

STOPPED_S = 20.0
GOOD = "generator-0"
BAD = "generator-1"


def test_a_run_goes_on_when_a_generator_is_killed_after_the_third_bucket(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    config = write_transfer_config(
        tmp_path, random_tiny_task, max_steps=16, weights={"max_bytes_per_s": 8_000_000}
    )
    with shells(config, tmp_path) as run:
        programs = [run.buffer(), run.start("learner"), run.start("generator", "--name", GOOD)]
        bad = start_faulty(run, "kill@2", name=BAD)
        assert bad.wait() == -signal.SIGKILL, run.logs()
        broken = newest_applied(run, GOOD)
        assert run.codes(*programs) == [0, 0, 0], run.logs()
        check_increasing(applied(run, GOOD))
        assert newest_applied(run, GOOD) > broken, run.logs()


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("fault", ["kill", "raise", "absent", "stop"])
def test_a_generator_that_breaks_a_broadcast_disturbs_neither_training_nor_the_others(
    tmp_path: Path, random_tiny_task: Path, fault: str
) -> None:
    config = write_transfer_config(tmp_path, random_tiny_task, max_steps=700)
    with shells(config, tmp_path) as run:
        buffer, learner = run.buffer(), run.start("learner")
        good = run.start("generator", "--name", GOOD)
        bad = start_faulty(run, f"{fault}@4", name=BAD)
        run.wait_for(lambda: newest_applied(run, GOOD) >= 2, "a broadcast")
        before = [least_open(program) for program in (learner, good)]
        run.wait_for(lambda: f"planted: {fault}" in bad.output, "the fault")
        num_before, broken = len(run.steps()), newest_applied(run, GOOD)
        if fault == "stop":
            stand_still(run, bad)
        run.wait_for(lambda: newest_applied(run, GOOD) > broken + 1, "later versions")
        if fault != "kill":
            run.wait_for(lambda: newest_applied(run, BAD) > broken, "its own return")
        after = [least_open(program) for program in (learner, good)]
        drain(run, buffer, learner, good, *([] if fault == "kill" else [bad]))
        check_increasing(applied(run, GOOD))
        check_increasing(applied(run, BAD))
        check_undisturbed(run, num_before)
        for early, late in zip(before, after, strict=True):
            assert late["ports"] <= early["ports"], (before, after)
            assert late["threads"] <= early["threads"] + 2, (before, after)
            assert late["files"] <= early["files"] + 4, (before, after)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_learner_killed_in_the_middle_of_a_broadcast_is_followed_by_its_successor(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    config = write_transfer_config(
        tmp_path, random_tiny_task, checkpoint={"every": 4, "export_hf": False}
    )
    with shells(config, tmp_path) as run:
        buffer, learner = run.buffer(), run.start("learner")
        others = [start_faulty(run, "tell@8", name=GOOD), run.start("generator", "--name", BAD)]
        run.wait_for(lambda: "planted: tell" in others[0].output, "the third bucket")
        learner.kill()
        learner = run.start("learner")
        assert run.codes(buffer, learner, *others) == [0] * 4, run.logs()
        for name in (GOOD, BAD):
            check_increasing(applied(run, name))
            assert applied(run, name)[-1][0] == 2, "it serves what the second learner trained"


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_joiner_begins_with_the_newest_version_while_another_generator_dies(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    config = write_transfer_config(tmp_path, random_tiny_task, max_steps=700)
    with shells(config, tmp_path) as run:
        buffer, learner = run.buffer(), run.start("learner")
        first = run.start("generator", "--name", GOOD)
        second = start_faulty(run, "kill@3", name=BAD)
        run.wait_for(lambda: newest_applied(run, GOOD) >= 10, "version 10")
        assert second.wait() == -signal.SIGKILL
        at_join = newest_published(run)
        third = run.start("generator", "--name", "joiner")
        run.wait_for(lambda: len(versions_of_tokens(run, "joiner")) >= 10, "its groups")
        run.wait_for(lambda: len(applied(run, GOOD)) >= 10, "ten versions")
        drain(run, buffer, learner, first, third)
        check_increasing(applied(run, "joiner"))
        tokens = versions_of_tokens(run, "joiner")
        assert min(tokens) >= at_join, (tokens[:1], at_join)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_a_slow_receiver_skips_versions_and_ends_with_the_newest(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    """Steps of a fraction of a second, and transfers of two."""
    config = write_transfer_config(tmp_path, random_tiny_task, weights={"max_bytes_per_s": None})
    with shells(config, tmp_path) as run:
        buffer, learner = run.buffer(), run.start("learner")
        slow = start_faulty(run, "slow@1", name=GOOD)
        assert run.codes(buffer, learner, slow) == [0] * 3, run.logs()
        versions = applied(run, GOOD)
        check_increasing(versions)
        num_steps = len(run.steps())
        assert 3 <= len(versions) < num_steps, versions
        # One is being received and one waits when the run ends.
        received_last = run.steps()[-1]["publish/num_published"]
        assert len(versions) >= received_last - 2, (versions, received_last)


def stand_still(run: Shells, bad: Program) -> None:
    """It has stopped itself; it goes on after STOPPED_S. Meanwhile the others go on."""
    run.wait_for(lambda: is_stopped(bad), "SIGSTOP")
    ends, trained, newest = (
        time.monotonic() + STOPPED_S,
        len(run.steps()),
        newest_applied(run, GOOD),
    )
    run.wait_for(lambda: time.monotonic() > ends, "the end of its stop")
    assert len(run.steps()) > trained, "training stood still with it"
    assert newest_applied(run, GOOD) > newest, "the other generator got nothing meanwhile"
    bad.send(signal.SIGCONT)


def check_undisturbed(run: Shells, num_before: int) -> None:
    """Steps took what they took before, which on a loaded machine is not very exact."""
    records = run.steps()
    before, after = records[2:num_before], records[num_before : num_before + 12]
    assert len(before) >= 2 and len(after) >= 5, (len(before), len(after))
    assert median_working_s(after) < 2 * median_working_s(before) + 0.1, [
        (record["step"], record["time/step_s"]) for record in records
    ]


def newest_published(run: Shells) -> int:
    rows = read_rows(run.run_dir, "SELECT max(version) AS version FROM weights")
    version: int = rows[0]["version"]
    return version
