"""AdamW on float32 master weights, with warm-up, clipping, and a guard against broken steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asyncrl.config.schema import Optim
from learner.policy import Policy, gather_tensor

MAX_SKIPPED_IN_A_ROW = 5
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float
    skipped: bool
    """True: loss or gradient was not finite, and nothing changed."""


class Optimizer:
    """Steps all parameters of a policy; every rank calls it alike."""

    def __init__(self, policy: Policy, config: Optim) -> None:
        self._config = config
        self._parameters = dict(policy.masters())
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.num_steps = 0
        """Steps of the run so far, skipped ones too: what the warm-up counts."""
        self.num_updates = 0
        """Steps that changed the weights: what AdamW's bias correction counts."""
        self._num_skipped_in_a_row = 0

    def step(self, *, loss: float) -> StepResult:
        """Clips the accumulated gradients, steps, and clears them.

        `loss` is the step's, the same on all ranks. RuntimeError after 5 skipped steps in a row.
        """
        lr = self._lr()
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip)
        grad_norm = float(gather_tensor(norm))
        skipped = not (math.isfinite(grad_norm) and math.isfinite(loss))
        if not skipped:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self.num_updates += 1
        self._adamw.zero_grad()
        self.num_steps += 1
        self._count_skipped(skipped, loss, grad_norm)
        return StepResult(grad_norm, lr, skipped)

    def moments(self, kind: str) -> dict[str, Tensor]:
        """AdamW's running averages (`kind` of MOMENTS) by parameter name, sharded; zeros before
        the first update."""
        return {name: self._state(p)[kind] for name, p in self._parameters.items()}

    def restore(self, *, num_steps: int, num_updates: int) -> None:
        """Sets the counts; the moments are filled in place through `moments`."""
        self.num_steps, self.num_updates = num_steps, num_updates
        for parameter in self._parameters.values():
            self._state(parameter)["step"].fill_(num_updates)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self._adamw.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for kind in MOMENTS:
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _lr(self) -> float:
        warmup = self._config.warmup_steps
        return self._config.lr * min(1.0, (self.num_steps + 1) / warmup if warmup else 1.0)

    def _count_skipped(self, skipped: bool, loss: float, grad_norm: float) -> None:
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if skipped else 0
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RuntimeError(
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row had a loss or gradient that is not finite "
                f"(loss {loss}, gradient norm {grad_norm}): the weights are past saving, go back "
                "to a checkpoint with a lower learner.optim.lr"
            )
