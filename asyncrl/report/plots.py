"""The pictures of the report, each as the bytes of a PNG. matplotlib is loaded here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from asyncrl.report.axes import (
    BLUE,
    GREEN,
    MANY_STEPS,
    ORANGE,
    RED,
    WIDTH_IN,
    line,
    png,
    ramp,
    style,
    time_axis,
    time_unit,
)
from asyncrl.report.series import averaged, sampling_speed, staleness_shares
from asyncrl.report.summary import RunFacts
from asyncrl.report.time_plots import shares_figure, timeline_figure
from asyncrl.report.update_plots import updates_figure

_COLUMNS = 300
"""Of the staleness picture: with more steps, a column is the mean of some."""


def draw_all(facts: RunFacts) -> dict[str, bytes]:
    """PNGs by name. Pictures for which a run has no numbers are left out."""
    pictures: dict[str, Callable[[RunFacts], Figure | None]] = {
        "reward": reward_figure,
        "staleness": staleness_figure,
        "throughput": throughput_figure,
        "shares": shares_figure,
        "timeline": timeline_figure,
        "updates": updates_figure,
    }
    drawn = {}
    with style():
        for name, draw in pictures.items():
            figure = draw(facts)
            if figure is not None:
                drawn[name] = png(figure)
    return drawn


def reward_figure(facts: RunFacts) -> Figure | None:
    """Training reward and held-out accuracy, by step and by wall clock."""
    steps, evals, clock = facts.steps, facts.evals, facts.clock
    if not steps and not evals:
        return None
    figure = Figure(figsize=(WIDTH_IN, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rewards = [step.number("buffer/reward_mean") for step in steps]
    unit_s, _ = time_unit(clock.total_s)
    times = [clock.seconds(step.at) / unit_s for step in steps]
    eval_times = [clock.seconds(point.at) / unit_s for point in evals]
    for axes, x, eval_x in (
        (left, [float(step.step) for step in steps], [float(p.version) for p in evals]),
        (right, times, eval_times),
    ):
        line(axes, x, rewards, color=BLUE, label="training reward, all groups that came in")
        if evals:
            accuracy = [point.accuracy for point in evals]
            axes.plot(eval_x, accuracy, color=ORANGE, linewidth=1, alpha=0.4)
            axes.plot(eval_x, accuracy, "D", color=ORANGE, label="held-out accuracy", zorder=3)
    left.set(xlabel="step, and policy version before it", ylabel="mean reward")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlim(-0.5, max([step.step for step in steps] + [p.version for p in evals]) + 0.5)
    right.set_xlim(0, max(clock.total_s / unit_s * 1.01, 1e-3))
    time_axis(right, clock)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def staleness_figure(facts: RunFacts) -> Figure | None:
    """For each step the share of its tokens at each staleness, with bound and mean."""
    steps = [step for step in facts.steps if sum(step.staleness.values())]
    if not steps:
        return None
    first, last = steps[0].step, steps[-1].step
    starts, grid = averaged(staleness_shares(steps), at_most=_COLUMNS)
    bounds = _bounds(facts, first, last)
    highest = int(np.nanmax([*bounds, len(grid) - 1]))
    figure = Figure(figsize=(WIDTH_IN, min(2.4 + 0.3 * highest, 5.0)), layout="constrained")
    axes = figure.subplots()
    edges, ages = first - 0.5 + np.append(starts, len(bounds)), np.arange(len(grid))
    rows = np.append(ages, len(grid)) - 0.5
    mesh = axes.pcolormesh(edges, rows, grid, cmap=ramp(), vmin=0, vmax=1)
    label = "max_staleness: nothing above is trained"
    every = np.arange(first, last + 2) - 0.5
    axes.stairs(bounds + 0.5, every, baseline=None, color=RED, linewidth=2.5, label=label)
    marker = "o" if len(starts) < MANY_STEPS else ""
    middles = (edges[:-1] + edges[1:]) / 2
    axes.plot(middles, ages @ grid, marker=marker, markersize=4, color=ORANGE, label="mean")
    axes.set(xlabel="step", ylabel="staleness (versions)", ylim=(-0.5, highest + 1.5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)
    figure.colorbar(mesh, ax=axes, label="share of tokens", pad=0.01)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def _bounds(facts: RunFacts, first: int, last: int) -> NDArray[np.float64]:
    """max_staleness of every step from `first` to `last`."""
    of = {step.step: step.max_staleness for step in facts.run.steps}
    default = facts.run.setting("max_staleness")
    return np.array([of.get(step, default) for step in range(first, last + 1)], float)


def throughput_figure(facts: RunFacts) -> Figure | None:
    """Tokens per second of learner and generators."""
    steps = facts.steps
    if not steps:
        return None
    figure = Figure(figsize=(WIDTH_IN, 2.9), layout="constrained")
    axes = figure.subplots()
    unit_s, _ = time_unit(facts.clock.total_s)
    times = [facts.clock.seconds(step.at) / unit_s for step in steps]
    speeds = [step.number("train/tokens_per_s") for step in steps]
    label = "learner: prompt and response tokens trained"
    line(axes, times, speeds, color=BLUE, label=label)
    sampled = sampling_speed(facts.run, facts.clock)
    sampled_at = [seconds / unit_s for seconds, _ in sampled]
    label = "all generators: tokens sampled"
    axes.plot(sampled_at, [speed for _, speed in sampled], color=GREEN, label=label)
    axes.set(ylabel="tokens per second")
    axes.set_xlim(0, max(facts.clock.total_s / unit_s, 1e-3))
    axes.set_ylim(bottom=0)
    time_axis(axes, facts.clock)
    figure.legend(loc="outside upper center", ncols=2)
    return figure
