"""vLLM as the engine: AsyncLLM in this process, token ids in and out.

The files vllm_*.py are all that knows vLLM. Three facts shape them:

- A prefix cache must not outlive its weights, but vLLM refuses to reset it while any request holds
  a block, which under load is always. So every request carries the label of the weights it was
  started with as its cache salt: blocks of other weights never match, whoever still holds them.
- A pause keeps requests in flight with their KV cache. In a pause vLLM resets its prefix cache all
  the same when it may put them back in line: they lose their blocks, and prompt and tokens are
  computed anew when it goes on (weights.kv_in_flight=recompute).
- On CPUs the worker runs inside vLLM's core process: the message queue between the two spins on
  a core and costs half the speed of a small machine (docs/performance.md).
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.types import Completion, FinishReason, Int32Array, Sampling, WeightId
from generators.engine import (
    EngineError,
    RequestError,
    Source,
    StageTimes,
    StagingError,
    SwapTimes,
)
from generators.progress import Progress, slowest, until_staged
from generators.vllm_start import check_version, make_llm, set_environment

SHUTDOWN_S = 2.0
"""vLLM's processes get this long to end by themselves."""


class VllmEngine:
    """See engine.Engine. One object serves one model for its whole life."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._llm: Any = None
        self._serving = WeightId(0, 0)
        self._staged: WeightId | None = None
        self._source: Source | None = None
        """Of `_staged`."""
        self._devices: list[str] = []
        """Of its receivers; they never change, and asking waits for the engine's step."""
        self._open = asyncio.Event()
        self._open.set()

    @property
    def serving(self) -> WeightId:
        return self._serving

    async def start(self) -> None:
        model = self._config.model.path
        if not Path(model).is_dir():
            raise ValueError(f"model.path: there is no directory {model}")
        set_environment(self._config)
        check_version()
        await asyncio.to_thread(self._load)
        await self._llm.update_weight_version(str(self._serving))

    def _load(self) -> None:
        self._llm = make_llm(self._config)  # not returned: a finished future would keep it alive

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

    async def check(self, manifest: str) -> list[str]:
        from generators.expected import check_manifest

        model = self._config.model
        await asyncio.to_thread(check_manifest, manifest, Path(model.path), model.dtype)
        self._devices = self._devices or await self._rpc("receiving_device")
        return self._devices

    async def stage(self, source: Source) -> StageTimes:
        self._staged, self._source = None, source
        times = StageTimes()
        if (where := self._config.weights.staging) != "none":
            await self._rpc("stage", source.model_dump_json(), where, *self._limits())
            times = await until_staged(self._look, source.weights)
        self._staged = source.weights
        return times

    async def swap(self, weights: WeightId) -> SwapTimes:
        if self._staged != weights:
            raise ValueError(f"weights {weights} are not staged (staged: {self._staged})")
        self._open.clear()
        clock = [time.monotonic()]
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        clock.append(time.monotonic())
        try:
            taken = await self._load_paused(weights)
            clock.append(time.monotonic())
            await self._drop_kv()
        except StagingError:
            await self._resume()
            raise
        except Exception as error:
            raise EngineError(f"loading weights {weights} failed half-way: {error}") from error
        self._serving = weights
        clock.append(time.monotonic())
        await self._resume()
        clock.append(time.monotonic())
        pause_s, load_s, reset_s, resume_s = np.diff(clock).tolist()
        taken_s = taken.rendezvous_s + taken.transfer_s + taken.verify_s
        return SwapTimes(pause_s, max(0.0, load_s - taken_s), reset_s, resume_s, taken)

    async def _load_paused(self, weights: WeightId) -> StageTimes:
        """Writes the new weights. Returns what was taken in meanwhile. StagingError: nothing was
        written; any other error: half of them may be."""
        self._staged = None
        if self._config.weights.staging == "none":
            assert self._source is not None
            taken = await self._load_arriving(self._source)
        else:
            await self._rpc("load_staged", str(weights))
            taken = StageTimes()
        await self._llm.update_weight_version(str(weights))
        return taken

    async def _load_arriving(self, source: Source) -> StageTimes:
        answers = await self._rpc("load_arriving", source.model_dump_json(), *self._limits())
        receivers = [json.loads(answer) for answer in answers]
        for receiver in (r for r in receivers if r["error"]):
            if any(other["is_written"] for other in receivers):
                raise EngineError(receiver["error"])
            raise StagingError(receiver["error"], is_lost=receiver["is_lost"])
        return slowest([StageTimes(**receiver["times"]) for receiver in receivers])

    def _limits(self) -> tuple[str, str]:
        weights = self._config.weights
        return str(weights.timeout_s), str(weights.stall_timeout_s)

    async def _drop_kv(self) -> None:
        if self._config.weights.kv_in_flight != "recompute":
            return
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not drop the KV cache of the requests in flight")

    async def _resume(self) -> None:
        await self._llm.engine_core.resume_scheduler_async()
        self._open.set()

    async def _look(self) -> list[Progress]:
        return [Progress.model_validate_json(text) for text in await self._rpc("staging_state")]

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
