"""Draws one update by each way on one axis of time: who stands still, and for how long.

    python benchmarks/weights_picture.py OUT.png

reads benchmarks/results/bench_weights.json, of which the last model is shown.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from launched_run import RESULTS
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

SHOWN = {
    "gloo": "gloo, staged",
    "disk": "disk",
    "none": "gloo, none",
    "gloo_slow": "gloo, staged,\n50 MB/s",
    "none_slow": "gloo, none,\n50 MB/s",
}
COLOURS = {
    "learner takes its snapshot": "#4477aa",
    "generator takes the version in, and decodes": "#bbcc88",
    "engine stands still": "#cc3344",
}


def main(out: Path) -> None:
    result = json.loads((RESULTS / "bench_weights.json").read_text())["models"][-1]
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    for lane, way in enumerate(SHOWN):
        draw(axes, lane, result[way], statistics.median(result["alone_1"]["snapshot"]))
    axes.set_yticks(range(len(SHOWN)), list(SHOWN.values()))
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the learner began its snapshot")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    axes.legend(handles=handles, loc="upper right", frameon=False)
    axes.set_title(
        f"One version of {result['model']} ({result['num_bytes'] / 1e6:.0f} MB), by each way"
    )
    figure.savefig(out, dpi=150)


def draw(axes: Axes, lane: int, rounds: list[dict[str, Any]], snapshot_s: float) -> None:
    """Medians of all rounds."""
    middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    blocked, taking, still = COLOURS.values()
    ends = middle["published_to_served_s"]
    if middle["staging_s"] > 0.01:
        axes.barh(lane, middle["staging_s"], 0.5, left=middle["staging_from_s"], color=taking)
    axes.barh(lane, ends - middle["paused_from_s"], 0.5, left=middle["paused_from_s"], color=still)
    axes.barh(lane, snapshot_s, 0.5, color=blocked)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
