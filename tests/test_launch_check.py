"""`asyncrl-launch check` as a user runs it: real engine, real learner, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from local_runs import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def start_check(task: Path, directory: Path, *overrides: str) -> subprocess.Popen[str]:
    """The temporary files of the check are made in `directory`."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "asyncrl.launch", "check"),
            str(REPOSITORY / "configs" / "tiny.yaml"),
            f"model.path={task}/model",
            f"data.train_files=[{task}/train.jsonl]",
            "data.val_files=[]",
            *overrides,
        ],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def made_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith("asyncrl-check-")]


def test_an_engine_that_makes_up_its_logprobs_cannot_be_checked(
    random_tiny_task: Path, tmp_path: Path
) -> None:
    process = start_check(random_tiny_task, tmp_path, "generator.engine=scripted")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.startswith("asyncrl-launch: generator.engine: scripted") and "vllm" in errors


@pytest.mark.slow
@pytest.mark.vllm
def test_a_good_pair_is_a_table_and_0_and_bounds_below_rounding_are_the_causes_and_2(
    tiny_task: Path, tmp_path: Path
) -> None:
    process = start_check(tiny_task, tmp_path, "sampling.temperature=0.7")
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0, output + errors
    for part in ("mean |difference|", "k3", "mean ratio", "tokens", "temperature", "seconds"):
        assert part in output
    assert "the same policy" in output and errors == ""
    process = start_check(tiny_task, tmp_path, "model.dtype=bfloat16", "parity.max_gap_mean=0.0001")
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 2
    assert "mean |difference|" in output
    assert "not the same policy" in errors and "(at most 0.0001: parity.max_gap_mean)" in errors
    assert "chat template" in errors and "Traceback" not in errors
    assert not made_in(tmp_path)


@pytest.mark.slow
@pytest.mark.vllm
def test_ctrl_c_leaves_no_process_and_no_file(random_tiny_task: Path, tmp_path: Path) -> None:
    process = start_check(random_tiny_task, tmp_path)
    assert process.stdout is not None
    while "generator" not in (line := process.stdout.readline()):
        assert line, "the check has ended"
    programs = psutil.Process(process.pid).children(recursive=True)
    assert programs and made_in(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert errors == "stopped by SIGINT\n"
    assert not made_in(tmp_path)
    _, alive = psutil.wait_procs(programs, timeout=5)
    assert not alive
