"""The sharded policy: its logprobs are those of the plain model, its gradients do not depend on
how a batch is cut up, and a training step does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import VOCABULARY, make_config, make_group, make_groups, save_model
from learner_gradients import step_gradients
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.types import RolloutGroup
from learner.logprobs import token_logprobs
from learner.optimizer import Optimizer
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks
from learner.train_step import train_step

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_those_of_the_plain_model(
    family: str, tied: bool, temperature: float, tmp_path: Path
) -> None:
    directory = save_model(tmp_path / "model", family=family, tied=tied)
    policy = load_policy(make_config(directory), start_ranks())
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (1, 9))
    positions = torch.tensor([3, 4, 7])
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.int64)], dim=1)
    logprobs, entropies = policy(
        padded, positions, ids[0, positions + 1], torch.full((3,), temperature)
    )
    expected = torch.log_softmax(plain(ids).logits[0] / temperature, dim=-1)
    assert torch.allclose(
        logprobs, expected[positions, ids[0, positions + 1]], rtol=1e-5, atol=1e-5
    )
    assert torch.allclose(
        entropies, -(expected.exp() * expected).sum(-1)[positions], rtol=1e-5, atol=1e-5
    )


def test_chunks_change_neither_logprobs_nor_gradients() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, VOCABULARY, bias=False)
    targets, temperatures = torch.randint(0, VOCABULARY, (11,)), torch.rand(11) + 0.5
    found = []
    for chunk_logits in (1, 3 * VOCABULARY, 1 << 20):
        torch.manual_seed(1)
        hidden = torch.randn(11, 8, requires_grad=True)
        logprobs, entropies = token_logprobs(
            hidden,
            head,
            targets,
            temperatures,
            vocabulary=VOCABULARY,
            chunk_logits=chunk_logits,
        )
        head.zero_grad()
        logprobs.square().sum().backward()
        assert head.weight.grad is not None
        found.append([logprobs, entropies, hidden.grad, head.weight.grad.clone()])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_logprobs_is_that_of_autograd() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, VOCABULARY).double()
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    targets, temperatures = torch.randint(0, VOCABULARY, (5,)), torch.rand(5) + 0.5
    weights = torch.randn(5)
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures, vocabulary=VOCABULARY)
    (found,) = torch.autograd.grad((logprobs * weights).sum(), hidden)
    plain = torch.log_softmax(head(hidden) / temperatures.unsqueeze(1), dim=1)
    (expected,) = torch.autograd.grad((plain[range(5), targets] * weights).sum(), hidden)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cutting_a_batch_into_micro_batches_does_not_change_its_gradient(
    model: Path, checkpointing: bool
) -> None:
    groups = make_groups(3)
    found = []
    for max_tokens in (4096, 60, 15):
        config = make_config(
            model,
            max_tokens_per_microbatch=max_tokens,
            gradient_checkpointing=checkpointing,
        )
        found.append(step_gradients(load_policy(config, start_ranks()), groups, config))
    (expected, expected_metrics), *others = found
    assert max(g.abs().max() for g in expected.values()) > 1e-3
    for gradients, metrics in others:
        assert metrics == pytest.approx(expected_metrics, rel=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-5), name


def test_two_ranks_compute_the_gradient_of_one(model: Path, tmp_path: Path) -> None:
    config = make_config(model)
    expected, metrics = step_gradients(load_policy(config, start_ranks()), make_groups(3), config)
    found = _gradients_of_ranks(2, model, tmp_path / "gradients.safetensors")
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-5, atol=1e-5), name
    for name, value in metrics.items():
        assert float(found[f"metric/{name}"]) == pytest.approx(value, rel=1e-4, abs=1e-6), name


def _gradients_of_ranks(num_ranks: int, model: Path, out: Path) -> dict[str, torch.Tensor]:
    script = TESTS / "learner_gradients.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={num_ranks}", str(script), str(model), str(out)]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, timeout=120, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(out)


def test_training_makes_rewarded_answers_more_likely(model: Path) -> None:
    config = make_config(model)
    policy = load_policy(config, start_ranks())
    optimizer = Optimizer(policy, config.learner.optim)
    groups = make_groups(3)
    before = _logprob_of_rewarded(policy, groups)
    for _ in range(5):
        values = train_step(policy, optimizer, groups, config)
    assert _logprob_of_rewarded(policy, groups) > before + 0.1
    assert values["train/reward_mean"] == 0.5
    assert values["train/num_loss_tokens"] == sum(g.num_response_tokens for g in groups)


def _logprob_of_rewarded(policy: Policy, groups: list[RolloutGroup]) -> float:
    total = 0.0
    for group in groups:
        for rollout in group.rollouts:
            if rollout.reward == 1.0:
                ids = np.concatenate([group.prompt_ids, rollout.token_ids]).astype(np.int64)
                first = len(group.prompt_ids)
                positions = torch.arange(first - 1, len(ids) - 1)
                with torch.no_grad():
                    logprobs, _ = policy(
                        torch.tensor(ids[None, :-1]),
                        positions,
                        torch.tensor(ids[first:]),
                        torch.ones(len(positions)),
                    )
                total += float(logprobs.sum())
    return total


def test_a_broken_step_changes_nothing_and_five_in_a_row_are_an_error(model: Path) -> None:
    config = make_config(model)
    policy = load_policy(config, start_ranks())
    optimizer = Optimizer(policy, config.learner.optim)
    broken = [_with_logprob(group, np.nan) for group in make_groups(2)]
    before = _parameters(policy)
    for _ in range(4):
        assert train_step(policy, optimizer, broken, config)["train/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(policy), strict=True))
    assert train_step(policy, optimizer, make_groups(2), config)["train/skipped"] == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, _parameters(policy), strict=True))
    for _ in range(4):
        train_step(policy, optimizer, broken, config)
    with pytest.raises(RuntimeError, match="5 steps in a row"):
        train_step(policy, optimizer, broken, config)


def _with_logprob(group: RolloutGroup, value: float) -> RolloutGroup:
    rollouts = [replace(r, logprobs=np.full_like(r.logprobs, value)) for r in group.rollouts]
    return replace(group, rollouts=tuple(rollouts))


def _parameters(policy: Policy) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in policy.gather(torch.float32)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38])
def test_a_parameter_that_is_not_finite_is_named_although_loss_and_gradient_are(
    value: float, tmp_path: Path
) -> None:
    """3.4e38 is finite, but not in the type in which weights travel."""
    config = make_config(save_model(tmp_path / "model", tied=False))
    policy = load_policy(config, start_ranks())
    with torch.no_grad():
        dict(policy.masters())["model.embed_tokens.weight"][1, 0] = value
    with pytest.raises(RuntimeError, match=r"tensor model\.embed_tokens\.weight is not finite"):
        train_step(policy, Optimizer(policy, config.learner.optim), make_groups(2), config)


def test_large_parameters_are_finite(model: Path) -> None:
    policy = load_policy(make_config(model), start_ranks())
    with torch.no_grad():
        for _, parameter in policy.masters():
            parameter.fill_(1e30)  # its square is not
    policy.check_finite()


def test_a_batch_without_a_loss_token_is_finite_and_moves_nothing(model: Path) -> None:
    config = make_config(model)
    policy = load_policy(config, start_ranks())
    optimizer = Optimizer(policy, config.learner.optim)
    group = make_group(0)
    unscored = replace(group, rollouts=tuple(replace(r, reward=None) for r in group.rollouts))
    before = _parameters(policy)
    for groups in ([], [unscored]):
        values = train_step(policy, optimizer, groups, config)
        assert values["train/grad_norm"] == 0
        assert values["train/skipped"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, _parameters(policy), strict=True))


def test_the_rate_rises_over_the_warm_up(model: Path) -> None:
    config = make_config(model, optim={"lr": 1e-3, "warmup_steps": 4})
    policy = load_policy(config, start_ranks())
    optimizer = Optimizer(policy, config.learner.optim)
    rates = [train_step(policy, optimizer, make_groups(1), config)["train/lr"] for _ in range(5)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3])


def test_a_missing_model_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    config = make_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"model\.path=.*nowhere"):
        load_policy(config, start_ranks())


def test_bfloat16_arithmetic_keeps_float32_masters(model: Path) -> None:
    config = make_config(model, loss={"mask_threshold": 1.0, "behavior_coef": 0.0})
    rough = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    policy = load_policy(rough, start_ranks())
    expected, _ = step_gradients(load_policy(config, start_ranks()), make_groups(2), config)
    found, _ = step_gradients(policy, make_groups(2), rough)
    for name, gradient in found.items():
        likeness = torch.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert gradient.dtype == torch.float32
        assert not torch.equal(gradient, expected[name]), name
        assert likeness > 0.85, name
    train_step(policy, Optimizer(policy, config.learner.optim), make_groups(2), rough)
    assert all(parameter.dtype == torch.float32 for _, parameter in policy.masters())
