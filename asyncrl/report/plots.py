"""The pictures of the report, each as the bytes of a PNG. matplotlib is loaded here."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from asyncrl.report.series import smoothed
from asyncrl.report.summary import RunFacts
from asyncrl.report.timeline import KINDS, Lane, shares

WIDTH_IN = 10.0
DPI = 130
_INK, _RULES = "#24292f", "#d0d7de"
_BLUE, _ORANGE, _GREEN = "#3d84c6", "#e8912d", "#4fa36c"
_KIND_COLORS = {
    "work": _BLUE,
    "wait": _ORANGE,
    "weights": "#9a6fc4",
    "replay": "#86bfe8",
    "save": _GREEN,
    "start": "#a9b1ba",
    "other": "#6c7681",
}
_MANY_STEPS = 30
"""From here on a moving mean is drawn over the single steps."""
_BINS = 900
_BAND, _GAP = 40, 5
"""Pixels of a process's band in the timeline, and above and below it."""


def draw_all(facts: RunFacts) -> dict[str, bytes]:
    """PNGs by name. Pictures for which a run has no numbers are left out."""
    pictures: dict[str, Callable[[RunFacts], Figure | None]] = {
        "reward": reward_figure,
        "staleness": staleness_figure,
        "throughput": throughput_figure,
        "timeline": timeline_figure,
    }
    drawn = {}
    with _style():
        for name, draw in pictures.items():
            figure = draw(facts)
            if figure is not None:
                drawn[name] = _png(figure)
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
        _line(axes, x, rewards, color=_BLUE, label="training reward, all groups that came in")
        if evals:
            accuracy = [point.accuracy for point in evals]
            axes.plot(eval_x, accuracy, color=_ORANGE, linewidth=1, alpha=0.4)
            axes.plot(eval_x, accuracy, "D", color=_ORANGE, label="held-out accuracy", zorder=3)
    left.set(xlabel="step, and policy version before it", ylabel="mean reward")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlim(left=0)
    _time_axis(right, facts)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def staleness_figure(facts: RunFacts) -> Figure | None:
    """For each step the share of its tokens at each staleness, with bound and mean."""
    steps = [step for step in facts.steps if sum(step.staleness.values())]
    if not steps:
        return None
    bound_of = {step.step: step.max_staleness for step in facts.run.steps}
    highest = max([*bound_of.values(), *(max(step.staleness) for step in steps)])
    first, last = steps[0].step, steps[-1].step
    grid = np.full((highest + 2, last - first + 1), np.nan)
    for step in steps:
        grid[:, step.step - first] = 0.0
        for age, count in step.staleness.items():
            grid[age, step.step - first] = count / sum(step.staleness.values())
    figure = Figure(figsize=(WIDTH_IN, min(2.4 + 0.3 * highest, 5.0)), layout="constrained")
    axes = figure.subplots()
    edges = np.arange(first, last + 2) - 0.5
    mesh = axes.pcolormesh(edges, np.arange(highest + 3) - 0.5, grid, cmap=_ramp(), vmin=0, vmax=1)
    bounds = [
        bound_of.get(step, facts.run.setting("max_staleness")) for step in range(first, last + 1)
    ]
    axes.stairs(
        np.array(bounds, float) + 0.5,
        edges,
        baseline=None,
        color="#d1443c",
        linewidth=2.5,
        label="max_staleness: nothing above is trained",
    )
    means = [step.number("staleness/mean") for step in steps]
    axes.plot(
        [step.step for step in steps],
        _nans(means),
        color=_ORANGE,
        linewidth=1.8,
        marker="o" if len(steps) < _MANY_STEPS else None,
        markersize=4,
        label="mean",
    )
    axes.set(xlabel="step", ylabel="staleness (versions)", ylim=(-0.5, highest + 1.5))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False)
    figure.colorbar(mesh, ax=axes, label="share of tokens", pad=0.01)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def throughput_figure(facts: RunFacts) -> Figure | None:
    """Tokens per second of learner and generators."""
    steps = facts.steps
    if not steps:
        return None
    figure = Figure(figsize=(WIDTH_IN, 2.9), layout="constrained")
    axes = figure.subplots()
    unit_s, _ = time_unit(facts.clock.total_s)
    times = [facts.clock.seconds(step.at) / unit_s for step in steps]
    for name, color, label in (
        ("train/tokens_per_s", _BLUE, "learner: prompt and response tokens trained"),
        ("buffer/generator_tokens_per_s", _GREEN, "all generators: tokens sampled"),
    ):
        _line(axes, times, [step.number(name) for step in steps], color=color, label=label)
    axes.set(ylabel="tokens per second")
    axes.set_xlim(0, max(facts.clock.total_s / unit_s, 1e-3))
    axes.set_ylim(bottom=0)
    _time_axis(axes, facts)
    figure.legend(loc="outside upper center", ncols=2)
    return figure


def timeline_figure(facts: RunFacts) -> Figure | None:
    """One row for each process: the share of its time that each activity took."""
    if not facts.lanes or not facts.clock.total_s:
        return None
    rows = len(facts.lanes)
    figure = Figure(figsize=(WIDTH_IN, 1.3 + 0.55 * rows), layout="constrained")
    axes = figure.subplots()
    end = facts.clock.total_s / time_unit(facts.clock.total_s)[0]
    edges = np.linspace(0.0, facts.clock.total_s, _BINS + 1)
    image = np.concatenate([_band(lane, edges) for lane in facts.lanes])
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, end, rows, 0))
    present = {kind for lane in facts.lanes for kind, s in lane.seconds.items() if s > 0}
    patches = [
        Patch(color=_KIND_COLORS[kind], label=KINDS[kind]) for kind in KINDS if kind in present
    ]
    axes.set_yticks([row + 0.5 for row in range(rows)], [lane.name for lane in facts.lanes])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    _time_axis(axes, facts)
    figure.legend(handles=patches, loc="outside upper center", ncols=3)
    return figure


def _band(lane: Lane, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """A process as an image [height, bins, RGBA]: each column is filled from below by the share
    of every kind, in the order of KINDS; what is left is transparent."""
    levels = (np.arange(_BAND) + 0.5) / _BAND
    tops = np.cumsum(list(shares(lane, edges).values()), axis=0)  # [kinds, bins]
    colors = np.array([*(to_rgba(_KIND_COLORS[kind]) for kind in KINDS), (0, 0, 0, 0)])
    kinds = (tops[None] < levels[:, None, None]).sum(axis=1)  # [height, bins]
    image = np.zeros((_BAND + 2 * _GAP, len(edges) - 1, 4))
    image[_GAP:-_GAP] = colors[kinds[::-1]]
    return image


def _line(
    axes: Axes, x: Sequence[float], values: list[float | None], *, color: str, label: str
) -> None:
    """The points; where there are many, faint ones and their moving mean."""
    if not any(value is not None for value in values):
        return
    if len(values) < _MANY_STEPS:
        axes.plot(x, _nans(values), "o-", color=color, markersize=4, label=label)
        return
    window = max(5, len(values) // 20)
    axes.plot(x, _nans(values), color=color, alpha=0.3, linewidth=1)
    mean = smoothed(values, window=window)
    axes.plot(x, _nans(mean), color=color, label=f"{label} (mean of {window})")


def _nans(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


def time_unit(total_s: float) -> tuple[float, str]:
    """Seconds in the unit in which so long a run is drawn, and its name."""
    if total_s < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if total_s < 3 * 3600 else (3600.0, "hours")


def _time_axis(axes: Axes, facts: RunFacts) -> None:
    """Labels the axis of the run's clock, and marks where pauses were cut out of it."""
    unit_s, unit = time_unit(facts.clock.total_s)
    resumed = facts.clock.resumed_at
    axes.set_xlabel(f"{unit} (dotted: a pause is left out)" if resumed else unit)
    for seconds in resumed:
        axes.axvline(seconds / unit_s, color="#808890", linestyle=":", linewidth=1.5)


def _ramp() -> Any:
    """From the background to blue."""
    return LinearSegmentedColormap.from_list("share", ["white", _BLUE])


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    """Our look, whatever the user's own matplotlib settings are."""
    names = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    look: dict[str, Any] = {
        **dict.fromkeys(names, _INK),
        **dict.fromkeys(("axes.edgecolor", "grid.color"), _RULES),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "axes.grid": True,
        "savefig.dpi": DPI,
        "font.size": 10,
    }
    with matplotlib.style.context(["default", look]):
        yield
