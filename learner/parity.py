"""G8, same policy on both sides: their logprobs of the same tokens at equal weights, compared.

What noise of bfloat16 looks like and what faults look like, in numbers: docs/parity.md. Three are
judged. Mean gap and k3 say that the two sides differ, at whatever side. The mean ratio of learner's
to generator's probability is 1 for any learner, so that alone it proves nothing; but it is 1 only
if the generator reports the very probabilities that it samples with, whatever the noise.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.config.schema import Parity
from asyncrl.types import RolloutGroup, WeightId

log = logging.getLogger(__name__)

SURE = 4.0
"""Standard errors that a mean of so many tokens may be off by chance."""
CAUSES = (
    "logprobs of another distribution than the one sampled from, as raw ones in place of "
    "processed ones where sampling.temperature is not 1: in generators/vllm_start.py "
    "logprobs_mode must be processed_logprobs",
    "logprobs shifted by a position: each must belong to the token at its own place "
    "(generators/vllm_engine.py, learner/batch.py)",
    "another prompt than the engine was given: chat template, data.chat_template_kwargs or "
    "tokenizer differ; compare prompt ids (asyncrl-launch show prints prompts)",
    "other weights than the version says: model.path must hold the same files on all machines",
    "another arithmetic: model.dtype on one side only, a quantized engine, rope or logit settings "
    "that one side ignores; model.dtype=float32 takes rounding out of the comparison",
    "the attention kernel or dropout of the learner: try model.attention=eager",
)


class NotSamePolicy(ValueError):
    """The user can mend it: the message says what was measured, the bounds, and where to look."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two logprobs of each token are apart, over all tokens; all 0 for none."""

    num_tokens: int = 0
    ratio_mean: float = 0.0
    """Of learner's to generator's probability."""
    ratio_error: float = 0.0
    """Standard error of `ratio_mean`; tokens of one response are no less independent in it."""
    mean: float = 0.0
    """Of |learner - generator|; so are median and max. Nats."""
    median: float = 0.0
    max: float = 0.0
    k3: float = 0.0
    """Mean of r - 1 - log r: KL(generator || learner) per token."""

    def in_words(self) -> str:
        return (
            f"mean gap {self.mean:.4f}, median {self.median:.4f}, largest {self.max:.3f}, k3 "
            f"{self.k3:.5f}, mean ratio {self.ratio_mean:.4f} (+- {self.ratio_error:.4f}), "
            f"{self.num_tokens} tokens"
        )

    def metrics(self) -> dict[str, float]:
        """For the record of a step: without tokens only that there were none."""
        if not self.num_tokens:
            return {"parity/num_tokens": 0.0}
        return {
            "parity/num_tokens": float(self.num_tokens),
            "parity/ratio_mean": self.ratio_mean,
            "parity/gap_mean": self.mean,
            "parity/gap_median": self.median,
            "parity/gap_max": self.max,
            "parity/k3": self.k3,
        }


def measure(log_ratios: Tensor) -> Gap:
    """`log_ratios` [n]: learner's minus generator's logprob of each token."""
    if log_ratios.numel() == 0:
        return Gap()
    log_ratios = log_ratios.double()
    gaps, ratios = log_ratios.abs(), log_ratios.exp()
    return Gap(
        num_tokens=len(gaps),
        ratio_mean=float(ratios.mean()),
        ratio_error=float(ratios.std(correction=0)) / len(ratios) ** 0.5,
        mean=float(gaps.mean()),
        median=float(gaps.median()),
        max=float(gaps.max()),
        k3=float((ratios - 1 - log_ratios).mean()),
    )


def excesses(gap: Gap, limits: Parity) -> list[str]:
    """What is over its bound, with both numbers; empty when both sides are one policy."""
    off, by_chance = abs(gap.ratio_mean - 1), SURE * gap.ratio_error
    judged = (
        ("mean gap", gap.mean, limits.max_gap_mean, "parity.max_gap_mean"),
        ("k3", gap.k3, limits.max_k3, "parity.max_k3"),
        ("|mean ratio - 1|", off, limits.max_ratio_error + by_chance, "parity.max_ratio_error"),
    )
    return [
        f"{name} is {value:.4f} (at most {limit:.4g}: {key})"
        for name, value, limit, key in judged
        if not value <= limit  # nor is NaN
    ]


def refusal(gap: Gap, found: list[str]) -> str:
    """The whole message: numbers, bounds, and the usual causes with what to look at."""
    causes = "\n".join(f"  - {cause}" for cause in CAUSES)
    return (
        "generator and learner are not the same policy: at equal weights "
        f"{' and '.join(found)} ({gap.in_words()}).\nUsual causes:\n{causes}\n"
        "Mend it and try `asyncrl-launch check CONFIG`. If the fault was the generator's, begin a "
        "new run: what it has sampled has the fault (docs/parity.md)"
    )


def rows_at_equal_weights(groups: list[RolloutGroup], now: WeightId, start: int) -> Tensor:
    """[rollouts] True for those whose every token was sampled by the weights `now`.

    A rollout that began with older weights may still attend to what those computed. Weights of an
    earlier life are these only up to version `start`, which this life loaded; later ones it has
    computed anew, and on GPUs perhaps not to the last bit.
    """
    return torch.tensor(
        [
            (group.inc == now.inc or now.version <= start)
            and bool((rollout.versions[rollout.loss_mask] == now.version).all())
            for group in groups
            for rollout in group.rollouts
        ],
        dtype=torch.bool,
    )


class ParityWatch:
    """Measures every step, and judges whenever there are parity.min_tokens tokens."""

    def __init__(self, config: Config) -> None:
        self._limits = config.parity
        self._judges = config.generator.engine != "scripted"  # whose logprobs are made up
        self._start = WeightId(0, 0)
        self._kept: list[Tensor] = []
        self._is_started = False
        self._num_alarms = 0
        self._trouble = ""

    def begin(self, start: WeightId) -> None:
        """This life of the learner is `start.inc`; it has loaded version `start.version`."""
        self._start = start

    def trouble(self) -> str:
        """What is wrong, in words, from an alarm until a later verdict is good."""
        return self._trouble

    def look(
        self, groups: list[RolloutGroup], columns: Tensor, *, step: int, is_judged: bool
    ) -> dict[str, float]:
        """Metrics of one step, before its optimizer step; `columns` as of token_metrics.

        Raises NotSamePolicy, alike on all ranks. Steps that are not judged are measured only.
        """
        now = WeightId(self._start.inc, step)
        is_equal = rows_at_equal_weights(groups, now, self._start.version)
        log_ratios = columns[1][is_equal[columns[4].long()]]
        if self._judges and is_judged:
            self._kept.append(log_ratios)
            if sum(map(len, self._kept)) >= self._limits.min_tokens:
                self._judge(measure(torch.cat(self._kept)), step)
        return {**measure(log_ratios).metrics(), "parity/num_alarms": float(self._num_alarms)}

    def _judge(self, gap: Gap, step: int) -> None:
        self._kept.clear()
        found, is_first = excesses(gap, self._limits), not self._is_started
        self._is_started = True
        if not found:
            if is_first:
                log.info("parity at equal weights: %s", gap.in_words())
            self._trouble = ""
            return
        self._num_alarms += 1
        if (self._limits.at_start if is_first else self._limits.in_run) in ("refuse", "stop"):
            raise NotSamePolicy(refusal(gap, found))
        if not self._trouble:
            log.warning("step %d: %s", step, refusal(gap, found))
        self._trouble = f"parity alarm: {' and '.join(found)}"
