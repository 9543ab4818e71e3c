"""Which order, which bound: a tenth of the answers take eight training steps.

    python benchmarks/orders.py

The buffer's real policy on a simulated clock (benchmarks/simulation.py), so the numbers are exact
and the same on every machine. Prints a table, draws docs/images/orders.png, and writes
benchmarks/results/orders.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from launched_run import save_result
from rich.console import Console
from rich.table import Table
from simulation import Scenario, simulate

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BOUNDS = (0, 1, 2, 4, 8)
WAYS = (
    ("fifo", "wait"),
    ("ready", "wait"),
    ("fifo", "drop"),
    ("ready", "drop"),
    ("ready", "reissue"),
)
COLOURS = {"fifo": "#4c72b0", "ready": "#dd8452"}
MARKS = {"wait": "o", "drop": "v", "reissue": "s"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path("docs/images/orders.png"))
    arguments = parser.parse_args()
    rows = [
        measure(bound, order, on_late, steps=arguments.steps, seeds=arguments.seeds)
        for bound in BOUNDS
        for order, on_late in WAYS
    ]
    scenario = Scenario(max_staleness=0, num_steps=arguments.steps)
    save_result(
        "orders",
        {
            "groups_per_step": scenario.groups_per_step,
            "short": scenario.short,
            "long": scenario.long,
            "long_share": scenario.long_share,
            "slots": scenario.slots,
            "steps": arguments.steps,
            "seeds": arguments.seeds,
            "rows": rows,
        },
    )
    print_table(rows, scenario)
    draw(rows, arguments.plot)


def measure(bound: int, order: Any, on_late: str, *, steps: int, seeds: int) -> dict[str, Any]:
    """Means over the seeds."""
    outcomes = [
        simulate(Scenario(bound, order, on_late, num_steps=steps, seed=seed)).summary()
        for seed in range(seeds)
    ]
    means = {key: fmean(outcome[key] for outcome in outcomes) for key in outcomes[0]}
    means["staleness_max"] = max(outcome["staleness_max"] for outcome in outcomes)
    return {"max_staleness": bound, "order": order, "on_late": on_late, **means}


def print_table(rows: list[dict[str, Any]], scenario: Scenario) -> None:
    table = Table(
        title=f"{scenario.groups_per_step} groups a step, {scenario.slots} in flight; "
        f"{scenario.long_share:.0%} of them take {scenario.long:g} steps, the others "
        f"{scenario.short:g}"
    )
    columns = ("max_staleness", "order", "on_late", "learner busy", "age mean", "age max")
    for column in (*columns, "let go", "length kept", "length let go"):
        table.add_column(column, justify="left" if column in ("order", "on_late") else "right")
    for row in rows:
        table.add_row(
            str(row["max_staleness"]),
            row["order"],
            row["on_late"],
            f"{row['steps_per_unit']:.0%}",
            f"{row['staleness_mean']:.2f}",
            f"{row['staleness_max']:.0f}",
            f"{row['num_let_go']:.0f}",
            f"{row['length_kept']:.2f}",
            f"{row['length_let_go']:.2f}" if row["num_let_go"] else "-",
            end_section=(row["order"], row["on_late"]) == WAYS[-1],
        )
    Console(width=110).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Left: how much of the time the learner works. Right: how old what it trains is."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    figure.set_layout_engine("constrained", wspace=0.08)
    for order, on_late in WAYS:
        mine = [row for row in rows if (row["order"], row["on_late"]) == (order, on_late)]
        bounds = [str(row["max_staleness"]) for row in mine]
        style = {
            "color": COLOURS[order],
            "marker": MARKS[on_late],
            "linestyle": "-" if on_late == "wait" else ":",
            "label": order if on_late == "wait" else f"{order}, {on_late}",
        }
        left.plot(bounds, [100 * row["steps_per_unit"] for row in mine], **style)
        right.plot(bounds, [row["staleness_mean"] for row in mine], **style)
    left.set(title="learner busy", ylabel="% of the time", ylim=(0, 105))
    right.set(title="age of what is trained", ylabel="mean staleness, versions", ylim=(0, None))
    for axes in (left, right):
        axes.set_xlabel("max_staleness")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
