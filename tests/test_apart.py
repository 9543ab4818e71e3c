"""Buffer, learner and generators started apart: any order, joining, dying, coming back."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_runs import REPOSITORY, write_scripted_config
from role_runs import Program, Shells, shells

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_PROMPTS = 60
FAST = "generator.scripted.tokens_per_s=100"


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    """Scripted generators so slow that there is time to do something to them."""
    return write_scripted_config(
        tmp_path / "config.yaml",
        random_tiny_task,
        generator={"engine": "scripted", "scripted": {"mode": "fixed", "tokens_per_s": 5}},
        network={"heartbeat_s": 1.0, "wait_for_buffer_s": 60},
    )


ORDERS = list(itertools.permutations(["buffer", "learner", "generator"]))
QUICK = [("generator", "learner", "buffer"), ("learner", "buffer", "generator")]


@pytest.mark.parametrize(
    "order",
    [pytest.param(order, marks=[] if order in QUICK else [pytest.mark.slow]) for order in ORDERS],
    ids="-".join,
)
def test_three_shells_train_in_whatever_order_they_are_started(
    config: Path, tmp_path: Path, order: tuple[str, ...]
) -> None:
    with shells(config, tmp_path) as run:
        programs = [run.start(role, settings=("max_steps=2", FAST)) for role in order]
        assert run.codes(*programs) == [0, 0, 0], run.logs()
        (run_dir,) = [path for path in tmp_path.iterdir() if (path / "metrics.jsonl").exists()]
        assert (run_dir / "checkpoints" / "version-00000002").is_dir()


def test_a_generator_that_is_stopped_loses_its_leases_and_works_again_when_it_goes_on(
    config: Path, tmp_path: Path
) -> None:
    with shells(config, tmp_path) as run:
        buffer, learner = run.buffer(), run.start("learner")
        first = run.start("generator", "--name", "stopped")
        run.wait_for_step(1)
        first.send(signal.SIGSTOP)
        run.wait_for(lambda: "of its leases pass on" in buffer.output, "the end of its leases")
        second = run.start("generator", "--name", "other")
        run.wait_for_step(5)
        first.send(signal.SIGCONT)
        assert run.codes(buffer, learner, first, second) == [0] * 4, run.logs()
        assert run.fates() == {"trained": NUM_PROMPTS}


def test_a_generator_of_another_run_is_refused_with_both_names(
    config: Path, tmp_path: Path
) -> None:
    with shells(config, tmp_path) as run:
        run.buffer()
        stranger = run.start("generator", settings=("run_name=other",))
        assert stranger.wait() == 2
        assert "other" in stranger.output
        assert run.name in stranger.output
        assert "Traceback" not in stranger.output


def test_a_generator_with_another_tokenizer_is_refused_with_both_hashes(
    config: Path, tmp_path: Path, random_tiny_task: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(random_tiny_task / "model", model)
    tokenizer = model / "tokenizer.json"
    tree = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(tree, indent=3))
    with shells(config, tmp_path) as run:
        run.buffer()
        stranger = run.start("generator", settings=(f"model.path={model}",))
        assert stranger.wait() == 2
        (line,) = [line for line in stranger.output.splitlines() if "does not fit this run" in line]
        assert "tokenizer is" in line
        assert "the buffer has" in line
        assert "Traceback" not in stranger.output


def test_a_run_without_a_generator_says_so(config: Path, tmp_path: Path) -> None:
    with shells(config, tmp_path) as run:
        run.buffer()
        run.start("learner")
        run.wait_for(
            lambda: any(m["role"] == "learner" for m in status(run)["members"]), "the learner"
        )
        run.wait_for(lambda: status(run)["inc"] == 1, "its registration")
        seen = status(run)
        assert seen["waiting_for"] == (
            "step 0: need 4 groups, have 0, 0 in flight; no generator is connected"
        )


def test_a_run_whose_generator_is_stopped_names_it_and_what_it_holds(
    config: Path, tmp_path: Path
) -> None:
    with shells(config, tmp_path) as run:
        run.buffer("network.heartbeat_s=30")
        run.start("learner")
        generator = run.start("generator", "--name", "slow")
        run.wait_for_step(1)
        generator.send(signal.SIGSTOP)
        run.wait_for(lambda: status(run)["waiting_s"] > 2, "the stall")
        seen = status(run)
        leases = seen["leases"]
        (member,) = [m for m in seen["members"] if m["role"] == "generator"]
        assert {lease["member"] for lease in leases} == {member["name"]}
        assert member["pid"] == generator.pid
        missing = 4 - seen["counts"].get("ready", 0)
        assert missing > 0
        assert f"need 4 groups, have {4 - missing}, {len(leases)} in flight" in seen["waiting_for"]
        assert member["name"] in seen["waiting_for"]
        generator.send(signal.SIGCONT)


def status(run: Shells) -> dict[str, Any]:
    """What `asyncrl-launch status` says; no members while the buffer does not answer yet."""
    command = [sys.executable, "-P", "-m", "asyncrl.launch", "status"]
    answer = subprocess.run(
        [*command, "--connect", run.address, "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    values: dict[str, Any] = (
        json.loads(answer.stdout) if answer.returncode == 0 else {"members": []}
    )
    return values


def test_a_learner_that_is_interrupted_leaves_nothing_behind_and_can_come_back(
    config: Path, tmp_path: Path
) -> None:
    with shells(config, tmp_path) as run:
        buffer, generator = run.buffer(), run.start("generator")
        learner = run.start("learner")
        run.wait_for_step(3)
        children = psutil.Process(learner.pid).children(recursive=True)
        learner.send(signal.SIGINT)
        assert learner.wait(15) == 130
        assert not [child for child in children if child.is_running()]
        learner = run.start("learner")
        assert run.codes(buffer, learner, generator) == [0, 0, 0], run.logs()
        assert run.fates() == {"trained": NUM_PROMPTS}


def test_an_interrupted_buffer_drains_the_run_which_goes_on_later(
    config: Path, tmp_path: Path
) -> None:
    with shells(config, tmp_path) as run:
        first = start_all(run)
        run.wait_for_step(3)
        first[0].send(signal.SIGINT)
        assert run.codes(*first) == [130, 0, 0], run.logs()
        last = max(record["step"] for record in run.steps()) + 1
        assert (run.run_dir / "checkpoints" / f"version-{last:08d}").is_dir()
        assert run.codes(*start_all(run, FAST)) == [0, 0, 0], run.logs()
        assert run.fates() == {"trained": NUM_PROMPTS}


def start_all(run: Shells, *settings: str) -> list[Program]:
    return [
        run.buffer(),
        run.start("learner"),
        run.start("generator", settings=settings),
    ]
