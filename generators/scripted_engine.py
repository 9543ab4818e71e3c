"""An engine that makes up its tokens: for tests of the protocol, load and simulation."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.schema import Model, ScriptedOptions, WeightsSection
from asyncrl.types import Completion, Int32Array, Sampling, WeightId
from generators.engine import RequestError, Source, StageTimes, SwapTimes
from generators.progress import Progress, until_staged

if TYPE_CHECKING:  # torch takes seconds to import, and is only needed where weights are received
    from generators.staging import Staging


def scripted_completion(
    *, seed: int, version: int, options: ScriptedOptions, sampling: Sampling, vocab_size: int
) -> Completion:
    """The response to any prompt: a pure function of its arguments.

    Lengths are uniform from 1 to `options.length`, cut at `sampling.max_tokens` (finish reason
    `length`); a response that is not cut ends with the first stop token. Mode by_version hashes
    seed and version, mode fixed the seed alone; `versions` is `version` in both.
    """
    name = f"{seed}|{version}" if options.mode == "by_version" else f"{seed}"
    random = np.random.Generator(np.random.PCG64(_hash(name)))
    wanted = int(random.integers(1, options.length + 1))
    length = min(wanted, sampling.max_tokens)
    token_ids = random.integers(0, vocab_size, size=length).astype(np.int32)
    logprobs = np.log1p(-random.random(length) * 0.99).astype(np.float32)
    if wanted <= sampling.max_tokens and sampling.stop_token_ids:
        token_ids[-1] = sampling.stop_token_ids[0]
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        versions=np.full(length, version, np.int32),
        finish_reason="stop" if wanted <= sampling.max_tokens else "length",
    )


def slowness(seed: int, options: ScriptedOptions) -> float:
    """How many times as long as others the response with this seed takes: 1, or
    `options.slow_factor` for a share of `options.slow_share` of all seeds."""
    is_slow = _hash(f"slow|{seed}") < options.slow_share * 2**128
    return options.slow_factor if is_slow else 1.0


def _hash(name: str) -> int:
    """Uniform below 2^128."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "little")


class ScriptedEngine:
    """Serves `scripted_completion` at a stated speed.

    Weights in a directory are adopted by name and never read. Those of a broadcast are received,
    verified and checked against the model's files like vLLM's, and then dropped.
    """

    def __init__(
        self,
        options: ScriptedOptions,
        *,
        vocab_size: int,
        model: Model | None = None,
        weights: WeightsSection | None = None,
    ) -> None:
        """`model` and `weights` say what a broadcast must bring, and how long it may take."""
        self._options = options
        self._model = model
        self._weights = weights or WeightsSection()
        self._staging: Staging | None = None
        self._vocab_size = vocab_size
        self._serving = WeightId(0, 0)
        self._staged: WeightId | None = None
        self._in_flight: dict[str, tuple[float, float]] = {}
        """By request: when it began, and its tokens per second."""

    @property
    def serving(self) -> WeightId:
        return self._serving

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: Sampling, *, seed: int, request_id: str
    ) -> Completion:
        if len(prompt_ids) == 0:
            raise RequestError(f"request {request_id} has an empty prompt")
        completion = scripted_completion(
            seed=seed,
            version=self._serving.version,
            options=self._options,
            sampling=sampling,
            vocab_size=self._vocab_size,
        )
        tokens_per_s = self._options.tokens_per_s / slowness(seed, self._options)
        self._in_flight[request_id] = (time.monotonic(), tokens_per_s)
        try:
            await asyncio.sleep(len(completion.token_ids) / tokens_per_s)
        finally:
            del self._in_flight[request_id]
        return completion

    def num_sampled(self, request_id: str) -> int:
        began, tokens_per_s = self._in_flight.get(request_id, (0.0, 0.0))
        return int((time.monotonic() - began) * tokens_per_s)

    async def check(self, manifest: str) -> list[str]:
        from generators.expected import check_manifest

        assert self._model is not None
        await asyncio.to_thread(check_manifest, manifest, Path(self._model.path), self._model.dtype)
        return ["cpu"]

    async def stage(self, source: Source) -> StageTimes:
        self._staged = self._staging = None
        times = StageTimes()
        if source.seat is not None:
            self._staging = self._receive(source)
            times = await until_staged(self._look, source.weights)
        self._staged = source.weights
        return times

    async def swap(self, weights: WeightId) -> SwapTimes:
        if self._staged != weights:
            raise ValueError(f"weights {weights} are not staged (staged: {self._staged})")
        self._serving, self._staged, self._staging = weights, None, None
        return SwapTimes()

    async def close(self) -> None:
        """Nothing to end."""

    def _receive(self, source: Source) -> Staging:
        import torch

        from generators.receiver import Limits
        from generators.staging import Place, Staging

        assert self._model is not None
        host, weights = torch.device("cpu"), self._weights
        place = Place(
            model_dir=Path(self._model.path),
            dtype=self._model.dtype,
            rank=0,
            device=host,
            home=host,
            limits=Limits(weights.timeout_s, weights.stall_timeout_s),
        )
        return Staging(source, place)

    async def _look(self) -> list[Progress]:
        return [Progress() if self._staging is None else self._staging.progress]
