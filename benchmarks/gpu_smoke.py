"""What weights need of one GPU, tried out in two minutes.

    python benchmarks/gpu_smoke.py                  # on cuda:0
    python benchmarks/gpu_smoke.py --device cpu     # the same calls, in seconds

Prints a line for each check and ends with exit code 1 when one fails. NCCL refuses two ranks on one
GPU, so its groups have one member here; staging takes its bytes by gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch
from gpu_policy import small_policy, train

from asyncrl.backends import Backend
from asyncrl.manifest import Layout, Manifest
from asyncrl.nccl import NO_WATCHDOG
from asyncrl.process_groups import Disposable, Group, Meeting, Seat
from asyncrl.types import WeightId
from generators.receiver import Limits, Receiver
from learner.snapshots import Snapshot

CPU = torch.device("cpu")
LIMIT_S = 20.0
WEIGHTS = WeightId(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here: use --device cpu")
    failed = [name for name, check in CHECKS.items() if not passes(name, check, device)]
    sys.exit(1 if failed else 0)


def passes(name: str, check: Callable[[torch.device], str], device: torch.device) -> bool:
    began = time.monotonic()
    try:
        found = check(device)
    except Exception as error:  # the other checks are still worth a try
        traceback.print_exc()
        found, passed = f"{type(error).__name__}: {error}", False
    else:
        passed = True
    verdict = "passed" if passed else "FAILED"
    print(f"{verdict}  {name:10}  {time.monotonic() - began:6.2f} s  {found}", flush=True)
    return passed


def check_groups(device: torch.device) -> str:
    """A group works, is aborted, and the next one works; the process lives on."""
    data = torch.arange(1 << 20, device=device).to(torch.uint8)
    before = {name: os.environ.get(name) for name in NO_WATCHDOG}
    aborted = lone_group(device)
    aborted.broadcast(data)
    aborted.abort()
    began = time.monotonic()
    with closing(lone_group(device)) as group:
        group.broadcast(data)
        rebuilt_s = time.monotonic() - began
        group.broadcast(data.cpu())  # the sender's bytes may lie on the host
    after = {name: os.environ.get(name) for name in NO_WATCHDOG}
    expect(before == after, f"the environment was left changed: {after}")
    return f"{backend_of(device)}; the second group after {rebuilt_s * 1000:.0f} ms"


def check_staging(device: torch.device) -> str:
    """A broadcast arrives in a flat buffer on the device, is verified, and is loaded from there;
    a flipped byte is found."""
    sent = {
        "a": torch.randn(1000, 1000).to(torch.bfloat16),
        "b": torch.randn(257),
        "c": torch.randn(3, 5, 7).to(torch.float16),
    }
    manifest = Manifest.of(WEIGHTS, sent)
    layout = Layout.of_manifest(manifest)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for name, tensor in layout.tensors(flat).items():
        tensor.copy_(sent[name])
    arrived, receiver = receive(manifest, flat, device)
    model = {name: torch.zeros_like(tensor, device=device) for name, tensor in sent.items()}
    for name, tensor in layout.tensors(arrived).items():
        model[name].copy_(tensor)
    for name, tensor in sent.items():
        expect(torch.equal(model[name].cpu(), tensor), f"{name} is not what was sent")
    flat[5] += 1
    try:
        receive(manifest, flat, device)
    except ValueError as error:
        expect("tensor a" in str(error), str(error))
    else:
        raise RuntimeError("a flipped byte was not found")
    return f"transfer {receiver.transfer_s:.3f} s, verify {receiver.verify_s:.3f} s"


def check_pinned(device: torch.device) -> str:
    """Copies to pinned memory on a stream of their own, while the device computes."""
    is_cuda = device.type == "cuda"
    num_bytes = 1 << (30 if is_cuda else 24)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device).random_()
    speeds = []
    for is_pinned in (False, is_cuda):
        target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).fill_(0)
        stream = torch.cuda.Stream(device) if is_cuda else None
        if is_cuda:
            torch.cuda.synchronize(device)  # the source is filled in another stream
        began = time.monotonic()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        if stream is not None:
            stream.synchronize()
        speeds.append(num_bytes / (time.monotonic() - began) / 1e9)
        expect(torch.equal(target[-4096:], source[-4096:].cpu()), "the copy is not whole")
    return "pageable {:.1f} GB/s, {} {:.1f} GB/s".format(
        speeds[0], "pinned" if is_cuda else "again", speeds[1]
    )


def check_fsdp(device: torch.device) -> str:
    """A snapshot of a model under FSDP2 is broadcast while training steps go on: it stays what it
    was, and they do not wait."""
    policy = small_policy(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    train(policy, optimizer, steps=2)
    snapshot = Snapshot(WEIGHTS)
    snapshot.allocate(policy, torch.bfloat16)
    began = time.monotonic()
    policy.copy_into(snapshot.tensors, torch.bfloat16)
    snapshot_s = time.monotonic() - began
    for name, whole in policy.gather(torch.bfloat16):
        expect(torch.equal(snapshot.tensors[name], whole.cpu()), f"{name} is not the policy's")
    digest = Manifest.of(WEIGHTS, snapshot.tensors).digest
    alone_s = train(policy, optimizer, steps=4)
    sending = Disposable(lambda: send(snapshot, device, times=20), name="send")
    beside_s = train(policy, optimizer, steps=4)
    sending.result(timeout_s=LIMIT_S)
    expect(Manifest.of(WEIGHTS, snapshot.tensors).digest == digest, "the snapshot has changed")
    name, whole = next(policy.gather(torch.bfloat16))
    expect(not torch.equal(snapshot.tensors[name], whole.cpu()), "nothing was trained meanwhile")
    return (
        f"snapshot {snapshot_s * 1000:.1f} ms; a step {alone_s * 1000:.1f} ms, beside broadcasts "
        f"{beside_s * 1000:.1f} ms"
    )


CHECKS = {
    "groups": check_groups,
    "staging": check_staging,
    "pinned": check_pinned,
    "fsdp": check_fsdp,
}


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def backend_of(device: torch.device) -> Backend:
    return "nccl" if device.type == "cuda" else "gloo"


def lone_group(device: torch.device) -> Group:
    with closing(Meeting("127.0.0.1", timeout_s=LIMIT_S)) as meeting:
        seat = Seat(meeting.host, meeting.port, "smoke", 0, 1, backend_of(device))
        return Group(seat, device=device, join_s=LIMIT_S, stall_s=LIMIT_S, store=meeting.store)


def receive(
    manifest: Manifest, flat: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, Receiver]:
    """`flat` as it has come to `device` by a broadcast. Raises WeightsError."""
    with closing(Meeting("127.0.0.1", timeout_s=LIMIT_S)) as meeting:
        seat = Seat(meeting.host, meeting.port, "smoke", 0, 2, "gloo")
        step = len(flat) // 7

        def send_slices() -> None:
            with closing(
                Group(seat, device=CPU, join_s=LIMIT_S, stall_s=LIMIT_S, store=store)
            ) as g:
                for start in range(0, len(flat), step):
                    g.broadcast(flat[start : start + step])

        store = meeting.store
        sending = Disposable(send_slices, name="send")
        receiver = Receiver(
            replace(seat, rank=1),
            manifest,
            bucket_bytes=step,
            limits=Limits(LIMIT_S, LIMIT_S),
            device=CPU,
        )
        arrived = torch.zeros(len(flat), dtype=torch.uint8, device=device)
        receiver.receive(arrived)
        sending.result(timeout_s=LIMIT_S)
    return arrived, receiver


def send(snapshot: Snapshot, device: torch.device, *, times: int) -> None:
    assert snapshot.flat is not None
    with closing(lone_group(device)) as group:
        for _ in range(times):
            for part in snapshot.flat.split(8 << 20):
                group.broadcast(part)


if __name__ == "__main__":
    main()
