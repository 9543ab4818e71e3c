"""The run directory: everything that a run leaves behind.

RUN/config.yaml      the resolved configuration
RUN/run_id           keeps two runs apart on the wire
RUN/buffer_address   where the buffer listens
RUN/journal.sqlite, segments/   state of the buffer
RUN/checkpoints/, final/        the learner's weights
RUN/metrics.jsonl, logs/
"""

from __future__ import annotations

import hashlib
import secrets
import time
from pathlib import Path

from asyncrl.config import Config

CONFIG, RUN_ID, BUFFER_ADDRESS, METRICS, LOGS, FINAL = (
    "config.yaml",
    "run_id",
    "buffer_address",
    "metrics.jsonl",
    "logs",
    "final",
)


def open_run_dir(config: Config, *, config_name: str) -> Path:
    """Makes the run directory, or goes on in one when checkpoint.resume is auto.

    Raises ValueError when there is something in it already and resume is never.
    """
    name = config.run_name or f"{config_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = (Path(config.output_dir) / name).absolute()
    if run_dir.exists() and any(run_dir.iterdir()) and config.checkpoint.resume == "never":
        raise ValueError(
            f"run directory {run_dir} is not empty: choose another run_name, or go on in it with "
            "checkpoint.resume=auto"
        )
    (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
    (run_dir / BUFFER_ADDRESS).unlink(missing_ok=True)
    if not (run_dir / RUN_ID).exists():
        (run_dir / RUN_ID).write_text(secrets.token_hex(8))
    return run_dir


def weights_root(config: Config, run_dir: Path) -> Path:
    """Directory of published weights: as configured, else in shared memory, else in the run."""
    if config.weights.dir is not None:
        return Path(config.weights.dir).absolute()
    shared_memory = Path("/dev/shm")
    if shared_memory.is_dir():
        mark = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
        return shared_memory / f"asyncrl-{run_dir.name}-{mark}"
    return run_dir / "weights"
