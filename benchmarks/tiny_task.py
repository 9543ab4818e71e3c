"""A real task that takes seconds: a tiny Qwen3 that learns to spell words backward.

    python benchmarks/tiny_task.py DIR

writes DIR/model (790k parameters, trained from scratch by supervision until it spells about a
third of unseen words right at temperature 1), DIR/train.jsonl and DIR/val.jsonl. Prompts are words
of 3 to 6 letters from reasoning-gym's spell_backward, as `__leaf>`, and answers are `fael`; no word
of val.jsonl stands in train.jsonl. Tests, sweeps and configs/tiny.yaml use it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, END, MARK, FILL = "<pad>", "<end>", ">", "_"
LONGEST = 6
NUM_VAL_WORDS = 256
BATCH, LEARNING_RATE, MAX_STEPS, CHECK_EVERY = 128, 2e-3, 400, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accuracy", type=float, default=0.3, help="stop supervision here")
    parser.add_argument("--tied", action="store_true", help="tie input and output embeddings")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    train, val = split_words(arguments.seed)
    for name, words in (("train", train), ("val", val)):
        lines = [json.dumps(row(word)) + "\n" for word in words]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    tokenizer = make_tokenizer()
    model = warm_up(tokenizer, train, val, arguments)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def row(word: str) -> dict[str, object]:
    """One data row with verl's columns."""
    return {
        "prompt": prompt(word),
        "data_source": "spell_backward",
        "reward_model": {"ground_truth": word[::-1]},
    }


def prompt(word: str) -> str:
    return word.rjust(LONGEST, FILL) + MARK


def split_words(seed: int) -> tuple[list[str], list[str]]:
    """(training words, validation words): distinct, 3 to 6 lower-case letters, shuffled."""
    data = reasoning_gym.create_dataset(
        "spell_backward", min_word_len=3, max_word_len=LONGEST, size=30_000, seed=1
    )
    found = {entry["metadata"]["word"].lower() for entry in data}
    words = sorted(w for w in found if 3 <= len(w) <= LONGEST and set(w) <= set(LETTERS))
    random.Random(seed).shuffle(words)
    return words[NUM_VAL_WORDS:], words[:NUM_VAL_WORDS]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, MARK, FILL, *LETTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=FILL))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token=FILL
    )


def make_model(tokenizer: PreTrainedTokenizerFast, *, seed: int, tied: bool) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    tokenizer: PreTrainedTokenizerFast,
    train: list[str],
    val: list[str],
    arguments: argparse.Namespace,
) -> Qwen3ForCausalLM:
    """Supervised training until `--accuracy` on unseen words at temperature 1."""
    model = make_model(tokenizer, seed=arguments.seed, tied=arguments.tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    random_words = random.Random(arguments.seed)
    for step in range(1, MAX_STEPS + 1):
        words = random_words.choices(train, k=BATCH)
        ids, labels = example_tensors(tokenizer, words)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, tokenizer, val)
            print(f"step {step}: {accuracy:.3f} of unseen words right at temperature 1", flush=True)
            if accuracy >= arguments.accuracy:
                return model
    raise SystemExit(f"no accuracy of {arguments.accuracy} within {MAX_STEPS} steps")


def example_tensors(
    tokenizer: PreTrainedTokenizerFast, words: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels), each [batch, time]; prompt and padding carry the label -100."""
    texts = [
        [*tokenizer.encode(prompt(word) + word[::-1]), tokenizer.eos_token_id] for word in words
    ]
    width = max(map(len, texts))
    ids = torch.full((len(words), width), tokenizer.pad_token_id)
    labels = torch.full((len(words), width), -100)
    for i, text in enumerate(texts):
        ids[i, : len(text)] = torch.tensor(text)
        labels[i, LONGEST + 1 : len(text)] = torch.tensor(text[LONGEST + 1 :])
    return ids, labels


@torch.no_grad()
def sampled_accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str]
) -> float:
    ids = torch.tensor([tokenizer.encode(prompt(word)) for word in words])
    output = model.generate(ids, do_sample=True, max_new_tokens=LONGEST + 1, top_k=0)
    answers = tokenizer.batch_decode(output[:, LONGEST + 1 :], skip_special_tokens=True)
    return sum(a == w[::-1] for a, w in zip(answers, words, strict=True)) / len(words)


if __name__ == "__main__":
    main()
