"""Runs of 64 prompts whose programs are killed by a schedule drawn from a seed."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_runs import write_scripted_config
from role_runs import Program, Shells, shells

from asyncrl.journal import open_read_only

NUM_PROMPTS = 64
PROMPTS_PER_STEP = 4
NUM_STEPS = NUM_PROMPTS // PROMPTS_PER_STEP
LAST_KILL_AT = 56
"""Groups that have come in or been let go at the last kill, at most: the run is not over yet."""
LONGEST_DELAY_S = 0.5
EVERYBODY = ("buffer", "generator-0", "learner", "generator-1")
NAMES_OF_TENSORS = ("model", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL for `victim`, `delay_s` after so many groups have come in or been let go; it is
    started again at once."""

    victim: str
    num_groups: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What the journal says of a group that has come in: never to change again."""

    attempt: int
    accepted_attempt: int
    finished_at: float


def draw_kills(seed: int, *, count: int, victims: Sequence[str] = EVERYBODY) -> list[Kill]:
    """Kills of the victims in turn, at random moments."""
    drawn = random.Random(seed)
    moments = sorted(drawn.randint(0, LAST_KILL_AT) for _ in range(count))
    return [
        Kill(victims[i % len(victims)], moment, drawn.uniform(0, LONGEST_DELAY_S))
        for i, moment in enumerate(moments)
    ]


def write_chaos_config(directory: Path, task: Path, **changes: Any) -> Path:
    """64 prompts, 4 a step, one epoch, a checkpoint every third version."""
    rows = (task / "train.jsonl").read_text().splitlines()
    rows += rows[: NUM_PROMPTS - len(rows)]
    train = directory / "train.jsonl"
    train.write_text("\n".join(rows) + "\n")
    defaults: dict[str, Any] = {
        "prompts_per_step": PROMPTS_PER_STEP,
        "max_staleness": 2,
        "data": {
            "train_files": [str(train)],
            "max_prompt_length": 64,
            "max_response_length": 8,
        },
        "generator": {
            "engine": "scripted",
            "max_concurrent_rollouts": 8,
            "scripted": {"mode": "fixed", "tokens_per_s": 2.5},
        },
        "checkpoint": {"every": 3, "export_hf": False},
        "network": {"heartbeat_s": 1.0, "wait_for_buffer_s": 60},
    }
    return write_scripted_config(directory / "config.yaml", task, **{**defaults, **changes})


@dataclass(slots=True)
class Chaos:
    """One run, and what was killed in it so far."""

    shells: Shells
    settings: tuple[str, ...] = ()
    programs: dict[str, Program] = field(default_factory=dict)
    """The present life of each."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By number of the group: as it was at the kills so far."""

    @property
    def run_dir(self) -> Path:
        return self.shells.run_dir

    def start(self, name: str) -> None:
        """A program, for the first time or again."""
        if name == "buffer":
            self.programs[name] = self.shells.buffer(*self.settings)
        elif name == "learner":
            self.programs[name] = self.shells.start("learner", settings=self.settings)
        else:
            self.programs[name] = self.shells.start(
                "generator", "--name", name, settings=self.settings
            )

    def play(self, kills: Sequence[Kill], *, names: Sequence[str] = EVERYBODY) -> None:
        """From the start of all of them to their end, which must be a good one."""
        print("\n".join(map(str, kills)))  # pytest shows it with a failure
        for name in names:
            self.start(name)
        for kill in kills:
            self.shells.wait_for(lambda kill=kill: self._is_time(kill), str(kill))  # type: ignore[misc]
            self._delay(kill.delay_s)
            self._look()
            self.programs[kill.victim].kill()
            self.start(kill.victim)
        self.shells.wait_for(self.have_ended, "the end")

    def groups(self) -> list[sqlite3.Row]:
        """Rows of the journal in order of admission; empty where there is none yet."""
        return read_rows(self.run_dir, "SELECT * FROM groups ORDER BY number")

    def tensors(self) -> dict[str, bytes]:
        """Files of the last checkpoint: parameters and both moments."""
        last = self.run_dir / "checkpoints" / f"version-{NUM_STEPS:08d}"
        return {name: (last / f"{name}.safetensors").read_bytes() for name in NAMES_OF_TENSORS}

    def check_kept(self) -> None:
        """No group that had come in was generated again, whoever died."""
        now = _kept(self.groups())
        changed = {number: (was, now.get(number)) for number, was in self.kept.items()}
        assert {n: pair for n, pair in changed.items() if pair[0] != pair[1]} == {}

    def check_bound(self, bound: int) -> None:
        """By the learner's records, and by what the buffer has on disk."""
        assert max(record["staleness/max"] for record in self.shells.steps()) <= bound
        for row in self.groups():
            if row["step"] is not None:
                oldest = min(map(int, json.loads(row["token_versions"])), default=row["step"])
                assert row["step"] - oldest <= bound, dict(row)

    def have_ended(self) -> bool:
        """Whether all have; AssertionError when one has not ended well."""
        codes = {name: program.process.poll() for name, program in self.programs.items()}
        assert set(codes.values()) <= {None, 0}, f"{codes}\n{self.shells.logs()}"
        return None not in codes.values()

    def _is_time(self, kill: Kill) -> bool:
        ended = {name: p.process.poll() for name, p in self.programs.items()}
        assert set(ended.values()) == {None}, f"{kill}: {ended}\n{self.shells.logs()}"
        settled = [row for row in self.groups() if row["finished_at"] is not None]
        return len(settled) >= kill.num_groups

    def _delay(self, seconds: float) -> None:
        """Until then, or until somebody has ended."""
        try:
            self.programs["buffer"].process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def _look(self) -> None:
        self.check_kept()
        self.kept = _kept(self.groups())


@contextmanager
def chaos(config: Path, directory: Path, *settings: str) -> Iterator[Chaos]:
    """Nothing that was started outlives the `with`."""
    directory.mkdir(exist_ok=True)
    with shells(config, directory) as run:
        yield Chaos(run, settings)


def read_rows(run_dir: Path, query: str) -> list[sqlite3.Row]:
    """Rows of a journal, also while it is being written; none where it is not there yet."""
    try:
        with closing(open_read_only(run_dir)) as database:
            database.row_factory = sqlite3.Row
            return database.execute(query).fetchall()
    except (ValueError, sqlite3.OperationalError):
        return []


def _kept(rows: Sequence[sqlite3.Row]) -> dict[int, Kept]:
    return {
        row["number"]: Kept(row["attempt"], row["accepted_attempt"], row["finished_at"])
        for row in rows
        if row["accepted_attempt"] is not None
    }
