"""`python -m torch.distributed.run ... learner_snapshot.py OUT MODEL...`: of each model, what two
snapshots cost rank 0 in memory, and the tensors that are not what all-gathers bring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from learner_cases import make_config

import learner.gather
from learner.policy import load_policy
from learner.ranks import Ranks, start_ranks
from learner.snapshots import Snapshot

BUCKET_BYTES = 4 << 20


def main(out: Path, models: list[Path]) -> None:
    learner.gather.BUCKET_BYTES = BUCKET_BYTES
    ranks = start_ranks()
    ranks.maximum(torch.zeros(1))  # what gloo needs for itself is there
    found = {str(model): take_two_snapshots(model, ranks) for model in models}
    if ranks.is_lead:
        out.write_text(json.dumps(found))


def take_two_snapshots(model: Path, ranks: Ranks) -> dict[str, Any]:
    policy = load_policy(make_config(model), ranks)
    snapshots = [Snapshot(), Snapshot()]
    before = _kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident from here on
    for snapshot in snapshots:
        if ranks.is_lead:
            snapshot.allocate(policy, torch.bfloat16)
        policy.copy_into(snapshot.tensors, torch.bfloat16)
    extra = _kilobytes("VmHWM") - before
    whole = {name: tensor.clone() for name, tensor in policy.gather(torch.bfloat16)}
    if not ranks.is_lead:
        return {}
    last = snapshots[1]
    assert last.flat is not None
    differ = [name for name, tensor in whole.items() if not torch.equal(tensor, last.tensors[name])]
    return {"extra_bytes": 1024 * extra, "snapshot_bytes": len(last.flat), "differ": differ}


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(model) for model in sys.argv[2:]])
