"""A version on its way into an engine, as vLLM's worker does it, without vLLM."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weights_sender import Sender, Version, receiving_threads

from asyncrl.process_groups import GroupError
from asyncrl.types import WeightId
from generators.engine import Source
from generators.receiver import Limits
from generators.staging import Place, Staging, UnderPause

HOST = torch.device("cpu")
BUCKET_BYTES = 1 << 18


@pytest.fixture
def place(random_tiny_task: Path) -> Place:
    model, limits = random_tiny_task / "model", Limits(timeout_s=20, stall_s=2)
    return Place(model_dir=model, dtype="float32", rank=0, device=HOST, home=HOST, limits=limits)


def sent(place: Place, weights: WeightId) -> tuple[Sender, Source]:
    version = Version.of(weights, load_file(place.model_dir / "model.safetensors"))
    sender = Sender(version, stall_s=2).start(bucket_bytes=BUCKET_BYTES)
    seat = sender.seat(bucket_bytes=BUCKET_BYTES)
    return sender, Source(weights=weights, seat=seat, manifest=version.json)


def until_ended(staging: Staging) -> Staging:
    ends = time.monotonic() + 20
    while staging.progress.state == "running":
        assert time.monotonic() < ends
        time.sleep(0.01)
    return staging


def test_the_memory_of_one_version_serves_the_next(place: Place) -> None:
    _, source = sent(place, WeightId(1, 1))
    first = until_ended(Staging(source, place))
    sender, source = sent(place, WeightId(1, 2))
    second = until_ended(Staging(source, place, spare=first.flat))
    assert second.progress.state == "done"
    assert first.flat is not None
    assert second.flat is first.flat
    expected = sender.version.manifest.entries()
    assert second.tensors.keys() == expected.keys()


def test_a_transfer_under_pause_that_is_given_up_leaves_the_group(place: Place) -> None:
    sender, source = sent(place, WeightId(1, 1))
    with closing(UnderPause(source, place).tensors()) as tensors:
        assert len(list(islice(tensors, 2))) == 2
    with pytest.raises(GroupError):
        sender.wait()
    assert "receive-weights" not in receiving_threads()
