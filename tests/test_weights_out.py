"""The publisher: training never waits for it, the latest wins, the newest always arrives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from learner_cases import make_config, save_model

from asyncrl.config.schema import WeightsSection
from asyncrl.types import WeightId
from asyncrl.weights_dir import list_versions, read_version
from learner.disk_sender import DiskSender
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks
from learner.weights_out import Publisher


class Announced:
    """What was announced, in order; `gate` holds up announcements while it is closed."""

    def __init__(self) -> None:
        self.weights: list[WeightId] = []
        self.locations: list[Path] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0

    def __call__(self, weights: WeightId, location: Path, digest: str) -> None:
        self.gate.wait(timeout=30)
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("the buffer does not answer")
        assert len(digest) == 64
        self.weights.append(weights)
        self.locations.append(location)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    config = make_config(save_model(tmp_path / "model", tied=request.param))
    return load_policy(config, start_ranks())


@pytest.fixture
def announced() -> Announced:
    return Announced()


@pytest.fixture
def publisher(tmp_path: Path, announced: Announced) -> Iterator[Publisher]:
    publisher = make_publisher(WeightsSection(keep=2), tmp_path / "weights", announced)
    yield publisher
    announced.gate.set()
    publisher.close(drain_s=10)


def make_publisher(config: WeightsSection, root: Path, announced: Announced) -> Publisher:
    return Publisher(config, DiskSender(config, root, announce=announced), dtype=torch.bfloat16)


def add_one(policy: Policy) -> None:
    with torch.no_grad():
        for _, parameter in policy.masters():
            parameter.add_(1.0)


def test_what_is_published_is_the_policy_at_the_snapshot(
    policy: Policy, publisher: Publisher, announced: Announced
) -> None:
    expected = {name: tensor.clone() for name, tensor in policy.gather(torch.bfloat16)}
    publisher.snapshot(policy, WeightId(1, 1))
    add_one(policy)
    assert publisher.close(drain_s=10)
    staged = read_version(announced.locations[0])
    assert staged.weights == WeightId(1, 1)
    assert staged.tensors.keys() == expected.keys()
    for name, tensor in staged.tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert ("lm_head.weight" in expected) == (not policy.model.config.tie_word_embeddings)


def test_the_latest_wins_and_the_newest_arrives_while_training_goes_on(
    policy: Policy, publisher: Publisher, announced: Announced
) -> None:
    announced.gate.clear()
    publisher.snapshot(policy, WeightId(1, 1))
    wait_until(lambda: publisher._current is not None)
    started = time.monotonic()
    for version in range(2, 8):
        add_one(policy)
        publisher.snapshot(policy, WeightId(1, version))
    assert time.monotonic() - started < 5, "a snapshot waited for the writer"
    expected = {name: tensor.clone() for name, tensor in policy.gather(torch.bfloat16)}
    announced.gate.set()
    assert publisher.close(drain_s=10)
    assert announced.weights == [WeightId(1, 1), WeightId(1, 7)]
    staged = read_version(announced.locations[-1])
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in expected.items())


def test_a_snapshot_being_sent_is_not_overwritten(
    policy: Policy, publisher: Publisher, announced: Announced, tmp_path: Path
) -> None:
    root = tmp_path / "slow"
    config = WeightsSection(bucket_bytes=1 << 16, max_bytes_per_s=100_000)
    slow = make_publisher(config, root, announced)
    expected = {name: tensor.clone() for name, tensor in policy.gather(torch.bfloat16)}
    slow.snapshot(policy, WeightId(1, 1))
    wait_until(lambda: slow._current is not None)
    for version in range(2, 5):
        add_one(policy)
        slow.snapshot(policy, WeightId(1, version))
    assert not list_versions(root)
    assert slow.close(drain_s=20)
    staged = read_version(root / "1.1")
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in expected.items())
    assert announced.weights == [WeightId(1, 1), WeightId(1, 4)]


def test_a_failed_announcement_is_a_warning_and_is_made_again(
    policy: Policy,
    publisher: Publisher,
    announced: Announced,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.weights_out.RETRY_S", 0.05)
    announced.failures = 2
    with caplog.at_level(logging.WARNING):
        publisher.snapshot(policy, WeightId(1, 1))
        assert publisher.close(drain_s=10)
    assert announced.weights == [WeightId(1, 1)]
    assert "the buffer does not answer" in caplog.text


def test_a_version_that_cannot_be_written_is_a_warning_and_the_next_supersedes_it(
    policy: Policy,
    publisher: Publisher,
    announced: Announced,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    in_the_way = tmp_path / "weights" / "1.1" / "file"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    with caplog.at_level(logging.WARNING):
        publisher.snapshot(policy, WeightId(1, 1))
        wait_until(lambda: "1.1 have not reached" in caplog.text)
    publisher.snapshot(policy, WeightId(1, 2))
    assert publisher.close(drain_s=10)
    assert announced.weights == [WeightId(1, 2)]


def test_closing_does_not_wait_longer_than_it_is_told(
    policy: Policy, publisher: Publisher, announced: Announced
) -> None:
    announced.gate.clear()
    publisher.snapshot(policy, WeightId(1, 1))
    started = time.monotonic()
    assert not publisher.close(drain_s=0.2)
    assert time.monotonic() - started < 2


def test_only_the_newest_versions_stay_on_disk(
    policy: Policy, publisher: Publisher, announced: Announced, tmp_path: Path
) -> None:
    for version in range(1, 5):
        publisher.snapshot(policy, WeightId(1, version))
        wait_until(lambda: len(announced.weights) == version)  # noqa: B023
    assert publisher.close(drain_s=10)
    assert list_versions(tmp_path / "weights") == [WeightId(1, 3), WeightId(1, 4)]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10) -> None:
    ends = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends, "did not happen in time"
        time.sleep(0.005)
