"""The policy as a plain Hugging Face directory, which transformers and vLLM load as it is."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from asyncrl.config.schema import Model
from asyncrl.disk import gone_on_failure
from learner.policy import DTYPES, Policy

log = logging.getLogger(__name__)

_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def export_policy(directory: Path, policy: Policy, config: Model, *, is_lead: bool) -> None:
    """Writes weights (in model.dtype, as the generators serve them), config.json and the tokenizer.

    A collective of all ranks. `directory` is replaced as a whole if it exists.
    """
    dtype = DTYPES[config.dtype]
    tensors: dict[str, Tensor] = {}
    for name, tensor in policy.gather(dtype):
        if is_lead:
            tensors[name] = tensor.cpu().contiguous()
    if not is_lead:
        return
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with gone_on_failure(temporary):
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        model_config = copy.deepcopy(policy.model.config)
        model_config.dtype = config.dtype
        model_config.save_pretrained(temporary)
        _copy_companions(config.path, temporary)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)


def _copy_companions(source: str, directory: Path) -> None:
    """Tokenizer and generation settings, as they are in the model that the run began with."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
        return
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, directory / file.name)
