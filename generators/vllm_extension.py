"""Runs inside vLLM's worker: stages new weights in a background thread, then loads them.

Every call comes from `collective_rpc` with str arguments and returns str, so nothing but text
crosses between the processes. Contract with vLLM: tests/test_vllm_engine.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import vllm.v1.sample.sampler
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from asyncrl.manifest import TensorSpec
from asyncrl.weights_dir import read_version
from generators.engine import GENERATOR_PID


def _end_with_generator() -> None:
    """Ends this process when the generator has died without ending it (SIGKILL).

    vLLM's core process would live on and keep its memory. Raises ProcessLookupError when the
    generator is dead already.
    """
    generator = os.pidfd_open(int(os.environ[GENERATOR_PID]))

    def watch() -> None:
        select.select([generator], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-generator", daemon=True).start()


def _leave_ctrl_c_to_generator() -> None:
    """A terminal sends Ctrl-C to the generator and to this process: the generator says goodbye and
    ends this one, which would otherwise end first and be taken for a crash."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if GENERATOR_PID in os.environ:
    _end_with_generator()
    _leave_ctrl_c_to_generator()


def _no_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(logprobs), dtype=torch.int64, device=logprobs.device)


# With each logprob vLLM counts its token's rank in the vocabulary, by a function that is compiled
# at the first request: ten seconds, and a C++ compiler, for a number that nothing here reads.
vllm.v1.sample.sampler.batched_count_greater_than = _no_ranks


def _process_tied_heads(model: torch.nn.Module) -> None:
    """Repeats for the output head what vLLM's reload does for one owner of a shared weight only.

    On CPUs the head multiplies by a packed copy of its own: tied to the embedding, it would go on
    with the old weights. Elsewhere this does nothing.
    """
    embeddings = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    for module in embeddings:
        tied = any(module.weight is other.weight for other in embeddings if other is not module)
        if tied and isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


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


@dataclass(slots=True)
class _Staging:
    """One transfer: written by its own thread until `state` is final."""

    label: str
    location: str
    state: str = "running"
    error: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, model_dir: Path, dtype: str) -> None:
        try:
            expected = expected_tensors(model_dir, dtype)
            staged = read_version(Path(self.location), expected=expected)
            if str(staged.weights) != self.label:
                raise ValueError(f"{self.location} holds {staged.weights}, not {self.label}")
        except Exception as error:  # the boundary to the other process: reported as text
            self.error, self.state = f"{type(error).__name__}: {error}", "failed"
            return
        self.tensors, self.state = staged.tensors, "done"


class StagedWeights:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    _staging: _Staging | None = None

    def stage(self, label: str, location: str) -> str:
        """Begins to stage the weights `label` from `location`; an earlier staging is dropped."""
        self._staging = _Staging(label, location)
        model_dir = Path(self.model_config.model)
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        threading.Thread(
            target=self._staging.run, args=(model_dir, dtype), name="stage-weights", daemon=True
        ).start()
        return label

    def staging_state(self) -> str:
        """JSON: state (idle, running, done, failed), label, error."""
        staging = self._staging or _Staging("", "", state="idle")
        return json.dumps({"state": staging.state, "label": staging.label, "error": staging.error})

    def load_staged(self, label: str) -> str:
        """Writes the staged weights over the served ones. The scheduler must be paused.

        Any error leaves the model half-written: the engine must not resume.
        """
        staging = self._staging
        if staging is None or staging.state != "done" or staging.label != label:
            raise RuntimeError(f"weights {label} are not staged: {self.staging_state()}")
        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(staging.tensors.items()))
            finalize_layerwise_reload(model, self.model_config)
            _process_tied_heads(model)
        self._staging = None
        return label
