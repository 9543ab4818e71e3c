"""metrics.jsonl and trackers. The file comes first: a tracker that fails costs one warning."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, Literal

from asyncrl.config import Config
from asyncrl.run_dir import RunDir

log = logging.getLogger(__name__)

Value = float | int | str
_QUEUE_RECORDS = 10_000
"""Records that may wait for a slow tracker; later ones are left out of it (not of the file)."""


class MetricsLog:
    """The one writer of metrics.jsonl: one JSON object a line, with step, time and attempt.

    `attempt` counts the lives of the learner in this run directory, so that a record of a replayed
    step can be told from the first one.
    """

    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self._path = run_dir.metrics
        self._attempt = 1 + _last_attempt(self._path)
        text = self._path.read_bytes() if self._path.exists() else b""
        is_torn = bool(text) and not text.endswith(b"\n")
        self._file = self._path.open("a", buffering=1)
        if is_torn:
            self._file.write("\n")
        self._trackers = [_WandbThread(run_dir, config) for _ in config.logging.trackers]

    def log(self, step: int, values: dict[str, Value]) -> None:
        """Appends one record. Numbers that are not finite are written as null."""
        record: dict[str, Any] = {
            "step": step,
            "time": round(time.time(), 3),
            "attempt": self._attempt,
        }
        record.update({name: _plain(value) for name, value in values.items()})
        self._file.write(json.dumps(record) + "\n")
        for tracker in self._trackers:
            tracker.log(step, values)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close(timeout_s=20)


class _WandbThread:
    """wandb in a thread of its own: neither a slow start nor an exception reaches training."""

    def __init__(self, run_dir: RunDir, config: Config) -> None:
        self._records: queue.Queue[tuple[int, dict[str, Value]] | None] = queue.Queue(
            _QUEUE_RECORDS
        )
        self._thread = threading.Thread(
            target=self._run, args=(run_dir, config), name="wandb", daemon=True
        )
        self._thread.start()

    def log(self, step: int, values: dict[str, Value]) -> None:
        try:
            self._records.put_nowait((step, values))
        except queue.Full:
            pass

    def close(self, *, timeout_s: float) -> None:
        try:
            self._records.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self, run_dir: RunDir, config: Config) -> None:
        try:
            import wandb

            run = wandb.init(
                project=config.logging.project,
                name=run_dir.path.name,
                dir=str(run_dir.path),
                mode=_wandb_mode(),
                config=config.model_dump(),
                settings=wandb.Settings(silent=True, console="off"),
            )
            while (record := self._records.get()) is not None:
                step, values = record
                run.log({"step": step, **values})
            run.finish()
        except Exception as error:  # a tracker is never worth a run
            log.warning("wandb is off: %s. metrics.jsonl goes on.", error)


def _wandb_mode() -> Literal["online", "offline", "disabled"]:
    """As WANDB_MODE says, else online with a key and offline without: no run asks to log in."""
    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        return "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return "offline" if mode == "offline" else "disabled" if mode == "disabled" else "online"


def _last_attempt(path: Path) -> int:
    """The highest attempt in a metrics file; 0 when there is none. A torn last line is passed."""
    last = 0
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                last = max(last, int(json.loads(line)["attempt"]))
            except (ValueError, KeyError, TypeError):
                continue
    return last


def _plain(value: Value) -> Value | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
