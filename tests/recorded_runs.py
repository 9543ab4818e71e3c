"""A recorded run for tests of the replay: trained by a real learner from a scripted buffer, whose
batches and digests then are written into a journal as a buffer would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learner_cases import make_config, make_groups, save_model
from local_runs import REPOSITORY
from scripted_buffer import ScriptedBuffer

from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.config.load import save_resolved
from asyncrl.config.training import training_digest
from asyncrl.journal import Journal
from asyncrl.journal.tables import Change, GroupRow, StepRow, WeightsRow
from asyncrl.run_dir import RunDir
from asyncrl.wire import encode_group
from learner.__main__ import live_sides
from learner.joining import join
from learner.loop import Learner
from learner.ranks import start_ranks

STEPS = 5
STATE = ("model", "exp_avg", "exp_avg_sq")


def make_recorded_run(directory: Path, *, untrained: int = 0, **sections: Any) -> Path:
    """DIRECTORY/run: STEPS steps trained, checkpoints of versions 2, 4 and 5, the weights of every
    version published; `untrained` more batches were assigned."""
    config = recorded_config(directory, **sections)
    run_dir = RunDir(directory / "run")
    run_dir.path.mkdir()
    run_dir.make_run_id()
    save_resolved(config, run_dir.config)
    with ScriptedBuffer(num_steps=STEPS) as buffer:
        for step in range(1, STEPS):  # no version is superseded before it is published
            buffer.waiting_for[step] = f"published 1.{step}"
        clock, ranks = PhaseClock("start"), start_ranks()
        joined = join(config, run_dir, address=buffer.address, clock=clock)
        line, outlet = live_sides(joined, config, run_dir, ranks)
        learner = Learner(config, run_dir, line=line, outlet=outlet, ranks=ranks, clock=clock)
        learner.take_over()
        assert learner.run() == 0
    write_journal(run_dir.path, config, num_assigned=STEPS + untrained, digests=buffer.digests)
    return run_dir.path


def recorded_config(directory: Path, **sections: Any) -> Config:
    model = directory / "model"
    if not model.exists():
        save_model(model)
        (model / "tokenizer.json").write_text("{}")
    tree = make_config(model).model_dump()
    tree["output_dir"], tree["weights"]["dir"] = str(directory), str(directory / "weights")
    tree["checkpoint"] |= {"every": 2, "keep_last": 3}
    for section, values in sections.items():
        tree[section] = {**tree[section], **values}
    return Config.model_validate(tree)


def write_journal(
    directory: Path, config: Config, *, num_assigned: int, digests: Mapping[int, str]
) -> None:
    """Every group is a segment of its own."""
    journal = Journal(directory, segment_bytes=1)
    groups: list[GroupRow] = []
    steps: list[StepRow] = []
    for step in range(num_assigned):
        made = make_groups(2, start=10 * step)  # as ScriptedBuffer does
        for group in made:
            ref = journal.append(encode_group(group))
            row = [len(groups), *group.id, "trained", 0, 0, 0, "generator-0", 0, 1, step, 0, *ref]
            groups.append(GroupRow._make([*row, "{}", "", 0, 0.5, 0.0, 0.0]))
        record = {"name": "buffer", "step": step, "values": {"reward_mean": 0.5}}
        steps.append(StepRow(step, len(made), step, "", json.dumps(record), 0.0))
    weights = tuple(WeightsRow(1, version, "", digest) for version, digest in digests.items())
    meta = {"committed": str(min(STEPS, num_assigned)), "config_digest": training_digest(config)}
    journal.write(Change(tuple(groups), tuple(steps), weights, meta=meta)).result()
    journal.close()


def delete_batches(directory: Path, *, before: int) -> None:
    """As retention does."""
    journal = Journal(directory, segment_bytes=1)
    journal.append(b"the newest segment stays")
    journal.retain(from_step=before, settled=[]).result()
    journal.close()


def same_state(one: Path, other: Path, version: int) -> bool:
    """Whether two run directories have the same bytes in their checkpoints of this version."""
    files = [Path("checkpoints") / f"version-{version:08d}" / f"{n}.safetensors" for n in STATE]
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in files)


def launch_replay(run: Path, *arguments: str) -> subprocess.Popen[str]:
    """`asyncrl-launch learner --replay RUN`, beside nothing else."""
    command = [sys.executable, "-P", "-m", "asyncrl.launch", "learner", "--replay", str(run)]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
