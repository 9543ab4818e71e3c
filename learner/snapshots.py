"""Copies of the policy in host memory, to be published: two, used in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.manifest import Layout, dtype_name
from asyncrl.types import WeightId
from learner.policy import Policy


@dataclass(slots=True)
class Snapshot:
    """One version in wire dtype, in one flat buffer; pinned where the policy is on a GPU."""

    weights: WeightId | None = None
    flat: Tensor | None = None
    """uint8, [number of bytes]; allocated at the first snapshot."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Views of `flat`, in its order."""

    def allocate(self, policy: Policy, dtype: torch.dtype) -> None:
        """Room for this policy's weights, once; every page of it is touched."""
        if self.flat is not None:
            return
        name_of_dtype = dtype_name(torch.empty(0, dtype=dtype))
        layout = Layout.of(
            (name, (name_of_dtype, tuple(parameter.shape))) for name, parameter in policy.masters()
        )
        is_cuda = policy.ranks.device.type == "cuda"
        self.flat = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=is_cuda).fill_(0)
        self.tensors = layout.tensors(self.flat)
