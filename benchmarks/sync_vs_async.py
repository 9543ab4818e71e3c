"""The same training with max_staleness 0 (taking turns) and 2 (side by side), in one table.

    python benchmarks/sync_vs_async.py configs/demo.yaml --steps 10

Same code, model, data, seeds and cores. Writes benchmarks/results/sync_vs_async.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launched_run import Run, launch, save_result

BOUNDS = (0, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="key=value, for all runs")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for bound in BOUNDS:
            overrides = [*arguments.overrides, *run_overrides(arguments.steps, bound)]
            run = launch(arguments.config, overrides, directory=Path(directory), name=f"S{bound}")
            rows.append(measure(bound, run))
    print(table(rows))
    result = {"config": str(arguments.config), "steps": arguments.steps, "runs": rows}
    save_result("sync_vs_async", result)


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
    ratio = rows[0]["step_s"] / rows[-1]["step_s"]
    return "\n".join([*lines, "", f"async is {ratio:.2f}x as fast as sync"])


if __name__ == "__main__":
    main()
