"""Groups as they travel, made in advance: what generators would submit, and the prompts for it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from asyncrl.types import GroupId, Rollout, RolloutGroup, WeightId
from asyncrl.wire import encode_group


class Frames:
    """Encoded groups of `group_size` rollouts with `num_tokens` tokens each."""

    def __init__(self, *, num_tokens: int, group_size: int) -> None:
        self._num_tokens = num_tokens
        self._group_size = group_size
        self._newest: tuple[WeightId, dict[str, Any], memoryview] | None = None

    def of(self, group: list[int], attempt: int, serving: WeightId) -> bytes:
        """The frame of a group; arrays are made once for each version."""
        if self._newest is None or self._newest[0] != serving:
            frame = encode_group(self._group(serving))
            (length,) = struct.unpack_from("<I", frame)
            body = memoryview(frame)[4 + length :]
            self._newest = serving, msgpack.unpackb(frame[4 : 4 + length]), body
        _, fields, body = self._newest
        header = msgpack.packb({**fields, "group": group, "attempt": attempt})
        return b"".join([struct.pack("<I", len(header)), header, body])

    def _group(self, serving: WeightId) -> RolloutGroup:
        size = self._num_tokens
        rollouts = tuple(
            Rollout(
                token_ids=np.arange(size, dtype=np.int32),
                logprobs=np.full(size, -0.5, np.float32),
                versions=np.full(size, serving.version, np.int32),
                loss_mask=np.ones(size, np.bool_),
                finish_reason="stop",
                reward=float(sample % 2),
            )
            for sample in range(self._group_size)
        )
        prompt = np.arange(64, dtype=np.int32)
        return RolloutGroup(GroupId(0, 0), 0, "words", prompt, 1.0, serving.inc, rollouts)


def write_data(path: Path, *, num_rows: int) -> None:
    """Rows that cost nothing to send."""
    row = '{"prompt": "1", "data_source": "words", "reward_model": {"ground_truth": "1"}}\n'
    path.write_text(row * num_rows)
