"""Runs inside vLLM's worker: takes new weights in by a background thread, then loads them.

Every call comes from `collective_rpc` with str arguments and returns str, so nothing but text
crosses between the processes. Contract with vLLM: tests/test_vllm_engine.py.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import vllm.v1.sample.sampler
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from asyncrl.process_groups import GroupError
from generators.engine import GENERATOR_PID, Source
from generators.progress import Progress
from generators.receiver import Limits
from generators.staging import Place, Staging, UnderPause, in_words


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


class StagedWeights:
    """Mixed into vLLM's worker class by `worker_extension_cls`."""

    vllm_config: Any
    model_config: Any
    model_runner: Any
    device: Any
    _staging: Staging | None = None
    _spare: torch.Tensor | None = None
    """Memory of the last staging that was loaded."""

    def receiving_device(self) -> str:
        """Where this worker takes weights in: "cpu", or the UUID of its GPU."""
        if torch.device(self.device).type != "cuda":
            return "cpu"
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def stage(self, source: str, where: str, timeout_s: str, stall_s: str) -> str:
        """Begins to take in the weights of `source` (JSON of engine.Source); an earlier staging is
        dropped. `where`: "host", or "device" for the memory of the engine."""
        earlier, self._staging = self._staging, None
        if earlier is not None and earlier.progress.state == "done":
            self._spare = earlier.flat
        spare, self._spare = self._spare, None
        place = self._place(where, timeout_s, stall_s)
        self._staging = Staging(Source.model_validate_json(source), place, spare=spare)
        return self._staging.label

    def staging_state(self) -> str:
        """JSON of progress.Progress."""
        progress = Progress() if self._staging is None else self._staging.progress
        return progress.model_dump_json()

    def load_staged(self, label: str) -> str:
        """Writes the staged weights over the served ones. The scheduler must be paused.

        Any error leaves the model half-written: the engine must not resume.
        """
        staging = self._staging
        if staging is None or staging.progress.state != "done" or staging.label != label:
            raise RuntimeError(f"weights {label} are not staged: {self.staging_state()}")
        self._load(staging.tensors.items())
        self._staging, self._spare = None, staging.flat
        return label

    def load_arriving(self, source: str, timeout_s: str, stall_s: str) -> str:
        """Writes weights over the served ones as they come. The scheduler must be paused.

        Returns JSON: `times` (engine.StageTimes), `error` (empty: all are loaded), `is_lost` as in
        messages.Staged, `is_written`: with an error, whether the model is half-written and the
        engine must not resume.
        """
        arriving = UnderPause(
            Source.model_validate_json(source), self._place("host", timeout_s, stall_s)
        )
        is_written, error, is_lost = False, "", False
        try:
            with closing(arriving.tensors()) as tensors:
                first = next(tensors)
                is_written = True
                self._load(chain([first], tensors))
        except Exception as why:  # the boundary to another process: reported as text
            error, is_lost = in_words(why), isinstance(why, GroupError)
        return json.dumps(
            {
                "times": asdict(arriving.times),
                "error": error,
                "is_lost": is_lost,
                "is_written": is_written,
            }
        )

    def _place(self, where: str, timeout_s: str, stall_s: str) -> Place:
        device = torch.device(self.device)
        return Place(
            model_dir=Path(self.model_config.model),
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            rank=get_tensor_model_parallel_rank(),
            device=device,
            home=device if where == "device" else torch.device("cpu"),
            limits=Limits(float(timeout_s), float(stall_s)),
        )

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        model = self.model_runner.get_model()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(iter(tensors))
            finalize_layerwise_reload(model, self.model_config)
            _process_tied_heads(model)
        if torch.device(self.device).type == "cuda":
            # Other streams write to staged memory again: what reads it must have ended.
            torch.cuda.synchronize(self.device)
