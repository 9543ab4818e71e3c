"""Where the time of each process went: as one bar for the whole run, and along its clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from asyncrl.report.axes import GREEN, WIDTH_IN, time_axis, time_unit
from asyncrl.report.summary import RunFacts
from asyncrl.report.timeline import binned, drawn_lanes
from asyncrl.report.updates import stagings
from asyncrl.shares import Shares
from asyncrl.states import AWAY, COLORS, STATES, is_waiting, percentages

_SHARE_SEEN = 0.002
"""A state that took less of all time cannot be seen, and is left out of the legend."""
_NUMBER_SEEN = 4
"""Percent from which on a part of a bar has its number in it."""
_BINS = 900
_BAND, _GAP = 40, 5
"""Pixels of a process's band in the timeline, and above and below it."""
_STAGING_AT = 0.955
"""Where in the height of its row a generator's staging is drawn."""
_LEGEND_ROWS_IN, _ROW_IN = 1.25, 0.42


def shares_figure(facts: RunFacts) -> Figure | None:
    """One bar for each process: the share of its wall time in each state; they add up to 100%."""
    found = facts.shares
    if not found:
        return None
    figure = Figure(
        figsize=(WIDTH_IN, _LEGEND_ROWS_IN + _ROW_IN * len(found)), layout="constrained"
    )
    axes = figure.subplots()
    for row, each in enumerate(found):
        _bar(axes, row, each)
    axes.set_yticks(range(len(found)), [each.process for each in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xticks(range(0, 101, 25), [f"{tick}%" for tick in range(0, 101, 25)])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines[["left", "bottom"]].set_visible(False)
    _legend(figure, _visible([each.seconds for each in found]))
    return figure


def timeline_figure(facts: RunFacts) -> Figure | None:
    """One row for each process: the share of its time that each state took."""
    lanes = drawn_lanes(facts.run, facts.lanes, facts.clock)
    if not lanes or not facts.clock.total_s:
        return None
    rows = len(lanes)
    figure = Figure(figsize=(WIDTH_IN, 1.5 + 0.55 * rows), layout="constrained")
    axes = figure.subplots()
    end = facts.clock.total_s / time_unit(facts.clock.total_s)[0]
    edges = np.linspace(0.0, facts.clock.total_s, _BINS + 1)
    parts = [binned(lane, edges) for lane in lanes]
    image = np.concatenate([_band(each) for each in parts])
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, end, rows, 0))
    staged = _draw_stagings(axes, facts, [lane.name for lane in lanes])
    seen = _visible([{s: float(p.sum()) for s, p in each.items()} for each in parts])
    _legend(figure, seen, also=staged)
    axes.set_yticks([row + 0.5 for row in range(rows)], [lane.name for lane in lanes])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    time_axis(axes, facts.clock)
    return figure


def _draw_stagings(axes: Axes, facts: RunFacts, names: list[str]) -> list[Artist]:
    """A line along the bottom of a generator's row while it stages new weights; returns what the
    legend is to show."""
    clock, unit_s = facts.clock, time_unit(facts.clock.total_s)[0]
    spans = []
    for member, begin, end in stagings(facts.run):
        name = member if member in names else member.rpartition("-")[0]
        if name in names:
            row = names.index(name) + _STAGING_AT
            spans.append((row, clock.seconds(begin) / unit_s, clock.seconds(end) / unit_s))
    if not spans:
        return []
    label = "staging new weights, beside it"
    rows, begins, ends = zip(*spans, strict=True)
    return [axes.hlines(rows, begins, ends, colors=GREEN, linewidth=2.5, label=label)]


def _bar(axes: Axes, row: int, each: Shares) -> None:
    total, left = sum(each.seconds.values()), 0.0
    numbers = percentages(each.seconds)
    for state, seconds in each.seconds.items():
        width = 100 * seconds / total
        is_away = state == AWAY
        axes.barh(
            *(row, width, 0.72, left),
            color=COLORS[state],
            edgecolor="#c3cad2" if is_away else "white",
            hatch="////" if is_away else None,
            linewidth=0.0 if is_away else 0.8,
        )
        if width >= _NUMBER_SEEN and numbers.get(state):
            text = f"{numbers[state]}%"
            ink = _ink(state)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if is_away else None
            axes.text(left + width / 2, row, text, ha="center", va="center", color=ink, bbox=box)
        left += width


def _ink(state: str) -> str:
    """Dark on light colours, white on dark ones."""
    red, green, blue = to_rgb(COLORS[state])
    return "#24292f" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.62 else "white"


def _visible(parts: Sequence[dict[str, float]]) -> list[str]:
    """The states that can be seen, in the order in which they are shown."""
    total = sum(sum(each.values()) for each in parts)
    shares = {state: sum(each.get(state, 0.0) for each in parts) / total for state in STATES}
    return [state for state, share in shares.items() if share > _SHARE_SEEN]


def _legend(figure: Figure, states: Iterable[str], also: Sequence[Artist] = ()) -> None:
    """One entry for each colour: states of different roles may share one."""
    by_color: dict[str, list[str]] = {}
    for state in states:
        by_color.setdefault(COLORS[state], []).append(state)
    patches = [_patch(color, alike) for color, alike in by_color.items()]
    figure.legend(handles=[*patches, *also], loc="outside upper center", ncols=3, handlelength=1.4)


def _patch(color: str, alike: list[str]) -> Patch:
    """As `training, generating, serving` or `waiting for a batch, leases`."""
    is_away = AWAY in alike
    label = ", ".join([alike[0], *(_last_words(state) for state in alike[1:])])
    edge, hatch = ("#c3cad2", "////") if is_away else (color, None)
    return Patch(facecolor=color, edgecolor=edge, hatch=hatch, label=label)


def _last_words(state: str) -> str:
    return state.removeprefix("waiting for ") if is_waiting(state) else state


def _band(parts: dict[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """A process as an image [height, bins, RGBA]: each column is filled from below by the share
    of every state, in the order of STATES; where it was away it is striped."""
    levels = (np.arange(_BAND) + 0.5) / _BAND
    num_bins = len(parts[AWAY])
    tops = np.cumsum([parts[state] for state in STATES], axis=0)  # [states, bins]
    states = (tops[None] < levels[:, None, None] - 1e-9).sum(axis=1)  # [height, bins]
    colors = np.array([to_rgba(COLORS[state]) for state in STATES])
    image = np.zeros((_BAND + 2 * _GAP, num_bins, 4))
    shown = states[::-1].clip(max=len(STATES) - 1)
    image[_GAP:-_GAP] = colors[shown]
    rows, columns = np.indices(shown.shape)
    stripes = (shown == STATES.index(AWAY)) & ((rows + columns) % 10 < 2)
    image[_GAP:-_GAP][stripes] = to_rgba("#c3cad2")
    return image
