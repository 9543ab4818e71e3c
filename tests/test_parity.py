"""Parity as numbers: what is measured, what is judged, and when."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_config, make_group

from asyncrl.config.schema import Config, Parity
from asyncrl.types import RolloutGroup, WeightId
from learner.parity import (
    Gap,
    NotSamePolicy,
    ParityWatch,
    excesses,
    measure,
    refusal,
    rows_at_equal_weights,
)


def test_the_statistics_are_those_of_their_formulas() -> None:
    gap = measure(torch.tensor([0.0, math.log(2), -math.log(4)]))
    assert gap.num_tokens == 3
    assert gap.ratio_mean == pytest.approx((1 + 2 + 0.25) / 3)
    assert gap.mean == pytest.approx(math.log(8) / 3)
    assert gap.median == pytest.approx(math.log(2))
    assert gap.max == pytest.approx(math.log(4))
    k3 = (0 + (1 - math.log(2)) + (0.25 - 1 + math.log(4))) / 3
    assert gap.k3 == pytest.approx(k3)
    assert measure(torch.zeros(0)) == Gap()


def test_the_mean_ratio_is_1_for_a_learner_of_any_other_policy_and_k3_is_its_divergence() -> None:
    """Why the mean ratio alone proves nothing."""
    torch.manual_seed(0)
    generator = torch.log_softmax(torch.randn(12), 0)
    learner = torch.log_softmax(torch.randn(12), 0)
    tokens = torch.multinomial(generator.exp(), 200_000, replacement=True)
    gap = measure((learner - generator)[tokens])
    assert gap.ratio_mean == pytest.approx(1, abs=0.03)
    divergence = float((generator.exp() * (generator - learner)).sum())
    assert gap.k3 == pytest.approx(divergence, rel=0.03)
    assert [text.split(" is ")[0] for text in excesses(gap, Parity())] == ["mean gap", "k3"]


def test_logprobs_of_another_distribution_than_the_one_sampled_from_move_the_mean_ratio() -> None:
    """Whatever the noise: here the bounds on it are wide."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(12)
    sampled = torch.log_softmax(logits / 0.9, 0)
    tokens = torch.multinomial(sampled.exp(), 50_000, replacement=True)
    gap = measure((sampled - torch.log_softmax(logits, 0))[tokens])
    (found,) = excesses(gap, Parity(max_gap_mean=0.5, max_k3=0.1))
    assert found.startswith("|mean ratio - 1| is 0.0") and "parity.max_ratio_error" in found


def test_what_is_over_a_bound_is_named_with_both_numbers_and_the_usual_causes() -> None:
    gap = Gap(num_tokens=1234, ratio_mean=1.5, ratio_error=0.2, mean=0.31, max=3.0, k3=0.005)
    found = excesses(gap, Parity())
    assert found == ["mean gap is 0.3100 (at most 0.1: parity.max_gap_mean)"]
    text = refusal(gap, found)
    for part in (found[0], "1234 tokens", "mean ratio 1.5", "0.00500", "largest 3.000"):
        assert part in text
    for cause in ("temperature", "position", "chat template", "tokenizer", "dtype", "weights"):
        assert cause in text
    assert len(text) < 2000, "a reason in a message is cut there"


def test_a_gap_that_is_no_number_is_over_every_bound() -> None:
    assert len(excesses(measure(torch.tensor([0.0, math.nan])), Parity())) == 3


def at(version: int | list[int], *, inc: int = 1, position: int = 0) -> RolloutGroup:
    """One rollout, of one version or with one for each token."""
    group = make_group(position, size=1)
    rollout = group.rollouts[0]
    versions = np.resize(np.array(version, np.int32), len(rollout.token_ids))
    return replace(group, inc=inc, rollouts=(replace(rollout, versions=versions),))


def test_only_rollouts_of_the_present_weights_from_their_first_token_on_are_compared() -> None:
    mixed = next(g for i in range(9) if len((g := at(5, position=i)).rollouts[0].token_ids) > 2)
    versions = mixed.rollouts[0].versions.copy()
    versions[0] = 4
    mixed = replace(mixed, rollouts=(replace(mixed.rollouts[0], versions=versions),))
    groups = [at(5), at(4), mixed, at(5, inc=0)]
    assert rows_at_equal_weights(groups, WeightId(1, 5), 0).tolist() == [True, False, False, False]


def test_weights_of_an_earlier_life_are_the_same_only_where_this_one_has_loaded_them() -> None:
    groups = [at(5, inc=1), at(5, inc=2)]
    assert rows_at_equal_weights(groups, WeightId(2, 5), 5).tolist() == [True, True]
    assert rows_at_equal_weights(groups, WeightId(2, 5), 3).tolist() == [False, True]


def watch_of(engine: str = "vllm", **parity: Any) -> ParityWatch:
    tree = make_config(Path("model")).model_dump()
    tree["parity"] = {"min_tokens": 10, **parity}
    tree["generator"]["engine"] = engine
    watch = ParityWatch(Config.model_validate(tree))
    watch.begin(WeightId(1, 0))
    return watch


def look(
    watch: ParityWatch, step: int, gap: float, *, num_tokens: int = 10, is_judged: bool = True
) -> dict[str, float]:
    """One group of that step's version; each of its tokens is `gap` apart, one way or the other."""
    columns = torch.zeros(6, num_tokens)
    columns[1] = gap * (-1) ** torch.arange(num_tokens)
    return watch.look([at(step)], columns, step=step, is_judged=is_judged)


def test_the_first_verdict_refuses_and_later_ones_alarm(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotSamePolicy, match="mean gap is 0.5"):
        look(watch_of(), 0, 0.5)
    watch = watch_of()
    assert look(watch, 0, 0.01)["parity/num_alarms"] == 0
    assert look(watch, 1, 0.5)["parity/num_alarms"] == 1
    assert "mean gap is 0.5000" in watch.trouble()
    assert look(watch, 2, 0.5)["parity/num_alarms"] == 2
    warned = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1 and "step 1:" in warned[0].getMessage()
    look(watch, 3, 0.01)
    assert watch.trouble() == ""


def test_the_configuration_says_whether_it_refuses_and_whether_it_stops() -> None:
    watch = watch_of(at_start="warn", in_run="stop")
    assert look(watch, 0, 0.5)["parity/num_alarms"] == 1
    with pytest.raises(NotSamePolicy):
        look(watch, 1, 0.5)


def test_too_few_tokens_give_no_verdict_and_are_gathered_until_there_are_enough() -> None:
    watch = watch_of()
    assert look(watch, 0, 0.5, num_tokens=4)["parity/gap_mean"] == 0.5
    assert look(watch, 1, 0.5, num_tokens=5)["parity/num_tokens"] == 5
    assert look(watch, 2, 0.5, num_tokens=0) == {"parity/num_tokens": 0, "parity/num_alarms": 0}
    with pytest.raises(NotSamePolicy, match="10 tokens"):
        look(watch, 3, 0.5, num_tokens=1)


@pytest.mark.parametrize("kind", ["replayed", "scripted"])
def test_replayed_steps_and_made_up_logprobs_are_measured_and_never_judged(kind: str) -> None:
    watch = watch_of("scripted" if kind == "scripted" else "vllm")
    values = look(watch, 0, 0.5, is_judged=kind != "replayed")
    assert values["parity/gap_mean"] == 0.5 and values["parity/num_alarms"] == 0
    assert watch.trouble() == ""
