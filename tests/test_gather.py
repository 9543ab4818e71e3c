"""Whole parameters out of shards: every element once, at its place, in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import save_model
from learner_snapshot import BUCKET_BYTES
from transformers import LlamaConfig, LlamaForCausalLM

from learner.gather import cut

TESTS = Path(__file__).parent


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30))
def test_every_element_of_every_shard_is_in_one_bucket_and_buckets_are_full(
    lengths: list[int], bucket: int
) -> None:
    named = {f"tensor {number}": length for number, length in enumerate(lengths)}
    buckets = list(cut(named, bucket))
    elements = [
        (piece.name, piece.first + i)
        for pieces in buckets
        for piece in pieces
        for i in range(piece.count)
    ]
    assert elements == [(name, i) for name, length in named.items() for i in range(length)]
    for pieces in buckets:
        places = [piece.offset + i for piece in pieces for i in range(piece.count)]
        assert places == list(range(len(places)))
    assert all(sum(piece.count for piece in pieces) == bucket for pieces in buckets[:-1])


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_snapshot_is_what_all_gathers_bring_and_takes_no_more_memory_than_itself_and_two_buckets(
    tmp_path: Path, num_ranks: int
) -> None:
    """Two snapshots. The large model's embedding, of uneven shards, is over two buckets long."""
    models = [save_large_model(tmp_path / "large")]
    models += [save_model(tmp_path / f"tied {tied}", tied=tied) for tied in (True, False)]
    out = tmp_path / "found.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc-per-node={num_ranks}", str(TESTS / "learner_snapshot.py")]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    done = subprocess.run(
        [*command, str(out), *map(str, models)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert [found[str(model)]["differ"] for model in models] == [[], [], []]
    large = found[str(models[0])]
    assert large["snapshot_bytes"] > 5 * BUCKET_BYTES
    assert large["extra_bytes"] <= 2 * large["snapshot_bytes"] + 2 * BUCKET_BYTES


def save_large_model(directory: Path) -> Path:
    """Twice 20001 x 256 numbers."""
    config = LlamaConfig(
        vocab_size=20001,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
