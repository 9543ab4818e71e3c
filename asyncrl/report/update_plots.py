"""The picture of what a weight update costs: by version, and the usual one in the order of its
phases."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from asyncrl.report.axes import BLUE, GREEN, MANY_STEPS, ORANGE, RED, WIDTH_IN, line
from asyncrl.report.series import smoothed
from asyncrl.report.summary import RunFacts
from asyncrl.report.updates import STAGED, SWAPPED, UpdateCost, brief, median, prepared_s

GREY = "#a9b1ba"
NOTHING_S = 5e-5


class _Part(NamedTuple):
    """One bar of the usual update."""

    name: str
    seconds: float
    color: str


def updates_figure(facts: RunFacts) -> Figure | None:
    """Left: seconds by version; right: medians of all phases, one after the other."""
    costs = facts.updates
    if not costs:
        return None
    figure = Figure(figsize=(WIDTH_IN, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _by_version(left, costs)
    _usual(right, _parts(facts))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _by_version(axes: Axes, costs: list[UpdateCost]) -> None:
    versions = [float(cost.version) for cost in costs]
    series: list[tuple[str, str, list[float | None]]] = [
        ("publication to serving", ORANGE, [cost.propagation_s for cost in costs]),
        ("staging", GREEN, [cost.seconds.get("stage") for cost in costs]),
        ("generator paused", RED, [cost.seconds.get("paused") for cost in costs]),
        ("learner blocked", BLUE, [cost.blocked_s for cost in costs]),
    ]
    for label, color, values in series:
        line(axes, versions, [_seen(value) for value in values], color=color, label=label)
    are_many = any(cost.num_generators > 1 for cost in costs)
    if are_many:
        _last(axes, costs)
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(FuncFormatter(lambda seconds, _: brief(seconds)))
    dotted = " (dotted: until the last generator serves it)" if are_many else ""
    axes.set(xlabel=f"policy version{dotted}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _last(axes: Axes, costs: list[UpdateCost]) -> None:
    """Until the last generator serves it; a moving mean where that is drawn of the others."""
    known = [(cost.version, cost.longest_s) for cost in costs if cost.longest_s is not None]
    window = max(5, len(known) // 20) if len(known) >= MANY_STEPS else 1
    longest = smoothed([seconds for _, seconds in known], window=window)
    axes.plot([version for version, _ in known], longest, ":", color=ORANGE)


def _seen(seconds: float | None) -> float | None:
    """None for what is nothing but the cost of looking at the clock."""
    return seconds if seconds is not None and seconds >= NOTHING_S else None


def _parts(facts: RunFacts) -> list[_Part]:
    """Medians of what there is, in the order in which it happens."""
    costs, prepared = facts.updates, prepared_s(facts.steps)
    staged = [(phase, GREEN) for phase in STAGED]
    swapped = [(phase, RED) for phase in SWAPPED]
    found = [
        ("learner blocked", median(cost.blocked_s for cost in costs), BLUE),
        ("prepared to send", prepared, GREY),
        ("on the way", median(cost.on_the_way_s for cost in costs), ORANGE),
        *(
            (phase, median(cost.seconds.get(phase) for cost in costs), color)
            for phase, color in [*staged, ("wait", GREY), *swapped]
        ),
    ]
    seen = [(name, _seen(seconds), color) for name, seconds, color in found]
    return [_Part(name, seconds, color) for name, seconds, color in seen if seconds is not None]


def _usual(axes: Axes, parts: list[_Part]) -> None:
    at, total = 0.0, sum(part.seconds for part in parts)
    for row, part in enumerate(parts):
        axes.barh(row, part.seconds, 0.7, at, color=part.color)
        is_late = at + part.seconds / 2 > total / 2
        where, side = (at, "right") if is_late else (at + part.seconds, "left")
        text = f" {brief(part.seconds)} "
        axes.text(where, row, text, ha=side, va="center", fontsize=9)
        at += part.seconds
    axes.set_yticks(range(len(parts)), [part.name for part in parts])
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_xlim(0, total)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: brief(seconds)))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("the usual update: medians, one after the other")
