"""The learner on several machines, here two "nodes" on loopback that share a disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_runs import write_scripted_config
from role_runs import Shells, free_port, shells

pytestmark = pytest.mark.e2e


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_scripted_config(
        tmp_path / "config.yaml",
        random_tiny_task,
        max_steps=4,
        local={"cpu_threads": 1},
        network={"heartbeat_s": 1.0, "wait_for_buffer_s": 60},
    )


def start_learners(run: Shells) -> None:
    """Node 1 first: it waits for node 0."""
    master = f"127.0.0.1:{free_port()}"
    both = ("--nnodes", "2", "--master", master, "--ranks", "1")
    for node in ("1", "0"):
        run.start("learner", "--node-rank", node, *both)


def test_two_nodes_train_one_policy_and_the_first_one_writes(config: Path, tmp_path: Path) -> None:
    with shells(config, tmp_path) as run:
        buffer = run.buffer()
        start_learners(run)
        run.start("generator")
        assert [program.wait() for program in run.programs] == [0, 0, 0, 0], run.logs()
        assert [record["step"] for record in run.steps()] == [0, 1, 2, 3]
        assert buffer.output.count("has joined") == 2, run.logs()  # one learner and one generator
        assert (run.run_dir / "checkpoints" / "version-00000004").is_dir()


@pytest.mark.slow
def test_when_a_node_dies_the_other_ends_and_says_so(config: Path, tmp_path: Path) -> None:
    with shells(config, tmp_path) as run:
        run.buffer("generator.scripted.tokens_per_s=5")
        start_learners(run)
        run.start("generator", settings=("generator.scripted.tokens_per_s=5",))
        run.wait_for_step(0)
        first, second = (p for p in run.programs if p.name == "learner")
        first.kill()
        assert second.wait(30) == 1, run.logs()
