"""`asyncrl-launch`: the command line. What a command does is imported when it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

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
Connect = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="the buffer, if not network.buffer")
]

_RUN = typer.Argument(metavar="RUN", help="run directory, or the name of one in runs/")
RunName = Annotated[str, _RUN]
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]


@app.callback()
def callback() -> None:
    """Sub-commands only."""


@app.command()
def check(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check a configuration before a run: data, reward, model, and whether generator and learner
    give the same tokens the same probabilities."""
    from asyncrl.launch.check import check_parity

    _exit(lambda: check_parity(config, overrides or []))


@app.command()
def local(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train on this machine: starts a buffer, a learner and generators, and watches them."""
    from asyncrl.launch.local import run_local

    _exit(lambda: run_local(config, overrides or []))


@app.command()
def buffer(config: ConfigPath, overrides: Overrides = None) -> None:
    """Be the buffer of a run: the one program that owns its directory. It listens at
    network.buffer; learner and generators come and go."""
    from asyncrl.launch.roles import become_buffer

    _exit(lambda: become_buffer(config, overrides or []))


@app.command()
def learner(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; with --replay that of RUN unless given")
    ] = None,
    overrides: Overrides = None,
    connect: Connect = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="train a recorded run once more, from its journal alone"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="processes here; default: local.learner_ranks")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="machines that the learner runs on")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="number of this machine, from 0")] = 0,
    master: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="where machine 0 is and may listen")
    ] = None,
) -> None:
    """Be the learner of the run that the buffer serves, or one machine's part of it."""
    from asyncrl.launch.ranks import Nodes
    from asyncrl.launch.replay import become_replay
    from asyncrl.launch.roles import become_learner

    def work() -> int:
        path, changes = _split(config, overrides or [], may_lack_config=replay is not None)
        nodes = Nodes(count=nnodes, this=node_rank, master=master)
        if replay is None:
            assert path is not None
            return become_learner(path, changes, connect=connect, ranks=ranks, nodes=nodes)
        if connect is not None or nnodes > 1:
            raise ValueError("--replay goes without --connect and --nnodes: no buffer, one machine")
        return become_replay(replay, path, changes, ranks=ranks)

    _exit(work)


@app.command()
def generator(
    config: ConfigPath,
    overrides: Overrides = None,
    connect: Connect = None,
    name: Annotated[str, typer.Option(help="its name in logs and metrics")] = "generator",
) -> None:
    """Be a generator of the run that the buffer serves."""
    from asyncrl.launch.roles import become_generator

    _exit(lambda: become_generator(config, overrides or [], connect=connect, name=name))


@app.command()
def status(
    run: Annotated[str | None, _RUN] = None,
    connect: Connect = None,
    as_json: AsJson = False,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="ask again until the run ends"),
    ] = None,
) -> None:
    """What a run does now: members, leases, speeds, and what is waited for."""
    from asyncrl.launch.status import show_status

    _exit(lambda: show_status(run, connect=connect, as_json=as_json, watch_s=watch))


@app.command()
def show(
    run: RunName,
    step: Annotated[int | None, typer.Option(min=0, help="trained in this step")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="EPOCH/POSITION", help="this prompt, as 0/17")
    ] = None,
    fate: Annotated[str | None, typer.Option(help="trained, filtered, dropped, ...")] = None,
    limit: Annotated[int, typer.Option(min=1, help="prompts at most, the newest")] = 3,
    as_json: AsJson = False,
) -> None:
    """Prompts and responses of a run, with rewards, versions, staleness and fate."""
    from asyncrl.launch.show import Filter, show_rollouts

    wanted = Filter(step=step, prompt=prompt, fate=fate)
    _exit(lambda: show_rollouts(run, wanted=wanted, limit=limit, as_json=as_json))


@app.command()
def export(
    run: RunName,
    out: Annotated[
        Path | None, typer.Argument(metavar="OUT.parquet", help="default: RUN/rollouts.parquet")
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="trained in this step")] = None,
    fate: Annotated[str | None, typer.Option(help="trained, filtered, ready, ...")] = None,
) -> None:
    """Write the rollouts of a run as a Parquet file, a row for each response."""
    from asyncrl.report.export import export_run

    _exit(lambda: export_run(run, out=out, step=step, fate=fate))


@app.command()
def report(run: RunName) -> None:
    """Write RUN/report/report.html: plots, summary and samples of a run, in any state of it."""
    from asyncrl.report.page import report_run

    _exit(lambda: report_run(run))


def main() -> None:
    app()


def _split(
    config: Path | None, overrides: list[str], *, may_lack_config: bool
) -> tuple[Path | None, list[str]]:
    """What comes first may be an override where no configuration has to be there."""
    if may_lack_config:
        if config is not None and "=" in str(config) and not config.exists():
            return None, [str(config), *overrides]
    elif config is None:
        raise ValueError("learner needs a configuration: asyncrl-launch learner CONFIG")
    return config, overrides


def _exit(work: Callable[[], int]) -> None:
    """Ends the process: 2 and one message for the user's mistakes, else what `work` says."""
    from asyncrl.full_disk import why_full

    try:
        code = work()
    except ValueError as error:
        print(f"asyncrl-launch: {error}", file=sys.stderr)
        code = 2
    except OSError as error:
        full = why_full(error, Path())
        if full is None:
            raise
        print(f"asyncrl-launch: {full}", file=sys.stderr)
        code = 1
    sys.exit(code)
