"""`asyncrl-launch`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from asyncrl.config import Config
from asyncrl.config.load import load_config
from asyncrl.launch.local import run_local
from asyncrl.launch.models import find_model
from asyncrl.tasks.prompts import check_prompts
from asyncrl.tasks.rewards import check_reward
from asyncrl.tasks.rows import load_rows

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning of language models.",
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file, as configs/demo.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key=value, as max_staleness=0 learner.optim.lr=1e-5")
]


@app.callback()
def callback() -> None:
    """Sub-commands only."""


@app.command()
def local(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train on this machine: starts a buffer, a learner and generators, and watches them."""
    console = Console(stderr=False)
    _exit(lambda: _local(config, overrides or [], console))


def main() -> None:
    app()


def _local(path: Path, overrides: list[str], console: Console) -> int:
    config = _check(load_config(path, overrides))
    return run_local(config, config_name=path.stem, console=console)


def _check(config: Config) -> Config:
    """Everything that can be wrong before an engine loads: data, reward, model, prompts.

    Returns the config with the model's directory in it. Raises ValueError.
    """
    rows = load_rows(config)
    check_reward(config.reward.path, rows.train[0], timeout_s=config.reward.timeout_s)
    model = find_model(config.model.path)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(model)})}
    )
    if num_overlong := check_prompts(config, rows):
        print(
            f"data: {num_overlong} of {len(rows.train) + len(rows.val)} prompts are over "
            f"data.max_prompt_length = {config.data.max_prompt_length} tokens and will be dropped",
            file=sys.stderr,
        )
    return config


def _exit(work: Callable[[], int]) -> None:
    """Ends the process: 2 and one message for the user's mistakes, else what `work` says."""
    try:
        code = work()
    except ValueError as error:
        print(f"asyncrl-launch: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
