"""Fixtures: the tiny task of benchmarks/tiny_task.py, with a random and with a trained model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import REPOSITORY

SCRIPT = REPOSITORY / "benchmarks" / "tiny_task.py"
WORDS = ["cat", "house", "apple", "stone", "river", "cloud", "grass", "light", "mouse", "train"]


@pytest.fixture(scope="session")
def random_tiny_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ (random weights, 42 characters) and train.jsonl of 60 prompts."""
    from tiny_task import make_model, make_tokenizer, row

    directory = tmp_path_factory.mktemp("random_tiny")
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0, tied=True).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    words = [word[i:] + word[:i] for i in range(6) for word in WORDS]
    (directory / "train.jsonl").write_text("".join(json.dumps(row(w)) + "\n" for w in words))
    return directory


@pytest.fixture(scope="session")
def tiny_task(request: pytest.FixtureRequest) -> Path:
    """model/ that spells about a third of unseen words backward, train.jsonl and val.jsonl.

    Made once (15 s of both cores) and kept in pytest's cache until the script changes.
    """
    cache: Path = request.config.cache.mkdir("tiny_task")  # type: ignore[union-attr]
    directory = cache / hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]
    if not (directory / "model").exists():
        work = directory.with_suffix(".tmp")
        shutil.rmtree(work, ignore_errors=True)
        subprocess.run([sys.executable, str(SCRIPT), str(work)], check=True, env=os.environ)
        work.rename(directory)
    return directory
