"""Between text and token ids: prompts are rendered once, responses decoded for the reward only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.tasks.prompts import Renderer
from asyncrl.types import Int32Array, Row

T = TypeVar("T")


class Tokens:
    """The tokenizer, in a thread of its own: long texts do not hold up the event loop."""

    def __init__(self, config: Config) -> None:
        """Loads the tokenizer of config.model. Raises ValueError when there is none."""
        self._renderer = Renderer(config)
        self._tokenizer = self._renderer.tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self.end_ids = _end_ids(config.model.path, self._tokenizer)
        """Ids with which the model itself ends a response, then sampling.stop_token_ids."""
        self.end_ids += tuple(id for id in config.sampling.stop_token_ids if id not in self.end_ids)

    async def render(self, row: Row) -> Int32Array:
        """The prompt of `row` as [P] ids. Raises PromptError, see prompts.Renderer.render."""
        return np.asarray(await self._run(self._renderer.render, row), np.int32)

    async def decode(self, token_ids: Int32Array) -> str:
        """The text of a response, without special tokens."""
        return await self._run(self._decode, token_ids.tolist())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def vocabulary_size(model: str) -> int:
    """Number of token ids of the model, from its config.json."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def _end_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    ids: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        file = Path(model) / name
        if file.is_file():
            found = json.loads(file.read_text()).get("eos_token_id")
            ids += [found] if isinstance(found, int) else list(found or [])
    return tuple(dict.fromkeys(ids))
