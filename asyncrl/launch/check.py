"""`asyncrl-launch check`: what can be wrong before a run, with its real engine and real learner.

A generator samples, then a learner computes the logprobs of the same tokens: one after the other,
so that each has the memory to itself.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.config import Config
from asyncrl.config.load import load_config, save_resolved
from asyncrl.launch.checks import check_run
from asyncrl.launch.children import Children, Program, role_command
from asyncrl.launch.failures import telling_lines
from asyncrl.launch.output import plain_console
from asyncrl.launch.placement import count_cores, place, visible_gpus
from asyncrl.launch.ranks import learner_command
from asyncrl.launch.roles import environment_for
from asyncrl.launch.signals import Signals


class _Ended(Exception):
    """The check ends here, with this exit code; all is said."""

    def __init__(self, code: int) -> None:
        self.code = code


def check_parity(path: Path, overrides: Sequence[str]) -> int:
    """Prints what was measured; returns 0 when both sides are one policy, else 2. Raises ValueError
    for what else the user can mend."""
    config = load_config(path, overrides)
    if config.generator.engine == "scripted":
        raise ValueError(
            "generator.engine: scripted makes up its logprobs, so nothing can be compared: use vllm"
        )
    config = check_run(config)
    console = plain_console()
    console.print("data, reward, model and prompts are in order")
    with Signals() as signals, tempfile.TemporaryDirectory(prefix="asyncrl-check-") as name:
        try:
            with Children(Path(name)) as children:
                result, seconds = _measure(config, Path(name), children, signals, console)
        except _Ended as ended:
            return ended.code
    console.print(_table(config, result["gap"], seconds))
    if result["refusal"]:
        print(f"asyncrl-launch: {result['refusal']}", file=sys.stderr)
        return 2
    console.print("generator and learner are the same policy")
    return 0


def _measure(
    config: Config, directory: Path, children: Children, signals: Signals, console: Console
) -> tuple[dict[str, Any], dict[str, float]]:
    """What the learner found (learner/compare.py), and the seconds of each program."""
    placement = place(config, gpus=visible_gpus(), num_cores=count_cores())
    file = directory / "config.yaml"
    save_resolved(config, file)
    sample = role_command("generators.sample", str(file), str(directory))
    compare = learner_command(placement.learner_ranks, str(file), "--compare", str(directory))
    environments = (
        placement.generator_environment(0) | environment_for(config, 1),
        placement.learner_environment() | environment_for(config, placement.learner_ranks),
    )
    seconds = {}
    for name, command, environment in zip(
        ("generator", "learner"), (sample, compare), environments, strict=True
    ):
        console.print(f"the {name} {'samples' if name == 'generator' else 'compares'} ...")
        began = time.monotonic()
        _run(Program(name, name, command, environment), children, signals)
        seconds[name] = time.monotonic() - began
    return json.loads((directory / "parity.json").read_text()), seconds


def _run(program: Program, children: Children, signals: Signals) -> None:
    """Until it has ended well. Raises ValueError with its own words for what the user can mend."""
    child = children.start(program)
    while not child.has_ended():
        if numbers := signals.wait(0.5):
            print(f"stopped by {signal.Signals(numbers[0]).name}", file=sys.stderr)
            raise _Ended(128 + numbers[0])
    if child.exit_code == 0:
        return
    said = "\n".join(telling_lines(child.log_text()))
    if child.exit_code == 2:
        raise ValueError(said)
    print(f"the {program.name} failed with exit code {child.exit_code}:\n{said}", file=sys.stderr)
    raise _Ended(1)


def _table(config: Config, gap: dict[str, float], seconds: dict[str, float]) -> Table:
    limits = config.parity
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("at equal weights")
    table.add_column("measured", justify="right")
    table.add_column("bound", justify="right")
    rows = [
        ("mean |difference| of logprobs", f"{gap['mean']:.5f}", f"at most {limits.max_gap_mean:g}"),
        ("k3, KL per token", f"{gap['k3']:.5f}", f"at most {limits.max_k3:g}"),
        (
            *("mean ratio of probabilities", f"{gap['ratio_mean']:.5f}"),
            f"1 +- {limits.max_ratio_error:g}",
        ),
        ("its standard error", f"{gap['ratio_error']:.5f}", ""),
        ("median |difference|", f"{gap['median']:.5f}", ""),
        ("largest |difference|", f"{gap['max']:.5f}", ""),
        ("tokens", f"{gap['num_tokens']:,}", ""),
        ("temperature", f"{config.sampling.temperature:g}", ""),
        ("model.dtype", config.model.dtype, ""),
        *((f"seconds of the {name}", f"{spent:.1f}", "") for name, spent in seconds.items()),
    ]
    for row in rows:
        table.add_row(*row)
    return table
