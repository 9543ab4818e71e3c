"""An engine that makes up its tokens: for tests of the protocol, load and simulation."""

from __future__ import annotations

import asyncio
import hashlib
import time

import numpy as np

from asyncrl.config.schema import ScriptedOptions
from asyncrl.types import Completion, Int32Array, Sampling, WeightId
from generators.engine import RequestError, SwapTimes


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
    """Serves `scripted_completion` at a stated speed. Weights are adopted by name, never read."""

    def __init__(self, options: ScriptedOptions, *, vocab_size: int) -> None:
        self._options = options
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

    async def stage(self, weights: WeightId, location: str) -> None:
        self._staged = weights

    async def swap(self, weights: WeightId) -> SwapTimes:
        if self._staged != weights:
            raise ValueError(f"weights {weights} are not staged (staged: {self._staged})")
        self._serving, self._staged = weights, None
        return SwapTimes(0.0, 0.0, 0.0)

    async def close(self) -> None:
        """Nothing to end."""
