"""What all pictures of the report have in common: colours, the time axis, lines of many steps."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from asyncrl.report.series import smoothed
from asyncrl.run_clock import RunClock

WIDTH_IN = 10.0
DPI = 130
BLUE, ORANGE, GREEN, RED = "#3d84c6", "#e8912d", "#4fa36c", "#d1443c"
MANY_STEPS = 30
"""From here on a moving mean is drawn over the single steps."""
_INK, _RULES = "#24292f", "#d0d7de"


def line(
    axes: Axes, x: Sequence[float], values: list[float | None], *, color: str, label: str
) -> None:
    """The points that there are; where they are many, faint ones and their moving mean."""
    points = [(at, value) for at, value in zip(x, values, strict=True) if value is not None]
    if not points:
        return
    x, there = [at for at, _ in points], [value for _, value in points]
    if len(there) < MANY_STEPS:
        axes.plot(x, there, "o-", color=color, markersize=4, label=label)
        return
    window = max(5, len(there) // 20)
    axes.plot(x, there, color=color, alpha=0.3, linewidth=1)
    mean = smoothed(there, window=window)
    axes.plot(x, mean, color=color, label=f"{label} (mean of {window})")


def time_unit(total_s: float) -> tuple[float, str]:
    """Seconds in the unit in which so long a run is drawn, and its name."""
    if total_s < 180:
        return 1.0, "seconds"
    return (60.0, "minutes") if total_s < 3 * 3600 else (3600.0, "hours")


def time_axis(axes: Axes, clock: RunClock) -> None:
    """Labels the axis of the run's clock, and marks where pauses were cut out of it."""
    unit_s, unit = time_unit(clock.total_s)
    resumed = clock.resumed_at
    axes.set_xlabel(f"{unit} (dotted: a pause is left out)" if resumed else unit)
    for seconds in resumed:
        axes.axvline(seconds / unit_s, color="#808890", linestyle=":", linewidth=1.5)


def ramp() -> Any:
    """From the background to blue."""
    return LinearSegmentedColormap.from_list("share", ["white", BLUE])


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


@contextmanager
def style() -> Iterator[None]:
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
