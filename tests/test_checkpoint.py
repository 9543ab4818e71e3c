"""Checkpoints and exports: going on from one is going on, damage is seen, exports load anywhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from learner_cases import VOCABULARY, make_config, make_groups, save_model
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.config.training import training_digest
from learner.checkpoint import (
    State,
    find_damage,
    list_versions,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from learner.export import export_policy
from learner.optimizer import Optimizer
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks
from learner.train_step import train_step


class Run:
    """Policy and optimizer, trained on made-up groups that depend on the step alone."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.policy: Policy = load_policy(config, start_ranks())
        self.optimizer = Optimizer(self.policy, config.learner.optim)
        self.version = 0

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            groups = make_groups(2, start=10 * self.version)
            train_step(self.policy, self.optimizer, groups, self.config)
            self.version += 1

    def save(self, root: Path) -> None:
        state = State(
            version=self.version,
            num_steps=self.optimizer.num_steps,
            num_updates=self.optimizer.num_updates,
            seed=self.config.seed,
            config_digest=training_digest(self.config),
        )
        save_checkpoint(root, self.policy, self.optimizer, state, is_lead=True)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.gather(torch.float32)}


def newest(root: Path) -> Path:
    found = newest_checkpoint(root)
    assert found is not None
    return found


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(save_model(tmp_path / "model"), optim={"lr": 1e-3, "warmup_steps": 5})


@pytest.mark.parametrize("tied", [True, False])
def test_three_steps_and_three_more_after_a_resume_are_six(tied: bool, tmp_path: Path) -> None:
    config = make_config(
        save_model(tmp_path / "model", tied=tied), optim={"lr": 1e-3, "warmup_steps": 5}
    )
    whole, first, second = Run(config), Run(config), Run(config)
    whole.train(6)
    first.train(3)
    first.save(tmp_path / "checkpoints")
    state = load_checkpoint(newest(tmp_path / "checkpoints"), second.policy, second.optimizer)
    second.version = state.version
    second.train(3)
    expected = whole.parameters()
    for name, tensor in second.parameters().items():
        assert torch.equal(tensor, expected[name]), name
    assert second.optimizer.num_steps == 6


def test_a_checkpoint_of_the_first_moment_can_be_resumed(config: Config, tmp_path: Path) -> None:
    fresh, resumed = Run(config), Run(config)
    fresh.save(tmp_path)
    load_checkpoint(newest(tmp_path), resumed.policy, resumed.optimizer)
    fresh.train(2)
    resumed.train(2)
    expected = fresh.parameters()
    assert all(torch.equal(t, expected[n]) for n, t in resumed.parameters().items())


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no marker", "garbled marker"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    config: Config, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(config)
    for _ in range(2):
        run.train(1)
        run.save(tmp_path)
    assert newest(tmp_path).name == "version-00000002"
    victim = newest(tmp_path) / "exp_avg_sq.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "delete":
        victim.unlink()
    elif damage == "no marker":
        (victim.parent / "complete.json").unlink()
    else:
        (victim.parent / "complete.json").write_text("[1, 2")
    with caplog.at_level(logging.WARNING):
        assert newest(tmp_path).name == "version-00000001"
    assert "version-00000002" in caplog.text


def test_a_checkpoint_in_the_making_is_not_seen(config: Config, tmp_path: Path) -> None:
    run = Run(config)
    run.save(tmp_path)
    newest(tmp_path).rename(tmp_path / ".version-00000000.tmp")
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_a_version_written_again_replaces_the_damaged_one(config: Config, tmp_path: Path) -> None:
    run = Run(config)
    run.save(tmp_path)
    (newest(tmp_path) / "state.json").write_text("{}")
    assert newest_checkpoint(tmp_path) is None
    run.save(tmp_path)
    assert find_damage(newest(tmp_path)) is None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_only_the_newest_checkpoints_stay(config: Config, tmp_path: Path) -> None:
    run = Run(config)
    for _ in range(3):
        run.train(1)
        run.save(tmp_path / "checkpoints")
    prune_checkpoints(tmp_path / "checkpoints", keep_last=2)
    assert list_versions(tmp_path / "checkpoints") == [2, 3]


def test_a_checkpoint_of_another_model_is_refused(config: Config, tmp_path: Path) -> None:
    Run(config).save(tmp_path / "checkpoints")
    other = Run(make_config(save_model(tmp_path / "other", tied=False)))
    with pytest.raises(ValueError, match=r"another model.*lm_head"):
        load_checkpoint(newest(tmp_path / "checkpoints"), other.policy, other.optimizer)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_as_the_same_model(tied: bool, dtype: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tied=tied)
    (model / "tokenizer_config.json").write_text("{}")
    config = make_config(model)
    run = Run(config)
    run.train(2)
    sent = {n: t.clone() for n, t in run.policy.gather(getattr(torch, dtype))}
    export = config.model.model_copy(update={"dtype": dtype})
    for _ in range(2):  # the second replaces the first
        export_policy(tmp_path / "final", run.policy, export, is_lead=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert (tmp_path / "final" / "tokenizer_config.json").read_text() == "{}"
    assert str(loaded.dtype) == f"torch.{dtype}"
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, sent[name]), name
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tied

    ids = torch.randint(3, VOCABULARY, (1, 8))
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    logprobs = torch.log_softmax(exact(ids).logits[0], dim=-1)[range(7), ids[0, 1:]]
    mine, _ = run.policy(ids[:, :-1], torch.arange(7), ids[0, 1:], torch.ones(7))
    assert torch.allclose(mine, logprobs, atol=1e-5 if dtype == "float32" else 0.1)
