"""SIGKILL at random moments for everybody in turn: each prompt once, and the same parameters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from chaos_runs import (
    NUM_PROMPTS,
    PROMPTS_PER_STEP,
    Chaos,
    chaos,
    draw_kills,
    write_chaos_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BOUND = 2
BIMODAL = ("buffer.order=ready", "buffer.zero_variance=drop", "generator.scripted.slow_share=0.1")
LATE = {"wait": set[str](), "drop": {"stale"}, "reissue": {"quarantined"}}
"""What becomes of groups that are late (again and again)."""
FAST = "generator.scripted.tokens_per_s=1000"


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, random_tiny_task: Path
) -> dict[str, bytes]:
    """Tensors of a run in which nobody died. How fast it was makes no difference to them."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with chaos(write_chaos_config(directory, random_tiny_task), directory, FAST) as run:
        run.play([], names=("buffer", "learner", "generator-0"))
        return run.tensors()


@pytest.fixture
def config(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_chaos_config(tmp_path, random_tiny_task)


def test_three_kills_leave_every_prompt_trained_once_and_the_same_parameters(
    config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    with chaos(config, tmp_path, "generator.scripted.tokens_per_s=10") as run:
        run.play(draw_kills(0, count=3))
        check_promises(run)
        assert run.tensors() == undisturbed
        survivor = run.programs["generator-1"]
        assert survivor.output.count("the engine is ready") == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_kills_leave_every_prompt_trained_once_and_the_same_parameters(
    config: Path, tmp_path: Path, undisturbed: dict[str, bytes], seed: int
) -> None:
    with chaos(config, tmp_path) as run:
        run.play(draw_kills(seed, count=10))
        check_promises(run)
        assert run.tensors() == undisturbed


@pytest.mark.slow
def test_a_learner_that_dies_costs_no_generation(
    config: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    with chaos(config, tmp_path) as run:
        run.play(draw_kills(4, count=4, victims=["learner"]))
        check_promises(run)
        assert {row["attempt"] for row in run.groups()} == {0}
        assert run.tensors() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("on_late", "seed"), [("wait", 7), ("drop", 5), ("reissue", 6)])
def test_any_order_and_what_is_late_keep_the_promises_but_the_batches(
    config: Path, tmp_path: Path, on_late: str, seed: int
) -> None:
    with chaos(config, tmp_path, *BIMODAL, f"buffer.on_late={on_late}") as run:
        run.play(draw_kills(seed, count=10))
        fates = check_books(run)
        assert set(fates) <= {"trained", "filtered", *LATE[on_late]}
        assert fates["trained"] >= NUM_PROMPTS // 2


def check_books(run: Chaos) -> Counter[str]:
    """Groups by fate: they are the data, each prompt is in one step or has a fate, none was made
    twice, none was too old."""
    groups = run.groups()
    assert sorted((row["epoch"], row["position"]) for row in groups) == [
        (0, position) for position in range(NUM_PROMPTS)
    ]
    fates = Counter(row["state"] for row in groups)
    assert run.shells.fates() == fates
    assert all((row["state"] == "trained") == (row["step"] is not None) for row in groups)
    sizes = Counter(row["step"] for row in groups if row["step"] is not None)
    assert set(sizes) == {record["step"] for record in run.shells.steps()}
    assert set(sizes.values()) <= set(range(1, PROMPTS_PER_STEP + 1))
    run.check_kept()
    run.check_bound(BOUND)
    return fates


def check_promises(run: Chaos) -> None:
    """All prompts are trained, in the order of the data."""
    assert check_books(run) == {"trained": NUM_PROMPTS}
    groups = run.groups()
    assert [row["position"] for row in groups] == list(range(NUM_PROMPTS))
    assert [row["step"] for row in groups] == [i // PROMPTS_PER_STEP for i in range(NUM_PROMPTS)]
