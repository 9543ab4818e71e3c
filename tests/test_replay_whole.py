"""Runs of whole programs, trained once more from their journals."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from local_runs import Launched, launched, run_local, write_scripted_config
from recorded_runs import launch_replay, same_state

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 8


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_scripted_config(
        tmp_path / "config.yaml",
        random_tiny_task,
        max_steps=STEPS,
        checkpoint={"every": 3, "keep_last": 2},
        network={"heartbeat_s": 0.5},
    )


def replay(run: Path, *overrides: str) -> str:
    """What it printed."""
    process = launch_replay(run, *overrides)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    return errors


def assert_same_end(run: Path, replayed: Path) -> None:
    assert same_state(run, replayed, STEPS)
    final = Path("final") / "model.safetensors"
    assert (run / final).read_bytes() == (replayed / final).read_bytes()


def compared(errors: str) -> tuple[int, int]:
    """Versions with the recorded digest, of how many that were compared."""
    found = re.search(r"(\d+) of (\d+) published versions", errors)
    assert found, errors
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("mode", ["fixed", "by_version"])
def test_a_replay_gives_the_parameters_of_a_run_whose_learner_was_killed(
    mode: str, config: Path, tmp_path: Path
) -> None:
    scripted = f"generator.scripted.mode={mode}"
    with launched(config, scripted, directory=tmp_path) as launcher:
        launcher.wait_for_steps(5)
        launcher.children("learner")[0].kill()
        finished = launcher.finish(90)
    assert finished.code == 0, finished.logs()
    errors = replay(finished.run_dir)
    same, all_ = compared(errors)
    assert same == all_ > 0, errors
    assert "fork" not in errors
    assert_same_end(finished.run_dir, tmp_path / "run-replay")


def test_a_replay_of_two_ranks_gives_the_parameters_of_two_ranks(
    config: Path, tmp_path: Path
) -> None:
    finished = run_local(config, "local.learner_ranks=2", directory=tmp_path)
    assert finished.code == 0, finished.logs()
    replay(finished.run_dir)
    assert_same_end(finished.run_dir, tmp_path / "run-replay")


def test_a_killed_replay_goes_on_by_the_same_command(config: Path, tmp_path: Path) -> None:
    finished = run_local(config, directory=tmp_path)
    process = launch_replay(finished.run_dir, "max_steps=5")
    replayed = Launched(process, tmp_path / "run-replay")
    replayed.wait_for_steps(4)
    process.kill()
    process.communicate()
    shutil.rmtree(tmp_path / "run-replay" / "checkpoints" / "version-00000005", ignore_errors=True)
    errors = replay(finished.run_dir, "checkpoint.resume=auto")
    assert "going on from the checkpoint of version 3" in errors
    assert_same_end(finished.run_dir, tmp_path / "run-replay")


def test_a_run_that_began_from_the_checkpoint_of_another_one_is_replayed_from_there(
    config: Path, tmp_path: Path
) -> None:
    first = run_local(config, "max_steps=4", directory=tmp_path, name="first")
    origin = first.run_dir / "checkpoints" / "version-00000004"
    second = run_local(config, f"checkpoint.resume={origin}", directory=tmp_path, name="second")
    assert second.code == 0, second.logs()
    same, all_ = compared(replay(second.run_dir))
    assert same == all_ > 0
    assert_same_end(second.run_dir, tmp_path / "second-replay")


def test_a_run_that_goes_on_is_replayed_up_to_where_it_is(config: Path, tmp_path: Path) -> None:
    slow = ("generator.scripted.tokens_per_s=1", "generator.max_concurrent_rollouts=8")
    with launched(config, *slow, "max_steps=15", directory=tmp_path) as launcher:
        launcher.wait_for_steps(3)
        began = time.time()
        errors = replay(launcher.run_dir)
        assert launcher.process.poll() is None, f"the run took less than {time.time() - began} s"
        finished = launcher.finish(150)
    assert finished.code == 0, finished.logs()
    same, all_ = compared(errors)
    assert same == all_ >= 2, errors
    assert re.search(r"(\d+) of the \1 steps", errors), errors
