"""Log-probabilities of given tokens from hidden states, with the logits of one chunk at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 26
"""Logits that exist at once; in float32 these are 256 MiB."""


def token_logprobs(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperatures: Tensor,
    *,
    vocabulary: int,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Logprob of each target [n] under softmax(head(hidden) / temperature), and the entropy of
    that distribution [n], both float32. `hidden` is [n, width].

    Only the logprobs carry a gradient. More than `chunk_logits` logits are computed in chunks, and
    again in the backward pass.
    """
    chunk = max(1, chunk_logits // vocabulary)
    if len(targets) <= chunk:
        return _from_hidden(hidden, head, targets, temperatures)
    parts = [
        checkpoint(_from_hidden, h, head, ids, t, use_reentrant=False)
        for h, ids, t in zip(
            hidden.split(chunk), targets.split(chunk), temperatures.split(chunk), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _from_hidden(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs, entropies = _LogSoftmaxAt.apply(head(hidden), targets, temperatures)
    return logprobs, entropies


class _LogSoftmaxAt(torch.autograd.Function):
    """log softmax(logits / T) at one target per row, and the entropy, in float32.

    By hand, because autograd would pass over the [n, vocabulary] logits three times as often:
    d logprob / d logits = (onehot(target) - softmax) / T.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_probs = logits.float() / temperatures.unsqueeze(1)
        log_probs -= log_probs.logsumexp(dim=1, keepdim=True)
        probabilities = log_probs.exp()
        entropies = -torch.linalg.vecdot(probabilities, log_probs)
        logprobs = log_probs[torch.arange(len(targets), device=targets.device), targets]
        ctx.save_for_backward(probabilities, targets, temperatures)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        probabilities, targets, temperatures = ctx.saved_tensors
        scaled = (gradients[0] / temperatures).unsqueeze(1)
        logits = probabilities * -scaled
        logits.scatter_add_(1, targets.unsqueeze(1), scaled)
        return logits.to(ctx.dtype), None, None
