"""Who gets which GPUs or cores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.config import Config
from asyncrl.launch.placement import cpu_environment, place

EIGHT = tuple(str(i) for i in range(8))


def config(**settings: object) -> Config:
    tree = {
        "model": {"path": "model"},
        "data": {"train_files": ["rows.jsonl"]},
        "reward": {"path": "rewards.py:score"},
        **settings,
    }
    return Config.model_validate(tree)


def test_cores_are_shared_out_evenly() -> None:
    placement = place(config(), gpus=(), num_cores=2)
    assert (placement.learner_ranks, placement.num_generators, placement.cpu_threads) == (1, 1, 1)
    assert place(config(local={"generators": 3}), gpus=(), num_cores=16).cpu_threads == 4


def test_there_is_never_less_than_a_thread() -> None:
    assert place(config(local={"generators": 4}), gpus=(), num_cores=2).cpu_threads == 1


def test_half_of_the_gpus_learn_and_the_rest_generate() -> None:
    placement = place(config(), gpus=EIGHT, num_cores=16)
    assert placement.learner_gpus == ("0", "1", "2", "3")
    assert placement.generator_gpus == (("4",), ("5",), ("6",), ("7",))


def test_an_engine_gets_as_many_gpus_as_its_tensor_parallel_size() -> None:
    two_each = config(generator={"vllm": {"tensor_parallel_size": 2}})
    assert place(two_each, gpus=EIGHT, num_cores=16).generator_gpus == (("4", "5"), ("6", "7"))


def test_gpus_keep_the_names_that_were_made_visible() -> None:
    placement = place(config(), gpus=("5", "GPU-ab12"), num_cores=16)
    assert placement.learner_environment() == {"CUDA_VISIBLE_DEVICES": "5"}
    assert placement.generator_environment(0) == {"CUDA_VISIBLE_DEVICES": "GPU-ab12"}


def test_a_single_gpu_is_shared() -> None:
    placement = place(config(), gpus=("0",), num_cores=16)
    assert placement.shares_gpu
    assert placement.learner_gpus == ("0",)
    assert placement.generator_gpus == (("0",),)
    assert not place(config(), gpus=EIGHT, num_cores=16).shares_gpu


def test_more_gpus_than_there_are_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="need 10 GPUs, there are 8"):
        place(config(local={"learner_ranks": 6, "generators": 4}), gpus=EIGHT, num_cores=16)


def test_the_scripted_engine_needs_no_gpu_and_hides_them() -> None:
    placement = place(config(generator={"engine": "scripted"}), gpus=EIGHT, num_cores=16)
    assert placement.learner_environment()["CUDA_VISIBLE_DEVICES"] == ""


def test_only_one_openmp_library_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not openmp.exists():
        pytest.skip("vLLM's CPU build is not installed")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libgomp.so.1:/usr/lib/libtcmalloc.so.4")
    preloaded = cpu_environment(1)["LD_PRELOAD"]
    assert preloaded == f"{openmp}:/usr/lib/libtcmalloc.so.4"
