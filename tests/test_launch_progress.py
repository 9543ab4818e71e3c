"""What `asyncrl-launch local` prints while a run goes on, and at its end."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console
from run_records import STEPS, records, write_run

from asyncrl.launch.progress import Progress, print_summary
from asyncrl.run_dir import RunDir


def test_the_summary_counts_each_step_once_however_often_it_was_trained(tmp_path: Path) -> None:
    out = io.StringIO()
    print_summary(Console(file=out, width=200), RunDir(write_run(tmp_path)))
    rows = [line.split("│") for line in out.getvalue().splitlines() if "│" in line]
    table = {cells[1].strip(): cells[2].strip() for cells in rows}
    assert table["steps"] == f"{STEPS} of {STEPS}"
    assert table["held-out accuracy, version 0"] == "0.250  (16 samples, temperature 1.0)"
    assert table["held-out accuracy, version 6"] == "0.750  (16 samples, temperature 1.0)"
    assert table["training reward, first and last step"] == "0.100 → 0.600"
    assert table["staleness"] == "mean 1.00, max 2 of 2"
    assert table["prompts"] == "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued"
    assert table["ended"] == "all 6 steps of max_steps are trained"


def test_steps_are_printed_as_they_come_and_replayed_ones_are_told_apart(tmp_path: Path) -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200), RunDir(tmp_path), max_steps=STEPS)
    for record in records():
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        progress.update({}, phase="running")
    printed = out.getvalue()
    _, _, first, *_ = (line for line in printed.splitlines() if "evaluation" not in line)
    assert first.split()[1:5] == ["1/6", "0.100", "0.0", "0"]
    again = [line.split()[1] for line in printed.splitlines() if line.endswith("again")]
    assert again == ["3/6", "4/6"]
    assert [line.split()[1] for line in printed.splitlines() if "/6" in line] == [
        *(f"{step}/6" for step in (1, 2, 3, 4, 3, 4, 5, 6))
    ]
    assert "evaluation of version 0: accuracy 0.250 on 16 samples" in printed
