"""Opens the run directory of a run that begins or goes on, as checkpoint.resume says."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.fields import nearest
from asyncrl.journal.claim import refuse_lost_books
from asyncrl.launch.checks import with_model
from asyncrl.launch.version_zero import check_checkpoint, make_start_model, read_origin
from asyncrl.run_dir import RunDir

_LOCK = "launcher.lock"
_MAX_NAME = 200
"""Bytes of a run's name: directories and files beside it are called like it and a little more, and
255 are the most that a file system takes."""
_MAX_PART = 255
_MAX_PATH = 480
"""Bytes of a run directory: SQLite takes 512 for the journal in it."""


@contextmanager
def open_run_dir(
    config: Config, *, config_name: str, is_replay: bool = False
) -> Iterator[tuple[RunDir, Config]]:
    """The run directory, and the configuration with its name and the model of version 0 in it.

    It is locked meanwhile, and as long as a program lives that this process becomes by os.exec.

    Raises ValueError when there is something in it and checkpoint.resume does not say to go on,
    when it is that of a replay and this is none (`is_replay`), or the other way round, when another
    process is at work in it, when a checkpoint cannot be begun from, and when it cannot be made or
    its name is too long.
    """
    name = config.run_name or f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = RunDir((Path(config.output_dir) / name).absolute())
    _check_length(run_dir.path)
    checkpoint = _named_checkpoint(config)
    is_own = checkpoint is not None and checkpoint.parent == run_dir.checkpoints.resolve()
    origin = None if is_own else checkpoint
    if run_dir.path.is_dir():
        _check_contents(config, run_dir, is_new=origin is not None, is_replay=is_replay)
    with _lock(run_dir):
        try:
            _check_contents(config, run_dir, is_new=origin is not None, is_replay=is_replay)
            run_dir.logs.mkdir(exist_ok=True)
            if origin is not None:
                make_start_model(run_dir.start, origin, model=Path(config.model.path))
            run_dir.make_run_id()
            if checkpoint is not None and is_own:
                _go_back(checkpoint)
                config = _resuming(config, "auto")
        except OSError as error:
            raise ValueError(f"run directory {run_dir.path} cannot be made: {error}") from None
        config = config.model_copy(update={"run_name": name})
        yield run_dir, as_begun(config, run_dir)


def as_begun(config: Config, run_dir: RunDir) -> Config:
    """In a run that began from a checkpoint of another one: with version 0 as the model, and that
    checkpoint in checkpoint.resume, where the learner looks for version 0's optimizer state."""
    if not run_dir.start.is_dir():
        return config
    return _resuming(with_model(config, run_dir.start), read_origin(run_dir.start))


def _check_length(path: Path) -> None:
    """ValueError for what a file system, or SQLite, would refuse later."""
    name, whole = len(os.fsencode(path.name)), len(os.fsencode(path))
    if name > _MAX_NAME:
        raise ValueError(
            f"run_name: {path.name} has {name} bytes, {_MAX_NAME} are the most: choose a shorter "
            "one (without run_name it is the config's name and the time)"
        )
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if whole > _MAX_PATH or longest > _MAX_PART:
        raise ValueError(
            f"run directory {path} has {whole} bytes, {_MAX_PATH} are the most, and {longest} in "
            f"one name, {_MAX_PART} are the most: set output_dir to a shorter one"
        )


def _named_checkpoint(config: Config) -> Path | None:
    """The checkpoint that checkpoint.resume names, if it names one."""
    resume = config.checkpoint.resume
    if resume in ("never", "auto"):
        return None
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"checkpoint.resume: {resume} is no directory{nearest(resume, ['never', 'auto'])}: "
            "expected never, auto, or a checkpoint as RUN/checkpoints/version-00000012"
        )
    check_checkpoint(path)
    return path.resolve()


def _go_back(checkpoint: Path) -> None:
    """Puts the checkpoints that are newer than this one aside: the newest one is gone on from."""
    if not checkpoint.name.startswith("version-"):
        raise ValueError(
            f"checkpoint.resume: {checkpoint} was put aside when the run went back to an earlier "
            "one. To go on from it, give it its name version-... again, put newer ones aside, and "
            "set checkpoint.resume=auto"
        )
    for newer in sorted(checkpoint.parent.glob("version-*")):
        if newer.name > checkpoint.name:
            earlier = len(list(checkpoint.parent.glob(f"undone-*{newer.name}")))
            count = f"{earlier + 1}-" if earlier else ""  # the run went back before it before
            newer.rename(newer.with_name(f"undone-{count}{newer.name}"))


def _resuming(config: Config, checkpoint: str) -> Config:
    section = config.checkpoint.model_copy(update={"resume": checkpoint})
    return config.model_copy(update={"checkpoint": section})


def _check_contents(config: Config, run_dir: RunDir, *, is_new: bool, is_replay: bool) -> None:
    """Nothing is overwritten by accident, and nothing but a run is gone on with."""
    made_first = {_LOCK, run_dir.logs.name, f".{run_dir.start.name}.tmp"}
    try:
        used = {entry.name for entry in run_dir.path.iterdir()} - made_first
    except OSError as error:
        raise ValueError(f"run directory {run_dir.path} cannot be read: {error}") from None
    if not used:
        return
    where = f"run directory {run_dir.path} is not empty"
    if is_new:
        raise ValueError(
            f"{where}, and a checkpoint of another run begins a new one: choose another run_name, "
            "or go on in this run with checkpoint.resume=auto"
        )
    if config.checkpoint.resume == "never":
        refuse_lost_books(run_dir.path)
        raise ValueError(
            f"{where}: choose another run_name, or go on in it with checkpoint.resume=auto"
        )
    if run_dir.read_run_id() is None:
        raise ValueError(
            f"{where}, and it is no run's: there is no file run_id in it. Choose another run_name"
        )
    _check_kind(run_dir, is_replay=is_replay)
    refuse_lost_books(run_dir.path)


def _check_kind(run_dir: RunDir, *, is_replay: bool) -> None:
    """A run is not gone on with as a replay, nor a replay as a run."""
    if not is_replay and run_dir.replay_of.exists():
        recorded = json.loads(run_dir.replay_of.read_text())["path"]
        raise ValueError(
            f"run directory {run_dir.path} is that of a replay of {recorded}: choose another "
            f"run_name, or go on with the replay by asyncrl-launch learner --replay {recorded}"
        )
    of_a_buffer = run_dir.config_of("buffer").exists() or (run_dir.path / "journal.sqlite").exists()
    if is_replay and of_a_buffer:
        raise ValueError(
            f"run directory {run_dir.path} is that of a run of its own, not of a replay: choose "
            "another run_name"
        )


@contextmanager
def _lock(run_dir: RunDir) -> Iterator[None]:
    """Held as long as this process lives, whatever it becomes: the file passes through os.exec."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        file = (run_dir.path / _LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"run directory {run_dir.path} cannot be made: {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"run directory {run_dir.path} is in use by process {file.read() or '?'}: wait for "
                "its end, or choose another run_name"
            ) from None
        try:
            file.truncate(0)
            os.write(file.fileno(), str(os.getpid()).encode())
        except OSError as error:
            raise ValueError(
                f"run directory {run_dir.path} cannot be written: {error.strerror}"
            ) from None
        os.set_inheritable(file.fileno(), True)
        yield
