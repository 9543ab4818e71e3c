"""One program by its own command: checked here, then this process becomes it.

`asyncrl-launch buffer` opens the run directory. A learner or generator asks the buffer which run it
serves, and uses the directory of that name under its own output_dir: the same one on one machine or
on a shared disk.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import NoReturn

from asyncrl.address import Address
from asyncrl.client import RefusedError, Unreachable
from asyncrl.config import Config
from asyncrl.config.load import load_config, save_resolved
from asyncrl.disk import write_whole
from asyncrl.handshake import member_settings, mismatches, refusal
from asyncrl.launch.checks import (
    check_generator,
    check_port,
    check_run,
    check_sender,
    with_model,
    worst_case,
)
from asyncrl.launch.children import role_command
from asyncrl.launch.models import find_model
from asyncrl.launch.open_run import as_begun, open_run_dir
from asyncrl.launch.placement import count_cores, cpu_environment, visible_gpus
from asyncrl.launch.ranks import Nodes, learner_command
from asyncrl.messages import Hello, Role, Welcome
from asyncrl.run_dir import RunDir
from asyncrl.thread_client import ThreadClient

_SAY_AFTER_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def become_buffer(path: Path, overrides: Sequence[str]) -> NoReturn:
    """Raises ValueError for what the user can mend."""
    config = check_run(load_config(path, overrides))
    check_port(config)
    with open_run_dir(config, config_name=path.stem) as (run_dir, config):
        save_resolved(config, run_dir.config_of("buffer"))
        _say(worst_case(config))
        _say_where(run_dir, Address.parse(config.network.buffer), [str(path), *overrides])
        become(role_command("buffer", str(run_dir.config_of("buffer"))), {})


def become_learner(
    path: Path, overrides: Sequence[str], *, connect: str | None, ranks: int | None, nodes: Nodes
) -> NoReturn:
    """`ranks`: processes on this machine. Raises ValueError for what the user can mend."""
    config = _load(path, overrides, connect)
    check_sender(config)
    config = with_model(config, find_model(config.model.path))
    run_dir, config = _join(config, "learner", name="learner")
    wanted = config.local.learner_ranks
    ranks = ranks or (wanted if wanted != "auto" else max(1, len(visible_gpus())))
    arguments = (str(run_dir.config_of("learner")), "--connect", config.network.buffer)
    command = learner_command(ranks, *arguments, nodes=nodes)
    become(command, environment_for(config, ranks))


def become_generator(
    path: Path, overrides: Sequence[str], *, connect: str | None, name: str
) -> NoReturn:
    """Raises ValueError for what the user can mend."""
    if not _NAME.fullmatch(name) or name in ("buffer", "learner"):
        raise ValueError(f"--name {name}: use letters, digits and _ . -, and not a program's name")
    config = check_generator(_load(path, overrides, connect))
    run_dir, config = _join(config, "generator", name=name)
    arguments = (str(run_dir.config_of(name)), "--connect", config.network.buffer, "--name", name)
    become(role_command("generators", *arguments), environment_for(config, 1))


def _say_where(run_dir: RunDir, address: Address, arguments: Sequence[str]) -> None:
    """Where the buffer listens, and how others join it from this machine."""
    at = str(address) if address.port else f"$(cat {shlex.quote(str(run_dir.buffer_address))})"
    same = shlex.join(text for text in arguments if not text.startswith("network.buffer="))
    _say(f"run directory {run_dir.path}")
    _say(f"the buffer listens on {at}; join it with")
    for role in ("learner", "generator"):
        _say(f"    asyncrl-launch {role} {same} --connect {at}")


def _load(path: Path, overrides: Sequence[str], connect: str | None) -> Config:
    address = [f"network.buffer={connect}"] if connect else []
    config = load_config(path, [*overrides, *address])
    if Address.parse(config.network.buffer).port == 0:
        raise ValueError(
            f"network.buffer: {config.network.buffer} names no port to connect to: give the "
            "buffer's address with --connect (it is in the file buffer_address of its run "
            "directory)"
        )
    return config


def _join(config: Config, role: Role, *, name: str) -> tuple[RunDir, Config]:
    """The directory of the run that the buffer serves, made where it is not there, and the
    configuration that fits it, which is written there. Raises ValueError when this program does not
    belong to that run, and when nothing can be written there."""
    welcome = _ask_buffer(config)
    if config.run_name not in (None, welcome.run_name):
        raise ValueError(
            f"run_name is {config.run_name} here, the buffer at {config.network.buffer} serves "
            f"{welcome.run_name}: set run_name to that, leave it out, or connect to another buffer"
        )
    run_dir = _run_dir(config, welcome)
    config = as_begun(config.model_copy(update={"run_name": welcome.run_name}), run_dir)
    if lines := mismatches(role, member_settings(config, role), welcome.settings):
        raise ValueError(refusal(f"this {role}", lines))
    try:
        save_resolved(config, run_dir.config_of(name))
    except OSError as error:
        raise ValueError(f"run directory {run_dir.path} cannot be written: {error}") from None
    _say(f"run directory {run_dir.path}")
    return run_dir, config


def _run_dir(config: Config, welcome: Welcome) -> RunDir:
    run_dir = RunDir((Path(config.output_dir) / welcome.run_name).absolute())
    found = run_dir.read_run_id()
    if found not in (None, welcome.run_id):
        raise ValueError(
            f"{run_dir.path} is of run {found}, the buffer at {config.network.buffer} serves run "
            f"{welcome.run_id}: move that directory away, or set output_dir to another place"
        )
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        if found is None:
            write_whole(run_dir.run_id, welcome.run_id)
    except OSError as error:
        raise ValueError(f"run directory {run_dir.path} cannot be made: {error}") from None
    return run_dir


def _ask_buffer(config: Config) -> Welcome:
    """Waits network.wait_for_buffer_s for the buffer. Raises ValueError when there is none, or it
    refuses."""
    address, patience_s = config.network.buffer, config.network.wait_for_buffer_s
    hello = Hello.here("monitor", name="launcher", run_id=None)
    client = ThreadClient(address, hello=hello)
    answer = client.call_soon(hello, deadline_s=patience_s)
    wait([answer], timeout=_SAY_AFTER_S)
    if not answer.done():
        _say(f"waiting for the buffer at {address} ({patience_s:g} s)")
    try:
        welcome: Welcome = answer.result().message
    except (Unreachable, RefusedError) as error:
        raise ValueError(str(error)) from None
    finally:
        client.close()
    return welcome


def environment_for(config: Config, ranks: int) -> dict[str, str]:
    """Of that many processes. On CPUs: all cores that this process may use, unless
    local.cpu_threads says how many."""
    if visible_gpus():
        return {}
    threads = config.local.cpu_threads
    return cpu_environment(threads if threads != "auto" else max(1, count_cores() // ranks))


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """This process is that program from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], list(command), {**os.environ, **environment})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
