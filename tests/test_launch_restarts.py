"""Under `asyncrl-launch local` what was killed is started again, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_runs import launched, still_running, write_scripted_config

pytestmark = pytest.mark.e2e


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_scripted_config(
        tmp_path / "config.yaml", random_tiny_task, network={"heartbeat_s": 0.5}
    )


def test_whoever_is_killed_is_started_again_and_every_prompt_is_trained_once(
    config: Path, tmp_path: Path
) -> None:
    with launched(config, "local.generators=2", directory=tmp_path) as launcher:
        launcher.wait_for_steps(2)
        first = launcher.children("generators")
        first[0].kill()
        launcher.wait_for_another("generators", than=first)
        launcher.wait_for_steps(4)
        generators = launcher.children("generators")
        launcher.children("learner")[0].kill()
        launcher.wait_for_steps(7)
        launcher.children("buffer")[0].kill()
        finished = launcher.finish(90)
    assert finished.code == 0, finished.logs()
    for name, number in (("generator-", 1), ("learner", 2), ("buffer", 3)):
        lines = [line for line in finished.errors.splitlines() if "started again" in line]
        [line] = [line for line in lines if line.startswith(name)]
        assert "was ended by SIGKILL" in line
        assert f"restart {number} of 3" in line
    assert "60 trained" in finished.output
    assert len(generators) == 2
    log = (finished.run_dir / "logs" / "generator-1.log").read_text()
    assert log.count("engine ready") <= 2


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_both_start_again(config: Path, tmp_path: Path) -> None:
    places = ("local.learner_ranks=2", "max_steps=8")
    with launched(config, *places, directory=tmp_path) as launcher:
        launcher.wait_for_steps(3)
        before = launcher.children("learner")
        before[1].kill()
        finished = launcher.finish(90)
    assert still_running(before, timeout_s=0) == []
    assert finished.code == 0, finished.logs()
    assert "learner was ended by SIGKILL: started again (restart 1 of 3)" in finished.errors
