"""Where a learner goes on from: this run's newest checkpoint, another run's, or the beginning."""

from __future__ import annotations

import logging
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.training import training_digest
from asyncrl.run_dir import RunDir
from learner.checkpoint import (
    find_damage,
    load_checkpoint,
    load_optimizer,
    newest_checkpoint,
)
from learner.optimizer import Optimizer
from learner.policy import Policy
from learner.ranks import Ranks

log = logging.getLogger(__name__)


def resume(
    policy: Policy, optimizer: Optimizer, config: Config, run_dir: RunDir, *, ranks: Ranks
) -> int:
    """Fills policy and optimizer and returns the version that they are then. A collective.

    The run directory is this run's alone, so a whole checkpoint in it is gone on from, whatever
    checkpoint.resume says. Without one, a run that began from another run's checkpoint
    (checkpoint.resume names it, model.path holds its weights) takes over its optimizer state as
    version 0. ValueError when that checkpoint cannot be used.
    """
    found = newest_checkpoint(run_dir.checkpoints) if ranks.is_lead else None
    [name] = ranks.broadcast([found.name.encode() if found else b""])
    if name:
        return _go_on(run_dir.checkpoints / name.decode(), policy, optimizer, config)
    if config.checkpoint.resume not in ("never", "auto"):
        origin = Path(config.checkpoint.resume)
        if ranks.is_lead and (damage := find_damage(origin)):
            raise ValueError(
                f"checkpoint.resume: {origin}, which this run began from, is not whole: {damage}. "
                "Its optimizer state is needed until this run has a checkpoint of its own"
            )
        load_optimizer(origin, optimizer)
        log.info("version 0 has the weights and the optimizer state of %s", origin)
    return 0


def _go_on(directory: Path, policy: Policy, optimizer: Optimizer, config: Config) -> int:
    state = load_checkpoint(directory, policy, optimizer)
    log.info("going on from the checkpoint of version %d", state.version)
    if state.config_digest != training_digest(config):
        log.warning("the configuration has changed since that checkpoint was written")
    return state.version
