"""`[python -m torch.distributed.run --nproc-per-node=2] bare_learner.py MODEL OUT ROUNDS`: what a
snapshot holds up training, beside the same bytes copied, gathered or broadcast by torch alone.

The contestants take turns. Seconds of each round, as JSON in OUT, by name: `snapshot`
(Publisher.snapshot), `copy` (one rank: copy_ of each float32 parameter into bfloat16), `gathers`
(several: an all-gather of each parameter, cast beforehand), `broadcast` (several: of one tensor of
all bytes, by gloo).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from weights_config import make_config

from asyncrl.types import WeightId
from learner.gather import local_part
from learner.policy import Policy, load_policy
from learner.ranks import start_ranks
from learner.snapshots import Snapshot
from learner.weights_out import News, Publisher


class Nowhere:
    """A sender without generators: versions are published at once."""

    where = "nowhere"
    failing_since: float | None = None

    def publish(self, snapshot: Snapshot) -> None:
        """Nothing is written or sent."""

    def attend(self, snapshot: Snapshot, news: News) -> None:
        """Nobody asks."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


def main(model: Path, out: Path, rounds: int) -> None:
    torch.set_num_threads(1)
    ranks = start_ranks()
    config = make_config(model)
    policy = load_policy(config, ranks)
    sender = Nowhere() if ranks.is_lead else None
    publisher = Publisher(config.weights, sender, dtype=torch.bfloat16)
    turns = contestants(policy) | {"snapshot": lambda: publisher.snapshot(policy, WeightId(1, 1))}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds + 2):  # in the first two, memory is touched for the first time
        for name, turn in turns.items():
            dist.barrier()
            began = time.perf_counter()
            turn()
            seconds[name].append(time.perf_counter() - began)
    if ranks.is_lead:
        out.write_text(json.dumps({name: taken[2:] for name, taken in seconds.items()}))
    publisher.close(drain_s=5.0)
    dist.destroy_process_group()


@torch.no_grad()
def contestants(policy: Policy) -> dict[str, Callable[[], object]]:
    shards = [local_part(parameter) for _, parameter in policy.masters()]
    if policy.ranks.size == 1:
        targets = [torch.zeros_like(shard, dtype=torch.bfloat16) for shard in shards]
        return {"copy": lambda: copy_all(targets, shards)}
    size = policy.ranks.size
    rows = [-(-parameter.shape[0] // size) for _, parameter in policy.masters()]
    cast = [padded(shard.to(torch.bfloat16), num) for shard, num in zip(shards, rows, strict=True)]
    wholes = [part.new_zeros(size * part.shape[0], *part.shape[1:]) for part in cast]
    everything = torch.zeros(sum(whole.numel() for whole in wholes), dtype=torch.bfloat16)
    return {
        "gathers": lambda: gather_all(wholes, cast),
        "broadcast": lambda: dist.broadcast(everything, src=0),
    }


def padded(shard: Tensor, num_rows: int) -> Tensor:
    whole = shard.new_zeros(num_rows, *shard.shape[1:])
    whole[: shard.shape[0]] = shard
    return whole


def copy_all(targets: list[Tensor], shards: list[Tensor]) -> None:
    for target, shard in zip(targets, shards, strict=True):
        target.copy_(shard)


def gather_all(wholes: list[Tensor], shards: list[Tensor]) -> None:
    for whole, shard in zip(wholes, shards, strict=True):
        dist.all_gather_into_tensor(whole, shard)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
