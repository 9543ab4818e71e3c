"""Prompts as token ids, and whether all of them fit. The tokenizer is loaded when it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.tasks.rows import Rows
from asyncrl.types import Row

_MARKS = 8
"""More tokens than a tokenizer puts around a text by itself (begin, end)."""


class PromptError(Exception):
    """A prompt that cannot be given to the model; the message says why."""


class OverlongPrompt(PromptError):
    """A prompt over data.max_prompt_length, which has `num_tokens`."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {num_tokens} tokens, data.max_prompt_length is {limit}")
        self.num_tokens = num_tokens


class Renderer:
    """From a row to the ids that the model is given."""

    def __init__(self, config: Config) -> None:
        """Loads the tokenizer of config.model, and with it transformers and torch (seconds).

        Raises ValueError when there is none.
        """
        self._data = config.data
        self.tokenizer: Any = _load_tokenizer(config.model.path)

    def render(self, row: Row) -> list[int]:
        """The prompt of `row`: text as it is, messages through the chat template.

        Raises PromptError for a prompt that is empty or refused, OverlongPrompt for one over
        data.max_prompt_length.
        """
        ids = self._ids(row["prompt"])
        if not ids:
            raise PromptError("the prompt is empty")
        if len(ids) > self._data.max_prompt_length:
            raise OverlongPrompt(len(ids), self._data.max_prompt_length)
        return ids

    def _ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        try:
            rendered = self.tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self._data.chat_template_kwargs,
            )
        except Exception as error:  # templates raise errors of jinja's own and whatever they like
            raise PromptError(f"the chat template refuses the prompt: {error}") from error
        return list(rendered["input_ids"])


def check_prompts(config: Config, rows: Rows) -> int:
    """Renders all prompts of a run; returns how many are over data.max_prompt_length.

    Texts so short that they must fit are passed over: where all are, no tokenizer is loaded.
    Raises ValueError for too long ones unless data.overlong_prompts is drop, for training rows
    that are all too long, and for a prompt that the chat template refuses.
    """
    renderer: Renderer | None = None
    num_overlong = 0
    for name, part in (("data.train_files", rows.train), ("data.val_files", rows.val)):
        doubtful = [(i, row) for i, row in enumerate(part, 1) if not _must_fit(config, row)]
        if not doubtful:
            continue
        renderer = renderer or Renderer(config)
        found = list(_overlong(renderer, doubtful, name))
        if found and config.data.overlong_prompts == "error":
            raise ValueError(_complaint(config, found, name, len(part)))
        if found and len(found) == len(part):
            raise ValueError(
                f"{name}: all {len(part)} prompts are longer than data.max_prompt_length = "
                f"{config.data.max_prompt_length} tokens: raise it"
            )
        num_overlong += len(found)
    return num_overlong


def _must_fit(config: Config, row: Row) -> bool:
    """No token stands for less than a byte of a text. What a chat template adds is not known."""
    prompt = row["prompt"]
    limit = config.data.max_prompt_length
    return isinstance(prompt, str) and len(prompt.encode()) + _MARKS <= limit


def _overlong(
    renderer: Renderer, rows: list[tuple[int, Row]], name: str
) -> Iterator[tuple[int, Row, int]]:
    """(number, row, tokens) of those that are too long."""
    for number, row in rows:
        try:
            renderer.render(row)
        except OverlongPrompt as error:
            yield number, row, error.num_tokens
        except PromptError as error:
            raise ValueError(f"{name}, row {number} (source {row['source']}): {error}") from None


def _complaint(config: Config, found: list[tuple[int, Row, int]], name: str, num_rows: int) -> str:
    number, row, num_tokens = found[0]
    longest = max(tokens for _, _, tokens in found)
    return (
        f"{name}: {len(found)} of {num_rows} prompts are longer than data.max_prompt_length = "
        f"{config.data.max_prompt_length} tokens. The first is row {number} (source "
        f"{row['source']}) with {num_tokens} tokens, the longest has {longest}: raise the limit, "
        "or set data.overlong_prompts to drop"
    )


def _load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path {model}: no tokenizer can be loaded: {error}") from None
