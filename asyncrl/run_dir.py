"""The run directory: everything that a run leaves behind, and where."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.disk import write_whole


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run. The buffer's journal (asyncrl.journal) lies here too."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration of the run, written by its buffer once it listens: what a run
        cannot go on with never gets here."""
        return self.path / "config.yaml"

    @property
    def run_id(self) -> Path:
        """A random name that keeps two runs apart on the wire."""
        return self.path / "run_id"

    @property
    def buffer_address(self) -> Path:
        """Where the buffer listens; a restarted one comes back there."""
        return self.path / "buffer_address"

    @property
    def start(self) -> Path:
        """Only in a run that began from a checkpoint of another one: version 0, a model directory
        in Hugging Face format."""
        return self.path / "start"

    @property
    def replay_of(self) -> Path:
        """Only in the directory of a replay: path and run id of the recorded run, JSON."""
        return self.path / "replay_of.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """One file for each program."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def skipped(self) -> Path:
        """Batches whose loss or gradient was not finite."""
        return self.path / "skipped"

    @property
    def final(self) -> Path:
        """The trained policy in Hugging Face format."""
        return self.path / "final"

    def config_of(self, name: str) -> Path:
        """The resolved configuration that a program was started with: the buffer, and those that
        were started by commands of their own."""
        return self.path / f"config.{name}.yaml"

    def read_run_id(self) -> str | None:
        """None where the directory was not made by the launcher of this run."""
        return self.run_id.read_text().strip() if self.run_id.exists() else None

    def make_run_id(self) -> str:
        """The run id, made up and kept where there is none yet."""
        if not self.run_id.exists():
            write_whole(self.run_id, secrets.token_hex(8))
        return self.run_id.read_text().strip()

    def weights(self, config: Config) -> Path:
        """Where versions are published: a directory that belongs to this run alone, in weights.dir,
        else in shared memory, else in the run directory."""
        shared_memory = Path("/dev/shm")
        base = shared_memory if shared_memory.is_dir() else self.path
        if config.weights.dir is not None:
            base = Path(config.weights.dir).absolute()
        return base / f"asyncrl-{self.path.name}-{(self.read_run_id() or 'alone')[:8]}"
