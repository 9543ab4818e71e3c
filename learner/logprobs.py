"""Log-probabilities of given tokens from hidden states, with the logits of one chunk at a time."""

from __future__ import annotations

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
        return _chunk_logprobs(hidden, head, targets, temperatures)
    parts = [
        checkpoint(_chunk_logprobs, h, head, ids, t, use_reentrant=False)
        for h, ids, t in zip(
            hidden.split(chunk), targets.split(chunk), temperatures.split(chunk), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperatures.unsqueeze(1)
    log_totals = logits.logsumexp(dim=1)
    logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - log_totals
    with torch.no_grad():
        probabilities = (logits - log_totals.unsqueeze(1)).exp_()
        entropies = log_totals - (probabilities * logits).sum(dim=1)
    return logprobs, entropies
