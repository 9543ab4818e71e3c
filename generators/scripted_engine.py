"""An engine that makes up its tokens: for tests of the protocol, load and simulation."""

from __future__ import annotations

import asyncio
import hashlib

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
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
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


class ScriptedEngine:
    """Serves `scripted_completion` at a stated speed. Weights are adopted by name, never read."""

    def __init__(self, options: ScriptedOptions, *, vocab_size: int) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._serving = WeightId(0, 0)
        self._staged: WeightId | None = None

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
        await asyncio.sleep(len(completion.token_ids) / self._options.tokens_per_s)
        return completion

    async def stage(self, weights: WeightId, location: str) -> None:
        self._staged = weights

    async def swap(self, weights: WeightId) -> SwapTimes:
        if self._staged != weights:
            raise ValueError(f"weights {weights} are not staged (staged: {self._staged})")
        self._serving, self._staged = weights, None
        return SwapTimes(0.0, 0.0, 0.0)

    async def close(self) -> None:
        """Nothing to end."""
