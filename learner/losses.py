"""Policy losses and their metrics: pure functions on flat tensors, one entry for each token.

Every loss is a choice of trust region (which tokens keep their gradient) and cap (how much an
importance weight may count), both measured from the generator's own logprobs. With
r = exp(theta - behavior), the gradient of a token's loss by theta is -keep * weight(r) * A.
Masked slots may hold anything, NaN included: they are replaced before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.schema import Loss

LOG_RATIO_LIMIT = 20.0
"""Log ratios are cut to [-20, 20] before exp, so that an all but impossible token stays finite."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Losses of single tokens, all [tokens]; 0 or False wherever the loss mask is False."""

    losses: Tensor
    """To be summed and divided by the number of loss tokens of the whole step."""
    log_ratios: Tensor
    """Detached theta - behavior, cut to +-20."""
    dropped: Tensor
    """True where the trust region took the gradient of a token with an advantage."""


def token_losses(
    theta: Tensor, behavior: Tensor, advantages: Tensor, loss_mask: Tensor, config: Loss
) -> TokenLosses:
    """Loss of each token; every argument is [tokens], logprobs in float32.

    `theta` are the logprobs under the weights in training (with gradient), `behavior` those that
    the generator reported when it sampled. Adds behavior_coef * (log r)^2 on every loss token,
    whatever the trust region says.
    """
    theta = torch.where(loss_mask, theta.float(), 0.0)
    behavior = torch.where(loss_mask, behavior.float(), 0.0)
    advantages = torch.where(loss_mask, advantages.float(), 0.0)
    log_ratios = (theta - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    losses, dropped = _POLICY_LOSSES[config.mask](theta, behavior, log_ratios, advantages, config)
    if config.behavior_coef > 0:
        losses = losses + config.behavior_coef * log_ratios.square()
    return TokenLosses(losses, log_ratios.detach(), dropped & (advantages != 0))


def _ppo_clip(
    theta: Tensor, behavior: Tensor, log_ratios: Tensor, advantages: Tensor, config: Loss
) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)): PPO (1707.06347), higher upper bound as in DAPO."""
    ratios = log_ratios.exp()
    free = -advantages * ratios
    clipped = -advantages * ratios.clamp(1 - config.clip_low, 1 + config.clip_high)
    return torch.maximum(free, clipped), clipped > free


def _dppo_tv(
    theta: Tensor, behavior: Tensor, log_ratios: Tensor, advantages: Tensor, config: Loss
) -> tuple[Tensor, Tensor]:
    """-keep * sg(min(r, cap)) * A * theta; keep ends where the sampled token's probability has
    moved by more than mask_threshold in the direction of its advantage (DPPO-TV, 2602.04879)."""
    with torch.no_grad():
        weights = log_ratios.exp().clamp(max=config.ratio_cap)
        moved = theta.exp() - behavior.exp()
        dropped = torch.where(
            advantages > 0, moved > config.mask_threshold, moved < -config.mask_threshold
        )
    losses = torch.where(dropped, 0.0, -weights * advantages * theta)
    return losses, dropped


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Loss], tuple[Tensor, Tensor]]
_POLICY_LOSSES: dict[str, PolicyLoss] = {"ppo_clip": _ppo_clip, "dppo_tv": _dppo_tv}


def effective_sample_size(log_weights: Tensor) -> float:
    """Kish's (sum w)^2 / sum w^2 of weights given by their logarithms [n]; 0.0 for none.

    In float64 and shifted by the largest, so that no weight over- or underflows.
    """
    if log_weights.numel() == 0:
        return 0.0
    weights = (log_weights.double() - log_weights.double().max()).exp()
    return float(weights.sum().square() / weights.square().sum())


def token_metrics(columns: Tensor) -> dict[str, float]:
    """Means over all loss tokens of a step, from `columns` [6, tokens] in the order
    loss, log ratio, dropped, entropy, row number, theta logprob.

    `k1` and `k3` estimate KL(generator || learner) per token: -log r and r - 1 - log r.
    `ess` counts tokens, `ess_rows` whole responses by their summed log ratios; both are shares of
    1 and use the ratios before any cap.
    """
    if columns.shape[1] == 0:
        return {}
    losses, log_ratios, dropped, entropies, rows, theta = columns.double()
    ratios = log_ratios.exp()
    _, row_of_token = rows.long().unique(return_inverse=True)
    num_rows = int(row_of_token.max()) + 1
    row_log_ratios = torch.zeros(num_rows, dtype=torch.float64)
    row_log_ratios.index_add_(0, row_of_token, log_ratios)
    return {
        "loss": float(losses.mean()),
        "entropy": float(entropies.mean()),
        "logprob": float(theta.mean()),
        "k1": float(-log_ratios.mean()),
        "k3": float((ratios - 1 - log_ratios).mean()),
        "ratio_mean": float(ratios.mean()),
        "ratio_max": float(ratios.max()),
        "clip_frac": float(dropped.mean()),
        "ess": effective_sample_size(log_ratios) / len(log_ratios),
        "ess_rows": effective_sample_size(row_log_ratios) / num_rows,
    }
