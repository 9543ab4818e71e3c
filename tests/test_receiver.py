"""The receiving side of a broadcast, without an engine: whole and verified, or an error in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weights_sender import BUCKET_BYTES, Sender, Version, receiving_threads

from asyncrl import process_groups
from asyncrl.manifest import Layout, WeightsError
from asyncrl.process_groups import GroupError
from asyncrl.types import WeightId
from generators.arrivals import Arrivals
from generators.receiver import Limits, Receiver

W = WeightId(2, 5)
LIMITS = Limits(timeout_s=20, stall_s=5)


def tensors() -> dict[str, torch.Tensor]:
    """Small ones, one over several slices, an empty one, and some that end inside a slice."""
    torch.manual_seed(0)
    shapes = {"a": (3,), "b": (1000, 7), "c": (0, 4), "d": (5, 5, 5), "e": (2048,), "f": (1,)}
    named = {name: torch.randn(shape) for name, shape in shapes.items()}
    named["g"] = torch.randn(700).to(torch.bfloat16)
    return named


def receiver(sender: Sender, rank: int = 1, limits: Limits = LIMITS) -> Receiver:
    seat = sender.seat(rank)
    prefix = f"weights-{W}-{seat.roster}"
    place = process_groups.Seat(seat.host, seat.port, prefix, rank, seat.size, "gloo")
    return Receiver(
        place,
        sender.version.manifest,
        bucket_bytes=BUCKET_BYTES,
        limits=limits,
        device=torch.device("cpu"),
    )


def received(one: Receiver) -> dict[str, torch.Tensor]:
    flat = torch.empty(one.layout.num_bytes, dtype=torch.uint8)
    one.receive(flat)
    return one.layout.tensors(flat)


def arrived(one: Receiver) -> dict[str, torch.Tensor]:
    return dict(Arrivals(one))


WAYS = pytest.mark.parametrize("take", [received, arrived])
Take = Callable[[Receiver], dict[str, torch.Tensor]]


def no_thread_is_left(timeout_s: float = 5) -> bool:
    ends = time.monotonic() + timeout_s
    while receiving_threads() and time.monotonic() < ends:
        time.sleep(0.02)
    return not receiving_threads()


@WAYS
def test_what_was_sent_arrives_bit_for_bit_whatever_straddles_the_slices(take: Take) -> None:
    sender = Sender(Version.of(W, tensors())).start()
    one = receiver(sender)
    found = take(one)
    sender.wait()
    assert list(found) == list(tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())
    assert sender.num_sent > 5
    assert 0 < one.times.rendezvous_s < 5
    assert one.times.transfer_s > 0
    assert one.times.verify_s > 0
    assert no_thread_is_left()


@WAYS
def test_a_flipped_byte_is_an_error_that_names_its_tensor(take: Take) -> None:
    version = Version.of(W, tensors())
    version.flat[Layout.of_manifest(version.manifest).places[-1].start] ^= 1
    sender = Sender(version).start()
    with pytest.raises(WeightsError, match=r"tensor g of weights 2\.5 .* is damaged"):
        take(receiver(sender))
    sender.wait()
    assert no_thread_is_left()


@WAYS
def test_a_sender_that_never_comes_is_an_error_in_time(take: Take) -> None:
    sender = Sender(Version.of(W, tensors()))
    began = time.monotonic()
    with pytest.raises(GroupError, match="not everybody came"):
        take(receiver(sender, limits=Limits(20, 0.5)))
    assert time.monotonic() - began < 3
    assert no_thread_is_left()


@WAYS
def test_another_member_that_never_comes_is_an_error_in_time(take: Take) -> None:
    sender = Sender(Version.of(W, tensors()), size=3, stall_s=0.5).start()
    with pytest.raises(GroupError):
        take(receiver(sender, limits=Limits(20, 0.5)))
    with pytest.raises(GroupError):
        sender.wait()
    assert no_thread_is_left()


@WAYS
def test_a_transfer_that_gets_on_too_slowly_ends_at_the_whole_deadline(take: Take) -> None:
    sender = Sender(Version.of(W, tensors()), stall_s=1.0)
    sender.before_slice = lambda number: time.sleep(0.2)
    sender.start()
    began = time.monotonic()
    with pytest.raises(GroupError, match=r"after weights\.timeout_s = 0\.5 only \d+ of \d+ bytes"):
        take(receiver(sender, limits=Limits(0.5, 5)))
    assert time.monotonic() - began < 3
    with pytest.raises(GroupError):
        sender.wait()
    assert no_thread_is_left()


def test_a_reader_that_stops_leaves_the_group() -> None:
    sender = Sender(Version.of(W, tensors()), stall_s=1.0).start()
    arrivals: Any = iter(Arrivals(receiver(sender)))
    next(arrivals)
    arrivals.close()
    with pytest.raises(GroupError):
        sender.wait()
    assert no_thread_is_left()


OTHER_SENDER = """
import sys, time
import torch
sys.path.insert(0, "tests")
from test_receiver import W, tensors
from weights_sender import Sender, Version

sender = Sender(Version.of(W, tensors()))
sender.before_slice = lambda number: number == 3 and (print("third", flush=True), time.sleep(60))
print(sender.seat().port, flush=True)
sender.start().wait(70)
"""


@pytest.mark.parametrize(("take", "end"), [(received, signal.SIGKILL), (arrived, signal.SIGSTOP)])
def test_a_sender_that_dies_or_stands_still_amid_the_slices_is_an_error_in_time(
    take: Take, end: signal.Signals
) -> None:
    """Killed: at once. Stopped: after weights.stall_timeout_s."""
    program = subprocess.Popen(
        [sys.executable, "-c", OTHER_SENDER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    try:
        assert program.stdout is not None
        port = int(program.stdout.readline())
        version = Version.of(W, tensors())
        place = process_groups.Seat("127.0.0.1", port, f"weights-{W}-7", 1, 2, "gloo")
        one = Receiver(
            place,
            version.manifest,
            bucket_bytes=BUCKET_BYTES,
            limits=Limits(20, 1.0),
            device=torch.device("cpu"),
        )
        taking = process_groups.Disposable(lambda: take(one), name="stage-weights")
        assert program.stdout.readline() == "third\n"
        began = time.monotonic()
        os.kill(program.pid, end)
        with pytest.raises(GroupError, match="gone or stands still"):
            taking.result(timeout_s=10)
        took = time.monotonic() - began
        assert took < (1.5 if end == signal.SIGKILL else 4)
        assert no_thread_is_left()
    finally:
        program.kill()
        program.wait()
