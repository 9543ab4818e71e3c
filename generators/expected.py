"""What a version of the weights must consist of to fit the model that an engine has loaded."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from asyncrl.manifest import Manifest, TensorSpec, check_names
from generators.engine import StagingError


def expected_tensors(model_dir: Path, dtype: str) -> dict[str, TensorSpec]:
    """The tensors that a version of the model in `model_dir` consists of.

    Read from the headers of its safetensors files. `lm_head.weight` is left out when it is tied
    to the embedding, and so are rotary tables, which old checkpoints hold. Raises ValueError when
    there is no safetensors file.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model_dir} holds no .safetensors file: save the model in that format")
    tied = json.loads((model_dir / "config.json").read_text()).get("tie_word_embeddings", False)
    expected: dict[str, TensorSpec] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                if (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq"):
                    continue
                expected[name] = (dtype, tuple(opened.get_slice(name).get_shape()))
    return expected


def check_manifest(manifest: str, model_dir: Path, dtype: str) -> None:
    """Raises StagingError that names the first tensor in which the version of `manifest` (JSON)
    differs from the model in `model_dir`, loaded as `dtype`."""
    try:
        version = Manifest.parse(manifest.encode())
        where = f"the manifest of weights {version.weights}"
        check_names(version.entries(), expected_tensors(model_dir, dtype), where=where)
    except ValueError as error:  # WeightsError is one; another: the model has no such files
        raise StagingError(str(error)) from None
