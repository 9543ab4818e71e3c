"""Losses against reference values, and the properties that every loss must have.

Fixtures F (two sequences, one flat list here), S (ratios of both signs of the advantage) and G
(nine tokens on which every trust region keeps another set).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrl.config.schema import Loss
from learner.losses import effective_sample_size, token_losses, token_metrics

PPO = Loss(mask="ppo_clip", clip_low=0.2, clip_high=0.2, behavior_coef=0.0)
DAPO = Loss(mask="ppo_clip", clip_low=0.2, clip_high=0.28, behavior_coef=0.0)
DPPO = Loss(mask="dppo_tv", mask_threshold=0.2, ratio_cap=5.0, behavior_coef=0.0)
STACK = Loss(mask="dppo_tv", mask_threshold=0.2, ratio_cap=5.0, behavior_coef=1e-3)
ALL = [PPO, DAPO, DPPO, STACK]

F_MU = [0.55, 0.20, 0.80, 0.10, 0.40, 0.25]
F_TH = [0.66, 0.08, 0.88, 0.35, 0.15, 0.25]
F_A = [1.0, 1.0, -0.5, -0.5, -0.5, -0.5]
G_MU = [0.01, 0.50, 0.90, 0.02, 0.30, 0.10, 0.70, 0.60, 0.50]
G_TH = [0.04, 0.78, 0.65, 0.004, 0.06, 0.45, 0.40, 0.54, 0.55]
G_A = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0, 1.0, 1.0]
S_RATIOS = [0.4, 0.9, 1.0, 1.25, 3.5, 8.0]
S_MU = [0.1] * 6
S_TH = [0.1 * r for r in S_RATIOS]


def evaluate(
    config: Loss, th: list[float], mu: list[float], advantages: list[float]
) -> tuple[list[float], list[float], list[bool]]:
    """Losses, their gradients by the logprob, and what was dropped, for given probabilities."""
    theta = torch.tensor(th, dtype=torch.float64).log().float().requires_grad_()
    behavior = torch.tensor(mu, dtype=torch.float64).log().float()
    mask = torch.ones(len(th), dtype=torch.bool)
    found = token_losses(theta, behavior, torch.tensor(advantages), mask, config)
    found.losses.sum().backward()
    assert theta.grad is not None
    return found.losses.tolist(), theta.grad.tolist(), found.dropped.tolist()


@pytest.mark.parametrize(
    ("config", "sign", "losses", "gradients"),
    [
        (PPO, 1, [-0.4, -0.9, -1.0, -1.2, -1.2, -1.2], [-0.4, -0.9, -1.0, 0, 0, 0]),
        (PPO, -1, [0.8, 0.9, 1.0, 1.25, 3.5, 8.0], [0, 0.9, 1.0, 1.25, 3.5, 8.0]),
        (DAPO, 1, [-0.4, -0.9, -1.0, -1.25, -1.28, -1.28], [-0.4, -0.9, -1.0, -1.25, 0, 0]),
        (DAPO, -1, [0.8, 0.9, 1.0, 1.25, 3.5, 8.0], [0, 0.9, 1.0, 1.25, 3.5, 8.0]),
    ],
)
def test_ppo_clip_has_the_reference_values(
    config: Loss, sign: int, losses: list[float], gradients: list[float]
) -> None:
    found, gradient, _ = evaluate(config, S_TH, S_MU, [float(sign)] * 6)
    assert found == pytest.approx(losses, abs=1e-5)
    assert gradient == pytest.approx(gradients, abs=1e-5)


def test_capped_weights_have_the_reference_gradients() -> None:
    free = Loss(mask="dppo_tv", mask_threshold=0.99, ratio_cap=5.0, behavior_coef=0.0)
    assert evaluate(free, S_TH, S_MU, [1.0] * 6)[1] == pytest.approx(
        [-0.4, -0.9, -1.0, -1.25, -3.5, -5.0], abs=1e-5
    )
    assert evaluate(free, S_TH, S_MU, [-1.0] * 6)[1] == pytest.approx(
        [0.4, 0.9, 1.0, 1.25, 3.5, 5.0], abs=1e-5
    )


def test_dppo_tv_on_f_has_the_reference_values() -> None:
    losses, gradients, dropped = evaluate(DPPO, F_TH, F_MU, F_A)
    assert gradients == pytest.approx([-1.2, -0.4, 0.55, 1.75, 0, 0.5], abs=1e-5)
    assert math.fsum(losses) / 6 == pytest.approx(-0.181956, abs=1e-6)
    assert dropped == [False, False, False, False, True, False]


def test_the_default_stack_on_f_has_the_reference_values() -> None:
    losses, _, _ = evaluate(STACK, F_TH, F_MU, F_A)
    assert losses == pytest.approx(
        [0.498652, 1.011131, -0.070299, -1.835619, 0.000962, -0.693147], abs=1e-5
    )
    assert math.fsum(losses) / 6 == pytest.approx(-0.181387, abs=1e-6)


def test_the_default_stack_on_g_has_the_reference_values() -> None:
    losses, gradients, _ = evaluate(STACK, G_TH, G_MU, G_A)
    assert gradients == pytest.approx(
        [
            *[-3.997227, 0.000889, -0.000651, 0.196781, -0.203219],
            *[4.503008, -0.001119, -0.900211, -1.099809],
        ],
        abs=1e-5,
    )
    assert math.fsum(losses) / 9 == pytest.approx(1.106978, abs=1e-5)


@pytest.mark.parametrize(
    ("config", "keep", "gradients"),
    [
        (DAPO, [0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, -0.2, 4.5, 0, -0.9, -1.1]),
        (DPPO, [1, 0, 0, 1, 1, 1, 1, 1, 1], [-4.0, 0, 0, 0.2, -0.2, 4.5, 0, -0.9, -1.1]),
    ],
)
def test_each_trust_region_keeps_its_own_tokens_of_g(
    config: Loss, keep: list[int], gradients: list[float]
) -> None:
    _, gradient, dropped = evaluate(config, G_TH, G_MU, G_A)
    assert [not d for d in dropped] == [bool(k) for k in keep]
    assert gradient == pytest.approx(gradients, abs=1e-5)


@pytest.mark.parametrize("config", ALL)
def test_on_policy_the_gradient_is_minus_the_advantage(config: Loss) -> None:
    _, gradient, dropped = evaluate(config, F_MU, F_MU, F_A)
    assert gradient == pytest.approx([-a for a in F_A], abs=1e-6)
    assert not any(dropped)


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_masked_slots_changes_nothing(config: Loss, garbage: float) -> None:
    def run(theta: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor) -> tuple:
        theta.requires_grad_()
        found = token_losses(theta, behavior, advantages, mask, config)
        found.losses.sum().backward()
        assert theta.grad is not None
        return found, theta.grad

    theta, behavior = torch.tensor(F_TH).log(), torch.tensor(F_MU).log()
    clean, clean_gradient = run(
        theta.clone(), behavior, torch.tensor(F_A), torch.ones(6, dtype=torch.bool)
    )
    dirty = torch.full((3,), garbage)
    mask = torch.tensor([True] * 6 + [False] * 3)
    found, gradient = run(
        torch.cat([theta, dirty]),
        torch.cat([behavior, dirty]),
        torch.cat([torch.tensor(F_A), dirty]),
        mask,
    )
    assert torch.equal(found.losses[:6], clean.losses)
    assert torch.equal(gradient[:6], clean_gradient)
    for masked in (found.losses[6:], gradient[6:], found.log_ratios[6:], found.dropped[6:]):
        assert not masked.any()


@pytest.mark.parametrize("config", ALL)
@pytest.mark.parametrize("mu", [-50.0, -1000.0, -math.inf])
def test_a_token_that_the_generator_calls_impossible_stays_finite(config: Loss, mu: float) -> None:
    theta = torch.tensor([-0.5], requires_grad=True)
    for advantage in (1.0, -1.0, 0.0):
        found = token_losses(
            theta, torch.tensor([mu]), torch.tensor([advantage]), torch.tensor([True]), config
        )
        found.losses.sum().backward()
        assert found.losses.isfinite().all()
    assert theta.grad is not None
    assert theta.grad.isfinite().all()


@pytest.mark.parametrize("config", ALL)
def test_no_tokens_at_all_are_fine(config: Loss) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    found = token_losses(nothing, nothing.detach(), nothing.detach(), nothing.bool(), config)
    found.losses.sum().backward()
    assert found.losses.shape == (0,)


def test_changing_one_behavior_logprob_changes_that_tokens_gradient_alone() -> None:
    _, before, _ = evaluate(STACK, F_TH, F_MU, F_A)
    _, after, _ = evaluate(STACK, F_TH, [0.5, *F_MU[1:]], F_A)
    assert after[0] != before[0]
    assert after[1:] == before[1:]


@pytest.mark.parametrize(
    ("log_weights", "expected"),
    [
        ([-200.0] * 4, 4.0),
        ([-200.0, -300.0, -300.0], 1.0),
        ([200.0, 0.0, 0.0], 1.0),
        ([0.0, 0.5, -1.0], 2.361387),
        ([], 0.0),
    ],
)
def test_effective_sample_size_survives_extreme_weights(
    log_weights: list[float], expected: float
) -> None:
    assert effective_sample_size(torch.tensor(log_weights)) == pytest.approx(expected, abs=1e-6)


def test_metrics_of_f_are_the_reference_values() -> None:
    log_ratios = torch.tensor(F_TH, dtype=torch.float64).log() - torch.tensor(F_MU).double().log()
    zeros = torch.zeros(6, dtype=torch.float64)
    rows = torch.tensor([4, 4, 9, 9, 9, 9], dtype=torch.float64)
    found = token_metrics(torch.stack([zeros, log_ratios, zeros, zeros, rows, zeros]))
    assert found["ess"] == pytest.approx(0.590313, abs=1e-5)
    assert found["ess_rows"] == pytest.approx(0.799376, abs=1e-5)
    assert found["k3"] == pytest.approx(0.323621, abs=1e-5)
    assert found["k1"] == pytest.approx(float(-log_ratios.mean()), abs=1e-9)
    assert found["ratio_max"] == pytest.approx(3.5, abs=1e-5)
