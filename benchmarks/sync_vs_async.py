"""The same training with max_staleness 0 (taking turns) and more (side by side), in one table.

    python benchmarks/sync_vs_async.py configs/demo.yaml --steps 10 --bounds 0 1 2 4 \\
        --plot docs/images/max_staleness.png

Same code, model, data, seeds and cores. Writes benchmarks/results/sync_vs_async.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launched_run import Run, launch, save_result

TRAINS, WAITS = "#2b6cb0", "#cbd5e0"
"""Colours of the two parts of a step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 2], help="0 comes first")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("overrides", nargs="*", help="key=value, for all runs")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for bound in arguments.bounds:
            overrides = [*arguments.overrides, *run_overrides(arguments.steps, bound)]
            run = launch(arguments.config, overrides, directory=Path(directory), name=f"S{bound}")
            rows.append(measure(bound, run))
    print(table(rows))
    result = {"config": str(arguments.config), "steps": arguments.steps, "runs": rows}
    save_result("sync_vs_async", result)
    if arguments.plot:
        draw(rows, arguments.plot)


def run_overrides(steps: int, bound: int) -> list[str]:
    return [
        f"max_steps={steps}",
        f"max_staleness={bound}",
        "data.val_files=[]",
        "logging.trackers=[]",
        "checkpoint.export_hf=false",
    ]


def measure(bound: int, run: Run) -> dict[str, float]:
    return {
        "max_staleness": bound,
        "step_s": run.median("time/step_s"),
        "learner_waited_s": run.median("time/wait_batch_s"),
        "staleness_mean": run.mean("staleness/mean"),
        "staleness_max": run.highest("staleness/max"),
    }


def table(rows: list[dict[str, float]]) -> str:
    lines = [
        "| max_staleness | seconds per step | of which the learner waited | staleness mean | max |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['max_staleness']} | {row['step_s']:.2f} | {row['learner_waited_s']:.2f} "
        f"| {row['staleness_mean']:.2f} | {row['staleness_max']:.0f} |"
        for row in rows
    ]
    ratios = [
        f"max_staleness={row['max_staleness']} is {rows[0]['step_s'] / row['step_s']:.2f}x as fast "
        f"as {rows[0]['max_staleness']}"
        for row in rows[1:]
    ]
    return "\n".join([*lines, "", *ratios])


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """One bar for each bound: what the learner does with the seconds of a step."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 0.8 + 0.55 * len(rows)), layout="constrained")
    names = [f"{row['max_staleness']:.0f}" for row in rows]
    waited = [row["learner_waited_s"] for row in rows]
    trained = [row["step_s"] - row["learner_waited_s"] for row in rows]
    axes.barh(names, trained, color=TRAINS, label="learner trains")
    axes.barh(names, waited, left=trained, color=WAITS, label="learner waits for rollouts")
    for place, row in enumerate(rows):
        text = f" {row['step_s']:.1f} s, mean staleness {row['staleness_mean']:.1f}"
        axes.text(row["step_s"], place, text, va="center", fontsize=9)
    axes.set_xlim(0, 1.45 * max(row["step_s"] for row in rows))
    axes.invert_yaxis()
    axes.set(xlabel="seconds per step (median)", ylabel="max_staleness")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
