"""The whole system with nothing replaced: real vLLM, FSDP2, ZeroMQ, processes, model and task."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from local_runs import REPOSITORY, Finished, run_local
from recorded_runs import launch_replay
from transformers import AutoModelForCausalLM

from asyncrl.config.load import load_resolved
from asyncrl.run_dir import RunDir

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
]


def run_tiny(tiny_task: Path, directory: Path, *overrides: str) -> Finished:
    return run_local(
        REPOSITORY / "configs" / "tiny.yaml",
        f"model.path={tiny_task}/model",
        f"data.train_files=[{tiny_task}/train.jsonl]",
        f"data.val_files=[{tiny_task}/val.jsonl]",
        *overrides,
        directory=directory,
        timeout_s=300,
    )


@pytest.fixture(scope="module")
def trained(tiny_task: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_tiny(tiny_task, tmp_path_factory.mktemp("async"))


def test_asynchronous_training_raises_held_out_accuracy(trained: Finished) -> None:
    assert trained.code == 0, trained.logs()
    before, after = trained.evals
    assert (before["eval/version"], after["eval/version"]) == (0, 20)
    assert before["eval/count"] == after["eval/count"] == 256
    assert after["eval/accuracy"] >= before["eval/accuracy"] + 0.15, trained.logs()


def test_staleness_is_used_and_bounded(trained: Finished) -> None:
    assert max(record["staleness/max"] for record in trained.steps) <= 2
    assert statistics.fmean(record["staleness/mean"] for record in trained.steps) > 0.5


def test_generator_and_learner_are_one_policy_in_every_step(trained: Finished) -> None:
    """Both compute in float32."""
    first = trained.steps[0]
    assert first["parity/num_tokens"] == first["staleness/tokens_0"] > 500
    gaps = [step["parity/gap_max"] for step in trained.steps if step["parity/num_tokens"]]
    assert max(gaps) < 1e-3
    assert trained.steps[-1]["parity/num_alarms"] == 0


def test_final_policy_is_a_plain_hugging_face_directory(trained: Finished) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained.run_dir / "final")
    assert model.num_parameters() > 700_000


def test_nothing_is_left_in_shared_memory(trained: Finished) -> None:
    run_dir = RunDir(trained.run_dir)
    assert not run_dir.weights(load_resolved(run_dir.config)).exists()


@pytest.mark.slow
def test_a_replay_without_an_engine_gives_the_parameters_of_the_run(
    trained: Finished, tmp_path: Path
) -> None:
    process = launch_replay(trained.run_dir, f"output_dir={tmp_path}")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "have the digest of the recorded run" in errors
    assert "fork" not in errors
    final = Path("final") / "model.safetensors"
    replayed = tmp_path / f"{trained.run_dir.name}-replay" / final
    assert replayed.read_bytes() == (trained.run_dir / final).read_bytes()


@pytest.mark.slow
def test_synchronous_training_is_the_same_code_at_bound_zero(
    tiny_task: Path, tmp_path: Path
) -> None:
    run = run_tiny(
        tiny_task, tmp_path, "max_staleness=0", "max_steps=4", "eval.before_training=false"
    )
    assert run.code == 0, run.logs()
    assert [record["staleness/max"] for record in run.steps] == [0, 0, 0, 0]


@pytest.mark.slow
def test_every_tensor_parallel_rank_takes_every_version(tiny_task: Path, tmp_path: Path) -> None:
    """With one rank on older weights the logprobs would be those of no version."""
    run = run_tiny(
        tiny_task,
        tmp_path,
        *("max_staleness=0", "max_steps=4", "eval.before_training=false"),
        *("generator.vllm.tensor_parallel_size=2", "weights.transport=collective"),
    )
    assert run.code == 0, run.logs()
    assert [record["parity/num_tokens"] > 1000 for record in run.steps] == [True] * 4
    assert max(record["parity/gap_max"] for record in run.steps) < 1e-3
