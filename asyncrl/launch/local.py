"""`asyncrl-launch local`: one buffer, one learner and some generators on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.config import Config
from asyncrl.config.load import load_config, save_resolved
from asyncrl.journal.claim import how_to_go_on
from asyncrl.launch.checks import check_port, check_run, check_sender, worst_case
from asyncrl.launch.children import Children, Program, role_command
from asyncrl.launch.failures import DRAINED
from asyncrl.launch.open_run import open_run_dir
from asyncrl.launch.output import plain_console
from asyncrl.launch.placement import Placement, count_cores, place, visible_gpus
from asyncrl.launch.progress import Progress, print_summary
from asyncrl.launch.ranks import learner_command
from asyncrl.launch.signals import Signals
from asyncrl.launch.supervise import Supervisor
from asyncrl.run_dir import RunDir


def run_local(path: Path, overrides: Sequence[str]) -> int:
    """Starts everything, shows progress on stdout and failures on stderr, returns the exit code.

    Raises ValueError for what the user can mend before anything was started.
    """
    config = check_run(load_config(path, overrides))
    check_port(config)
    check_sender(config)
    placement = place(config, gpus=visible_gpus(), num_cores=count_cores())
    # a run goes on whether or not somebody can see it
    console, errors = plain_console(is_needed=False), plain_console(stderr=True, is_needed=False)
    with Signals() as signals, open_run_dir(config, config_name=path.stem) as (run_dir, config):
        run_dir.buffer_address.unlink(missing_ok=True)  # everybody is new: any port will do
        config = placement.in_config(config)
        save_resolved(config, run_dir.config_of("buffer"))
        console.print(f"run directory {run_dir.path}", soft_wrap=True)
        way = "broadcast" if config.transport == "collective" else "files"
        console.print(f"{placement.describe()}; weights go by {way}", soft_wrap=True)
        console.print(worst_case(config), soft_wrap=True)
        try:
            with Children(run_dir.logs) as children:
                supervisor = _supervisor(config, run_dir, placement, children, console, errors)
                code = supervisor.run(signals)
        finally:
            shutil.rmtree(run_dir.weights(config), ignore_errors=True)
        if code == DRAINED:
            again = how_to_go_on(config.buffer.durability, name=run_dir.path.name)
            errors.print(again, soft_wrap=True)
    if not supervisor.was_cut_short:
        _tell_result(run_dir, console, errors, is_good=code == 0)
    return code


def _tell_result(run_dir: RunDir, console: Console, errors: Console, *, is_good: bool) -> None:
    """Summary and report. Whatever is wrong with them is a warning: the run itself has ended as it
    has."""
    try:
        if is_good:
            print_summary(console, run_dir)
        from asyncrl.report.page import write_report

        console.print(f"report {write_report(run_dir.path)}", soft_wrap=True)
    except Exception as error:  # drawing is never worth the exit code of a run
        errors.print(f"there is no report: {error!r}", soft_wrap=True)


def _supervisor(
    config: Config,
    run_dir: RunDir,
    placement: Placement,
    children: Children,
    console: Console,
    errors: Console,
) -> Supervisor:
    command = role_command("buffer", str(run_dir.config_of("buffer")))
    return Supervisor(
        run_dir,
        children,
        buffer=Program("buffer", "buffer", command, {}),
        others=lambda address: _others(run_dir, placement, address),
        max_restarts=config.local.max_restarts,
        progress=Progress(console, run_dir, max_steps=config.max_steps),
        errors=errors,
    )


def _others(run_dir: RunDir, placement: Placement, address: str) -> list[Program]:
    common = (str(run_dir.config), "--connect", address)
    learner = learner_command(placement.learner_ranks, *common)
    programs = [Program("learner", "learner", learner, placement.learner_environment())]
    for i in range(placement.num_generators):
        name = f"generator-{i}"
        command = role_command("generators", *common, "--name", name)
        programs.append(Program(name, "generator", command, placement.generator_environment(i)))
    return programs
