"""`asyncrl-launch learner --replay RUN`: this process becomes a learner that trains a recorded run
once more, in a run directory of its own.

It begins at version 0 where the journal has every batch, else at the oldest checkpoint of the
recorded run after which it has: that one is put into the new run directory, and gone on from.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from asyncrl.config import Config
from asyncrl.config.load import load_config, load_recorded, save_resolved
from asyncrl.config.training import OF_BATCHES, ON_BATCHES, differences, training_digest
from asyncrl.disk import write_whole
from asyncrl.handshake import member_settings
from asyncrl.journal.recorded import RecordedRun
from asyncrl.launch.checks import with_model
from asyncrl.launch.models import find_model
from asyncrl.launch.open_run import open_run_dir
from asyncrl.launch.placement import visible_gpus
from asyncrl.launch.ranks import learner_command
from asyncrl.launch.roles import become, environment_for
from asyncrl.launch.version_zero import check_checkpoint, link_or_copy
from asyncrl.report.reading import find_run
from asyncrl.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class Start:
    """Where the replay begins."""

    version: int
    checkpoint: Path | None
    """That of the recorded run; None: its version 0."""


def become_replay(
    run: str, path: Path | None, overrides: Sequence[str], *, ranks: int | None
) -> NoReturn:
    """`path`: a configuration, if not the recorded run's own. Raises ValueError for what the user
    can mend."""
    recorded = _find(run)
    own = _own_config(recorded)
    config = _configuration(recorded, path or own, overrides)
    config = with_model(config, find_model(config.model.path))
    begun = load_recorded(own)
    _check_tokenizer(begun, config)
    start = None
    if not any(_run_dir(config).checkpoints.glob("version-*")):
        start = find_start(recorded, last=config.max_steps)
        recorded.check_batches(since=start.version, before=_end(recorded, config.max_steps))
        config = _beginning(config, start, begun)
    opening = open_run_dir(config, config_name=recorded.path.name, is_replay=True)
    with opening as (run_dir, config):
        _claim(run_dir, recorded)
        if start is not None and start.checkpoint is not None:
            _take_over(start.checkpoint, run_dir)
        save_resolved(config, run_dir.config)
        _say(f"run directory {run_dir.path}")
        for line in _plan(recorded, start, begun, config):
            _say(line)
        wanted = config.local.learner_ranks
        ranks = ranks or (wanted if wanted != "auto" else max(1, len(visible_gpus())))
        arguments = (str(run_dir.config), "--replay", str(recorded.path))
        become(learner_command(ranks, *arguments), environment_for(config, ranks))


def _find(run: str) -> RecordedRun:
    recorded = RecordedRun(find_run(run).resolve())
    replay_of = RunDir(recorded.path).replay_of
    if replay_of.is_file():
        raise ValueError(
            f"{recorded.path} is a replay itself, and has no journal: name the recorded run, "
            f"{json.loads(replay_of.read_text())['path']}"
        )
    return recorded


def find_start(recorded: RecordedRun, *, last: int | None) -> Start:
    """Raises ValueError, with the numbers, when there is no beginning after which all batches are
    there (up to version `last`, if given)."""
    end = _end(recorded, last)
    if end == 0:
        raise ValueError(f"{recorded.path} has trained no step: there is nothing to replay")
    missing = recorded.missing_steps(before=end)
    if not missing:
        return Start(0, None)
    checkpoints = recorded.checkpoints()
    for version, checkpoint in checkpoints.items():
        if missing[-1] < version < end and _is_whole(checkpoint):
            return Start(version, checkpoint)
    there = ", ".join(map(str, checkpoints)) or "none"
    last_gone = missing[-1]
    why = "so none is left after a checkpoint that it could begin from"
    if last_gone < end - 1:
        why = (
            f"and it has no whole checkpoint of a version from {last_gone + 1} to {end - 1} to "
            f"begin from (there are: {there})"
        )
    raise ValueError(
        f"{recorded.path} cannot be replayed: of its {end} steps the batches of {len(missing)} are "
        f"deleted, the last one that of step {last_gone}, {why}. Runs with "
        "buffer.keep_payloads=always keep every batch"
    )


def _end(recorded: RecordedRun, last: int | None) -> int:
    """The version that the replay ends at, as far as the recorded run is now."""
    return min(recorded.committed(), last or sys.maxsize)


def _is_whole(checkpoint: Path) -> bool:
    try:
        check_checkpoint(checkpoint)
    except ValueError:
        return False
    return True


def _own_config(recorded: RecordedRun) -> Path:
    """The configuration that the recorded run's learner had: that of the run, or its own when it
    was started by itself."""
    run_dir, digest = RunDir(recorded.path), recorded.meta().get("config_digest")
    for file in (run_dir.config, run_dir.config_of("learner")):
        if file.is_file() and training_digest(load_recorded(file)) == digest:
            return file
    return run_dir.config


def _configuration(recorded: RecordedRun, file: Path, overrides: Sequence[str]) -> Config:
    """With a name of its own, and every version compared."""
    defaults = [f"run_name={recorded.path.name}-replay"]
    if file.parent == recorded.path:
        begun = load_recorded(file)
        if begun.checkpoint.resume == "auto":
            defaults.append("checkpoint.resume=never")
        config = load_recorded(file, [*defaults, *overrides])
    else:
        config = load_config(file, [*defaults, *overrides])
    every = config.weights.model_copy(update={"publish_every": 1})
    return config.model_copy(update={"weights": every})


def _run_dir(config: Config) -> RunDir:
    return RunDir(Path(config.output_dir) / str(config.run_name))


def _beginning(config: Config, start: Start, begun: Config) -> Config:
    """Where the beginning is a checkpoint of the recorded run, nothing else can be one."""
    named = config.checkpoint.resume
    if start.checkpoint is None or named in ("never", "auto"):
        return config
    if named != begun.checkpoint.resume:  # what the recorded run itself began from is no wish
        raise ValueError(
            f"checkpoint.resume: {named} would be version 0, but the batches of the steps before "
            f"{start.version} are deleted: without it the replay begins from {start.checkpoint}"
        )
    resume = config.checkpoint.model_copy(update={"resume": "never"})
    return config.model_copy(update={"checkpoint": resume})


def _check_tokenizer(begun: Config, config: Config) -> None:
    """The record holds token ids. Where the model that they were made with is gone, nobody can
    say."""
    if not Path(begun.model.path).is_dir():
        return
    there = member_settings(begun, "learner")["tokenizer"]
    here = member_settings(config, "learner")["tokenizer"]
    if there != here:
        raise ValueError(
            f"model.path: {config.model.path} has another tokenizer ({here}) than the model of the "
            f"recorded run, {begun.model.path} ({there}): the recorded tokens mean nothing to it"
        )


def _claim(run_dir: RunDir, recorded: RecordedRun) -> None:
    """The directory is this replay's from now on. Raises ValueError when it is another one's."""
    source = {"path": str(recorded.path), "run_id": RunDir(recorded.path).read_run_id()}
    try:
        there = json.loads(run_dir.replay_of.read_text())
    except FileNotFoundError:
        there = None
    if there is not None and there["run_id"] != source["run_id"]:
        raise ValueError(
            f"{run_dir.path} is a replay of {there['path']}, not of {recorded.path}: choose "
            "another run_name"
        )
    write_whole(run_dir.replay_of, json.dumps(source))


def _take_over(checkpoint: Path, run_dir: RunDir) -> None:
    """Makes it a checkpoint of the replay, from which the learner then goes on."""
    target = run_dir.checkpoints / checkpoint.name
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for file in checkpoint.iterdir():
            link_or_copy(file, temporary / file.name)
        check_checkpoint(temporary)
    except (FileNotFoundError, ValueError):
        raise ValueError(
            f"{checkpoint} was deleted just now, as its run goes on: start this again with "
            "checkpoint.resume=auto"
        ) from None
    temporary.rename(target)


def _plan(recorded: RecordedRun, start: Start | None, begun: Config, config: Config) -> list[str]:
    """What will be trained, and what is not as it was."""
    end = _end(recorded, config.max_steps)
    if start is None:
        lines = [f"goes on with the replay of {recorded.path}, up to step {end - 1}"]
    else:
        begin = start.checkpoint or "version 0"
        why = "" if start.checkpoint is None else ": earlier batches are deleted"
        steps = f"steps {start.version} to {end - 1} of {recorded.path}"
        lines = [f"replays {steps}, from {begin}{why}"]
    for change in differences(begun, config, ON_BATCHES):
        lines.append(f"trained otherwise than the recorded run: {change}")
    for change in differences(begun, config, OF_BATCHES):
        lines.append(f"changes nothing, the batches are those of the record: {change}")
    return lines


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
