"""The whole system as processes, with the scripted engine in place of vLLM: claims in seconds."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_runs import Finished, run_local
from rewards_by_text import checksum
from safetensors.torch import load_file
from scripted_run_fixtures import GROUPS, ROLLOUTS, STEPS
from transformers import AutoTokenizer

from asyncrl.config import Config
from asyncrl.config.load import load_config
from asyncrl.journal import Journal
from asyncrl.journal.tables import PayloadRef
from asyncrl.types import GroupId, Rollout, RolloutGroup, Sampling
from asyncrl.versions import sample_seed
from asyncrl.wire import decode_group
from generators.scripted_engine import scripted_completion
from learner.optimizer import Optimizer
from learner.policy import load_policy
from learner.ranks import start_ranks
from learner.train_step import train_step

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def synchronous(scripted_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_local(scripted_config, "max_staleness=0", directory=tmp_path_factory.mktemp("sync"))


def test_synchronous_run_trains_nothing_but_fresh_tokens(synchronous: Finished) -> None:
    assert synchronous.code == 0, synchronous.output
    assert [record["staleness/max"] for record in synchronous.steps] == [0] * STEPS


def test_asynchronous_run_uses_its_bound_and_keeps_it(scripted_run: Finished) -> None:
    assert scripted_run.code == 0, scripted_run.logs()
    steps = scripted_run.steps
    assert len(steps) == STEPS
    assert max(record["staleness/max"] for record in steps) <= 2
    assert sum(record["staleness/mean"] for record in steps) / STEPS > 0.5


def test_synchronous_run_equals_the_plain_loop_bit_for_bit(
    synchronous: Finished, scripted_config: Path
) -> None:
    parameters, batches = plain_loop(load_config(scripted_config, []))
    assert differing(parameters, synchronous) == []
    assert differing_batches(batches, synchronous) == []


def test_plain_loop_in_which_one_wrong_version_is_served_differs(
    synchronous: Finished, scripted_config: Path
) -> None:
    parameters, batches = plain_loop(load_config(scripted_config, []), wrong_at=3)
    assert differing(parameters, synchronous) != []
    assert differing_batches(batches, synchronous) == [3]


def test_every_issued_prompt_is_trained_and_fates_add_up(scripted_run: Finished) -> None:
    with sqlite3.connect(scripted_run.run_dir / "journal.sqlite") as journal:
        counts = dict(journal.execute("SELECT state, COUNT(*) FROM groups GROUP BY state"))
    assert counts == {"trained": STEPS * GROUPS}


def plain_loop(
    config: Config, wrong_at: int | None = None
) -> tuple[dict[str, torch.Tensor], list[list[RolloutGroup]]]:
    """Synchronous training without buffer, sockets and processes: parameters, batch of each step.

    In step `wrong_at` the samples are those of the version before the right one.
    """
    torch.set_num_threads(1)
    ranks = start_ranks()
    policy = load_policy(config, ranks)
    optimizer = Optimizer(policy, config.learner.optim)
    lines = Path(str(config.data.train_files[0])).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    batches = []
    for step in range(STEPS):
        version = step - (step == wrong_at)
        positions = range(step * GROUPS, (step + 1) * GROUPS)
        groups = [make_group(config, GroupId(0, p), prompts[p], version) for p in positions]
        train_step(policy, optimizer, groups, config)
        batches.append(groups)
    return {name: tensor.clone() for name, tensor in policy.gather(torch.float32)}, batches


def make_group(config: Config, id: GroupId, prompt: str, version: int) -> RolloutGroup:
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    sampling = Sampling(1.0, 8, stop_token_ids=(tokenizer.eos_token_id,))
    rollouts = []
    for sample in range(ROLLOUTS):
        done = scripted_completion(
            seed=sample_seed(config.seed, "train", id.epoch, id.position, sample, 0),
            version=version,
            options=config.generator.scripted,
            sampling=sampling,
            vocab_size=64,
        )
        text = tokenizer.decode(done.token_ids, skip_special_tokens=True)
        rollouts.append(
            Rollout(
                token_ids=done.token_ids,
                logprobs=done.logprobs,
                versions=done.versions,
                loss_mask=np.ones(len(done.token_ids), bool),
                finish_reason=done.finish_reason,
                reward=checksum("", text, "", {}),
            )
        )
    ids = np.array(tokenizer.encode(prompt), np.int32)
    return RolloutGroup(id, 0, "spell_backward", ids, 1.0, 1, tuple(rollouts))


def differing(parameters: dict[str, torch.Tensor], run: Finished) -> list[str]:
    """Names of the parameters that are not bit-equal to those that the run exported."""
    exported = load_file(run.run_dir / "final" / "model.safetensors")
    return [name for name, tensor in parameters.items() if not torch.equal(tensor, exported[name])]


def differing_batches(batches: list[list[RolloutGroup]], run: Finished) -> list[int]:
    """Steps whose groups are not bit-equal to those that the run's journal holds, in order."""
    journal = Journal(run.run_dir)
    trained: dict[int | None, list[RolloutGroup]] = defaultdict(list)
    for row in journal.stored.groups:
        assert row.segment is not None
        assert row.offset is not None
        assert row.length is not None
        frame = journal.read(PayloadRef(row.segment, row.offset, row.length))
        trained[row.step].append(decode_group(frame))
    journal.close()
    assert sorted(trained, key=str) == [*range(len(batches))]
    return [
        step
        for step, groups in enumerate(batches)
        if [content(group) for group in groups] != [content(group) for group in trained[step]]
    ]


def content(group: RolloutGroup) -> tuple[Any, ...]:
    """All that the learner trains on, arrays as bytes."""
    rollouts = [
        (
            *(a.tobytes() for a in (r.token_ids, r.logprobs, r.versions, r.loss_mask)),
            *(a.dtype.str for a in (r.token_ids, r.logprobs, r.versions, r.loss_mask)),
            r.finish_reason,
            r.reward,
        )
        for r in group.rollouts
    ]
    return group.id, group.source, group.prompt_ids.tobytes(), group.temperature, rollouts
