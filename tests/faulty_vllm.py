"""Faults planted in vLLM's worker, by the version that meets them (vllm_running.py).

Only for that process: importing the extension changes who hears Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from vllm_running import FAILS_IN_LOAD, RANK_1_FAILS

from asyncrl.types import WeightId
from generators.engine import Source
from generators.vllm_extension import StagedWeights

NUM_WRITTEN = 7
"""Tensors, before a load fails."""


class FaultyWeights(StagedWeights):
    """Takes the place of vllm_start.EXTENSION."""

    _fails = False

    def stage(self, source: str, where: str, timeout_s: str, stall_s: str) -> str:
        wanted = Source.model_validate_json(source)
        place = self._place(where, timeout_s, stall_s)
        if wanted.weights.version == RANK_1_FAILS and place.rank == 1:
            manifest = json.loads(wanted.manifest)
            manifest["tensors"][0]["crc32"] ^= 1
            changed = wanted.model_copy(update={"manifest": json.dumps(manifest)})
            source = changed.model_dump_json()
        return super().stage(source, where, timeout_s, stall_s)

    def load_staged(self, label: str) -> str:
        self._fails = WeightId.parse(label).version == FAILS_IN_LOAD
        return super().load_staged(label)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super()._load(self._some(tensors) if self._fails else tensors)

    def _some(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from islice(tensors, NUM_WRITTEN)
        raise RuntimeError("planted in the load")
