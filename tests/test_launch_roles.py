"""Programs by commands of their own: what is refused before they start, and how they are told."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from learner_cases import make_groups
from local_runs import REPOSITORY, write_scripted_config
from role_runs import Shells, free_port, shells
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.config.load import load_config
from learner.checkpoint import State, save_checkpoint
from learner.optimizer import Optimizer
from learner.policy import load_policy
from learner.ranks import start_ranks
from learner.train_step import train_step

pytestmark = pytest.mark.e2e

ONE_STEP = ("max_steps=1", "generator.scripted.tokens_per_s=500")


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_scripted_config(tmp_path / "config.yaml", random_tiny_task)


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that ended by itself, and what it said on stderr."""

    code: int
    errors: str
    seconds: float


def refused(config: Path, role: str, *arguments: str) -> Refused:
    """Runs a command that is expected to end within 15 s."""
    command = [sys.executable, "-P", "-m", "asyncrl.launch", role, str(config), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr, done.stderr
    return Refused(done.returncode, done.stderr, time.monotonic() - began)


@contextmanager
def listening(config: Path, directory: Path) -> Iterator[Shells]:
    """A run whose buffer listens."""
    with shells(config, directory) as run:
        buffer = run.buffer()
        run.wait_for(lambda: "listening on" in buffer.output, "the buffer")
        yield run


@pytest.mark.parametrize("role", ["learner", "generator"])
def test_a_buffer_that_is_not_there_is_told_with_its_address(
    config: Path, tmp_path: Path, role: str
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    found = refused(config, role, "--connect", address, "network.wait_for_buffer_s=2")
    assert found.code == 2
    assert f"waiting for the buffer at {address} (2 s)" in found.errors
    assert f"no answer from the buffer at {address}" in found.errors
    assert found.seconds < 15


def test_a_port_that_is_taken_is_told_with_its_address(config: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        found = refused(config, "buffer", f"network.buffer={address}", f"output_dir={tmp_path}")
    assert found.code == 2
    assert f"cannot listen on {address}" in found.errors
    assert found.seconds < 15
    assert [path for path in tmp_path.iterdir() if (path / "run_id").exists()] == []


def test_what_does_not_belong_to_the_run_is_refused_and_the_run_is_not_disturbed(
    config: Path, tmp_path: Path
) -> None:
    with listening(config, tmp_path) as run:
        connect = (f"output_dir={tmp_path}", "--connect", run.address)
        cases = [
            (("generator", "model.path=no/such/model"), ["model.path", "no/such/model"]),
            (("generator", "reward.path=no_such.py:score"), ["reward.path", "no_such.py"]),
            (("generator", "run_name=other"), ["other", "run"]),
            (("learner", "max_staleness=1"), ["max_staleness is 1", "the buffer has 2"]),
            (("generator", "--name", "../up"), ["--name ../up"]),
        ]
        for (role, *arguments), says in cases:
            found = refused(config, role, *arguments, *connect)
            assert found.code == 2
            assert all(text in found.errors for text in says), found.errors
        (run.run_dir / "run_id").write_text("feedfacefeedface")
        found = refused(config, "generator", *connect)
        assert found.code == 2
        assert "is of run feedfacefeedface" in found.errors
        assert "has joined" not in run.programs[0].output


def test_a_run_directory_has_one_buffer(config: Path, tmp_path: Path) -> None:
    with listening(config, tmp_path) as run:
        again = ("run_name=run", "checkpoint.resume=auto", "network.buffer=tcp://127.0.0.1:0")
        found = refused(config, "buffer", f"output_dir={tmp_path}", *again)
        assert found.code == 2
        assert f"is in use by process {run.programs[0].pid}" in found.errors


def test_settings_that_a_run_cannot_go_on_with_leave_its_configuration_as_it_was(
    config: Path, tmp_path: Path
) -> None:
    with listening(config, tmp_path) as run:
        run.programs[0].kill()
        before = (run.run_dir / "config.yaml").read_bytes()
        again = ("run_name=run", "checkpoint.resume=auto", f"network.buffer={run.address}")
        found = refused(config, "buffer", f"output_dir={tmp_path}", *again, "group_size=3")
        assert found.code == 2
        assert "group_size of this run was 2, now it is 3" in found.errors
        assert (run.run_dir / "config.yaml").read_bytes() == before


def write_checkpoint(config: Config, root: Path) -> Path:
    """What a learner wrote after one step on made-up groups."""
    policy = load_policy(config, start_ranks())
    optimizer = Optimizer(policy, config.learner.optim)
    train_step(policy, optimizer, make_groups(2), config)
    state = State(1, optimizer.num_steps, optimizer.num_updates, config.seed, config_digest="")
    save_checkpoint(root, policy, optimizer, state, is_lead=True)
    return root / "version-00000001"


def test_a_new_run_begins_from_a_checkpoint_of_another_one(config: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(load_config(config), tmp_path / "first")
    with shells(config, tmp_path) as run:
        run.start("buffer", settings=("run_name=run", f"checkpoint.resume={checkpoint}", *ONE_STEP))
        learner = run.start("learner", settings=(*ONE_STEP, "network.wait_for_buffer_s=60"))
        run.start("generator", settings=(*ONE_STEP, "network.wait_for_buffer_s=60"))
        assert [program.wait() for program in run.programs] == [0, 0, 0], run.logs()
        assert f"the optimizer state of {checkpoint}" in learner.output
        begun = load_file(run.run_dir / "start" / "model.safetensors")
        before = load_file(checkpoint / "model.safetensors")
        after = load_file(run.run_dir / "checkpoints" / "version-00000001" / "model.safetensors")
        assert all(torch.equal(begun[name], before[name]) for name in before)
        largest = max(float((after[name] - before[name]).abs().max()) for name in before)
        assert 0 < largest < 0.01  # one step of AdamW at a rate of 1e-3
