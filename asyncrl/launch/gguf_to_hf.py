"""A GGUF file to a Hugging Face directory: `python -m asyncrl.launch.gguf_to_hf FILE DIRECTORY`.

A process of its own, so that its caller needs no torch and the memory is free again afterwards.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(gguf: Path, directory: Path) -> None:
    """Writes model and tokenizer in bfloat16, chat template included."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain bfloat16 now. Left set, these make the saved model claim otherwise.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model, "quantization_method"):
        model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
