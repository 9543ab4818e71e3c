"""The policy: a causal language model that answers with logprobs of given tokens, under FSDP2."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from asyncrl.config import Config
from asyncrl.config.schema import Model
from learner.gather import copy_whole, local_part
from learner.logprobs import token_logprobs
from learner.ranks import Ranks

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """Wraps a Hugging Face model; parameters are float32 masters, sharded over the mesh."""

    def __init__(self, model: Any, ranks: Ranks) -> None:
        super().__init__()
        self.model = model
        self.ranks = ranks
        self.vocabulary: int = model.get_output_embeddings().weight.shape[0]

    def forward(
        self, input_ids: Tensor, positions: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, both float32 [n], of `targets` [n] at `temperatures` [n].

        `input_ids` is [b, w], padded on the right; `positions` [n] are indices into the flattened
        [b * w] outputs, and only those reach the vocabulary.
        """
        output = self.model.base_model(input_ids=input_ids, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)[positions]
        head = self.model.get_output_embeddings()
        return token_logprobs(hidden, head, targets, temperatures, vocabulary=self.vocabulary)

    def masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by Hugging Face name, in one order on all ranks; a tied one appears once."""
        yield from self.model.named_parameters()

    @cached_property
    def _by_name(self) -> dict[str, nn.Parameter]:
        """First read when the policy is whole: to walk a model takes as long as to copy a small
        one."""
        return dict(self.masters())

    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by name, one at a time, cast to `dtype`, on every rank's device.

        A collective: every rank must walk it to its end.
        """
        for name, parameter in self.masters():
            yield name, gather_tensor(parameter.detach().to(dtype))

    def copy_into(self, targets: Mapping[str, Tensor], dtype: torch.dtype) -> float:
        """Copies all parameters, cast to `dtype`, into the lead's contiguous `targets` of the same
        names and shapes, on any device; those of other ranks are not looked at. A collective.
        Returns the seconds of it that the lead spent on the shards of others."""
        ranks = self.ranks
        return copy_whole(self._by_name, targets, dtype=dtype, rank=ranks.rank, size=ranks.size)

    @torch.no_grad()
    def check_finite(self) -> None:
        """RuntimeError that names the first parameter with NaN or infinity in it. A collective.

        Called before a version exists: what it finds is neither committed, published nor saved.
        """
        shards = {name: local_part(parameter) for name, parameter in self._by_name.items()}
        broken = torch.zeros(len(shards), dtype=torch.int32)
        if not math.isfinite(float(nn.utils.get_total_norm(list(shards.values())))):
            broken = torch.tensor([int(not _is_finite(shard)) for shard in shards.values()])
        broken = self.ranks.maximum(broken)
        for name, is_broken in zip(shards, broken.tolist(), strict=True):
            if is_broken:
                raise _not_finite(name)


def load_policy(config: Config, ranks: Ranks) -> Policy:
    """Loads model.path in float32 and shards it. Raises ValueError when it cannot be trained."""
    model = _load_model(config.model, ranks.device)
    _refuse_logit_transforms(model.config, config.model.path)
    _without_dropout(model)
    model.train()
    if config.learner.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, ranks)
    _shard(policy, DTYPES[config.model.dtype])
    check_tied(policy)
    return policy


def gather_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_finite(name: str, whole: Tensor) -> None:
    """RuntimeError when a tensor has NaN or infinity in it: it must not leave the process."""
    if not _is_finite(whole):
        raise _not_finite(name)


def fill(target: Tensor, whole: Tensor) -> None:
    """Copies this rank's part of `whole`, which every rank has, into the sharded `target`."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            whole = distribute_tensor(
                whole, target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(whole)


def check_tied(policy: Policy) -> None:
    """RuntimeError when embeddings that the model ties have become two parameters."""
    model = policy.model
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if getattr(model.config, "tie_word_embeddings", False) and not tied:
        raise RuntimeError("input and output embeddings are tied in the model, but not any more")


def _is_finite(tensor: Tensor) -> bool:
    """Also as bfloat16, which rounds the largest numbers of float32 to infinity."""
    return bool(torch.isfinite(tensor.to(torch.bfloat16)).all())


def _not_finite(name: str) -> RuntimeError:
    return RuntimeError(f"tensor {name} is not finite: it is neither published nor saved")


def _load_model(config: Model, device: torch.device) -> Any:
    attention = config.attention
    if attention == "auto":
        attention = "sdpa" if device.type == "cuda" else "eager"
    disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model.path={config.path!r} cannot be loaded: {error}") from None
    made_up = sorted(str(name) for name in report["missing_keys"])
    if made_up:
        raise ValueError(
            f"model.path={config.path!r} lacks {len(made_up)} of the model's tensors, as "
            f"{made_up[0]}: they would be random numbers"
        )
    return model


def _refuse_logit_transforms(config: Any, path: str) -> None:
    for name in _LOGIT_TRANSFORMS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model.path={path!r} changes its logits after the head ({name}="
                f"{getattr(config, name)}), which the learner does not compute: use another model"
            )


def _without_dropout(model: nn.Module) -> None:
    """Dropout would make the learner's logprobs differ from the generator's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def _shard(policy: Policy, dtype: torch.dtype) -> None:
    """Each decoder layer is a unit of its own; the root holds embeddings, final norm and head, so
    that tied embeddings are in one unit."""
    options: dict[str, Any] = {
        "mesh": policy.ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    layer_names = set(policy.model._no_split_modules or ())
    for module in list(policy.model.modules()):
        if type(module).__name__ in layer_names:
            fully_shard(module, **options)
    fully_shard(policy, **options)
