"""`python -m learner` as a process: how it starts, ends, dies and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from learner_cases import make_config, save_broken_model, save_model
from local_runs import REPOSITORY
from scripted_buffer import ScriptedBuffer

from asyncrl.config import Config
from asyncrl.config.load import save_resolved

pytestmark = pytest.mark.e2e

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(address, program=..., name=..., SECTION={...}) -> the process of a learner."""
    model = save_model(tmp_path / "model")

    def start(
        address: str,
        *,
        program: Sequence[str] = ("-m", "learner"),
        name: str = "run",
        launcher: Sequence[str] = (),
        **sections: Any,
    ) -> subprocess.Popen[str]:
        tree = make_config(model).model_dump()
        for section, values in {"weights": {"dir": str(tmp_path / "weights")}, **sections}.items():
            tree[section] = {**tree[section], **values}
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        save_resolved(Config.model_validate(tree), directory / "config.yaml")
        command = [*launcher, sys.executable, "-P", *program]
        return subprocess.Popen(
            [*command, str(directory / "config.yaml"), "--connect", address],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


def test_a_buffer_that_is_not_there_is_told_before_torch_is_loaded(start: Start) -> None:
    began = time.monotonic()
    learner = start("tcp://127.0.0.1:9", network={"wait_for_buffer_s": 1.0})
    _, errors = learner.communicate(timeout=30)
    assert learner.returncode == 2
    assert errors.startswith("learner: no answer from the buffer at tcp://127.0.0.1:9 to Hello")
    assert len(errors.splitlines()) == 1
    assert time.monotonic() - began < 10


def test_a_buffer_of_other_settings_is_one_message_with_both_values_and_exit_code_2(
    start: Start,
) -> None:
    with ScriptedBuffer(num_steps=1) as buffer:
        buffer.settings = {"max_staleness": "4", "group_size": "8"}
        learner = start(buffer.address)
        _, errors = learner.communicate(timeout=30)
    assert learner.returncode == 2
    assert "max_staleness is 2 there, the buffer has 4" in errors
    assert len(errors.splitlines()) == 1


def test_a_start_with_other_logprobs_than_the_generators_trains_nothing_and_ends_with_2(
    start: Start, tmp_path: Path
) -> None:
    """The logprobs of the buffer's groups are made up."""
    with ScriptedBuffer(num_steps=1) as buffer:
        learner = start(buffer.address, parity={"min_tokens": 10})
        _, errors = learner.communicate(timeout=60)
    assert learner.returncode == 2
    assert "learner: generator and learner are not the same policy: at equal weights" in errors
    assert "(at most 0.1: parity.max_gap_mean)" in errors and "chat template" in errors
    assert "Traceback" not in errors
    assert buffer.heard[0] == "register 0" and not buffer.said("commit")
    assert buffer.heard[-1].startswith("leave: NotSamePolicy: generator and learner are not")
    assert not list((tmp_path / "run").glob("checkpoints/*"))


COMPUTING = """
import sys
import learner.__main__ as program

def compute(*arguments, **options):  # one operation of torch that takes minutes
    import torch
    options["clock"].enter("forward_backward")
    print("computing", file=sys.stderr, flush=True)
    torch.randn(16000, 16000) @ torch.randn(16000, 16000)

import learner.loop
learner.loop.train_step = compute
sys.exit(program.main())
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_learner_at_once_while_torch_computes(
    start: Start, tmp_path: Path, end: signal.Signals, code: int
) -> None:
    with ScriptedBuffer(num_steps=1) as buffer:
        learner = start(buffer.address, program=["-c", COMPUTING])
        assert learner.stderr is not None
        while "computing" not in (line := learner.stderr.readline()):
            assert line, "the learner has ended"
        buffer.until_beat("step 0: forward and backward")  # signs of life come meanwhile
        assert list((tmp_path / "weights").iterdir())
        began = time.monotonic()
        learner.send_signal(end)
        assert learner.wait(10) == code
        assert time.monotonic() - began < 6
    assert buffer.heard[-1] == f"leave: ended by {end.name}"
    assert not list((tmp_path / "weights").iterdir())


def test_a_signal_ends_a_learner_at_once_when_the_buffer_does_not_answer(
    start: Start, tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=1) as buffer:
        buffer.waiting[0] = 10_000
        learner = start(buffer.address)
        buffer.until("register 0")
    began = time.monotonic()
    learner.terminate()
    assert learner.wait(10) == 143
    assert time.monotonic() - began < 6
    assert not list((tmp_path / "weights").iterdir())


def test_a_learner_that_cannot_begin_says_goodbye(start: Start, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    with ScriptedBuffer(num_steps=1) as buffer:
        learner = start(buffer.address)
        _, errors = learner.communicate(timeout=30)
        assert learner.returncode == 2
        assert "cannot be loaded" in errors
        [goodbye] = buffer.said("leave")
    assert goodbye.startswith("leave: ValueError: model.path=")


def test_a_killed_learner_comes_back_replays_in_silence_and_ends_at_the_same_weights(
    start: Start, tmp_path: Path
) -> None:
    checkpoint = {"every": 2, "keep_last": 1}
    with ScriptedBuffer(num_steps=6) as whole:
        assert start(whole.address, name="whole", checkpoint=checkpoint).wait(60) == 0
    with ScriptedBuffer(num_steps=6) as buffer:
        buffer.waiting_for[5] = "killed"
        first = start(buffer.address, checkpoint=checkpoint)
        buffer.until("published 1.5")
        first.kill()
        first.wait(10)
        assert list((tmp_path / "weights").iterdir()), "generators may be reading"
        buffer.heard.append("killed")
        second = start(buffer.address, checkpoint=checkpoint)
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 0, errors
    again = buffer.heard[buffer.heard.index("killed") :]
    assert again[1] == "register 4"
    assert [said for said in again if said.startswith("commit")] == ["commit 5", "commit 6"]
    published = [said for said in again if said.startswith("published")]
    assert set(published) <= {"published 2.5", "published 2.6"}
    assert "replaying steps 4 to 4" in errors
    for name in ("model", "exp_avg", "exp_avg_sq"):
        file = Path("checkpoints") / "version-00000006" / f"{name}.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


RAISING = """
import os, sys
import learner.__main__ as program
import learner.loop

honest = learner.loop.train_step

def raising(*arguments, **options):
    if os.environ["RANK"] == "1" and raising.num_steps == 1:
        raise ArithmeticError("a slip of rank 1")
    raising.num_steps += 1
    return honest(*arguments, **options)

raising.num_steps = 0
learner.loop.train_step = raising
code = program.main()
sys.stderr.flush()
os._exit(code)
"""


@pytest.mark.slow
def test_a_signal_to_the_launcher_of_ranks_ends_them_with_a_farewell_and_no_weights_left(
    start: Start, tmp_path: Path
) -> None:
    launcher = ("-m", "asyncrl.launch.ranks", "--standalone", "--nproc-per-node=2")
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.waiting[2] = 10_000
        ranks = start(buffer.address, program=launcher)
        buffer.until("published 1.2", timeout_s=90)
        ranks.terminate()
        _, errors = ranks.communicate(timeout=15)
        assert ranks.returncode == 143, errors
        assert buffer.said("leave") == ["leave: ended by SIGTERM"], errors
    assert not list((tmp_path / "weights").iterdir())


@pytest.mark.slow
def test_all_ranks_write_the_checkpoint_that_the_buffer_asks_for(
    start: Start, tmp_path: Path
) -> None:
    launcher = ("-m", "asyncrl.launch.ranks", "--standalone", "--nproc-per-node=2")
    with ScriptedBuffer(num_steps=4) as buffer:
        buffer.asks_at, buffer.waiting_for[3] = {1}, "checkpointed [1, 3]"
        buffer.on_waiting = lambda step: buffer.asks_at.add(step)
        ranks = start(buffer.address, program=launcher, checkpoint={"every": 0})
        _, errors = ranks.communicate(timeout=90)
        assert ranks.returncode == 0, errors
    told = ["checkpointed [1]", "checkpointed [1, 3]", "checkpointed [3, 4]"]
    assert buffer.said("checkpointed") == told


@pytest.mark.slow
def test_a_rank_that_raises_ends_all_ranks_with_its_traceback(start: Start) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node=2", "--no-python"]
    with ScriptedBuffer(num_steps=5) as buffer:
        ranks = start(buffer.address, program=["-c", RAISING], launcher=launcher)
        buffer.until("commit 1", timeout_s=90)
        began = time.monotonic()
        _, errors = ranks.communicate(timeout=60)
        assert time.monotonic() - began < 15
    assert ranks.returncode != 0
    assert "learner rank 1: Traceback" in errors
    assert "ArithmeticError: a slip of rank 1" in errors
    assert not buffer.said("commit 2")


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_parameter_that_is_not_finite_is_named_and_not_committed_published_or_saved(
    start: Start, tmp_path: Path, num_ranks: int
) -> None:
    path, name = save_broken_model(tmp_path / "broken")
    launcher = ("-m", "asyncrl.launch.ranks", "--standalone", f"--nproc-per-node={num_ranks}")
    with ScriptedBuffer(num_steps=3) as buffer:
        learner = start(buffer.address, program=launcher, model={"path": str(path)})
        _, errors = learner.communicate(timeout=90)
        heard = buffer.heard
    assert learner.returncode != 0
    assert f"tensor {name} is not finite: it is neither published nor saved" in errors
    assert not [said for said in heard if said.startswith(("commit", "publish", "checkpointed"))]
    assert not list(tmp_path.glob("run/checkpoints/version-*"))
