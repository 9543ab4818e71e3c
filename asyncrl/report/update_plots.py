"""The picture of what a weight update costs: by version, and the usual one in the order of its
phases."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from asyncrl.report.axes import BLUE, GREEN, ORANGE, RED, WIDTH_IN, line
from asyncrl.report.summary import RunFacts, brief
from asyncrl.report.updates import STAGED, SWAPPED, UpdateCost, median, prepared_s

GREY = "#a9b1ba"


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
    longest = [cost.longest_s for cost in costs]
    series: list[tuple[str, str, list[float | None]]] = [
        ("publication to serving", ORANGE, [cost.propagation_s for cost in costs]),
        ("staging", GREEN, [cost.seconds.get("stage") for cost in costs]),
        ("generator paused", RED, [cost.seconds.get("paused") for cost in costs]),
        ("learner blocked", BLUE, [cost.blocked_s for cost in costs]),
    ]
    for label, color, values in series:
        line(axes, versions, [value or None for value in values], color=color, label=label)
    known = [(at, value) for at, value in zip(versions, longest, strict=True) if value]
    axes.plot([at for at, _ in known], [value for _, value in known], ":", color=ORANGE)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: brief(seconds)))
    axes.set(xlabel="policy version (dotted: until the last generator serves it)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


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
    return [_Part(name, seconds, color) for name, seconds, color in found if seconds]


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
