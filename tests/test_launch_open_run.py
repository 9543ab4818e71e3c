"""Opening a run directory: nothing is overwritten, and a run begins where it is told to."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config import Config
from asyncrl.journal import Journal, open_read_only
from asyncrl.journal.tables import Change
from asyncrl.launch.open_run import as_begun, open_run_dir
from asyncrl.run_dir import RunDir


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory as far as its files go, with tied embeddings that are stored twice."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors.index.json").write_text("{}")
    tensors = {"embed": torch.zeros(4, 2), "lm_head.weight": torch.zeros(4, 2)}
    save_file(tensors, directory / "model-00001.safetensors")
    return directory


def config(tmp_path: Path, resume: str = "never", *, name: str | None = "mine") -> Config:
    return Config.model_validate(
        {
            "run_name": name,
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": str(tmp_path / "model")},
            "data": {"train_files": ["rows.jsonl"]},
            "reward": {"path": "rewards.py:score"},
            "checkpoint": {"resume": resume},
        }
    )


def write_checkpoint(root: Path, version: int, **tensors: torch.Tensor) -> Path:
    """The files that a launcher looks at."""
    directory = root / f"version-{version:08d}"
    directory.mkdir(parents=True)
    weights = directory / "model.safetensors"
    save_file(tensors or {"embed": torch.ones(4, 2)}, weights)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    complete = {weights.name: {"bytes": weights.stat().st_size, "sha256": digest}}
    (directory / "complete.json").write_text(json.dumps(complete))
    return directory


def opened(config: Config) -> tuple[RunDir, Config]:
    with open_run_dir(config, config_name="file") as result:
        return result


def test_a_new_run_gets_a_directory_an_id_and_a_name(tmp_path: Path) -> None:
    run_dir, begun = opened(config(tmp_path, name=None))
    assert run_dir.path.name.startswith("file-")
    assert begun.run_name == run_dir.path.name
    assert len(run_dir.read_run_id() or "") == 16
    assert begun.model.path == str(tmp_path / "model")


def test_a_directory_with_something_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for resume, says in (("never", "checkpoint.resume=auto"), ("auto", "no run's")):
        (tmp_path / "runs" / "mine").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "mine" / "thesis.txt").write_text("precious")
        with pytest.raises(ValueError, match=says):
            opened(config(tmp_path, resume))
        assert [p.name for p in (tmp_path / "runs" / "mine").iterdir()] == ["thesis.txt"]


def test_auto_starts_and_goes_on_under_the_same_id(tmp_path: Path) -> None:
    first, _ = opened(config(tmp_path, "auto"))
    id = first.read_run_id()
    second, _ = opened(config(tmp_path, "auto"))
    assert second.read_run_id() == id


def test_a_directory_of_a_replay_is_not_gone_on_with_as_a_run_nor_a_run_as_a_replay(
    tmp_path: Path,
) -> None:
    run_dir, _ = opened(config(tmp_path, "auto"))
    shutil.rmtree(run_dir.logs)
    run_dir.replay_of.write_text('{"path": "runs/first", "run_id": "0"}')
    for checkpoint in ("auto", str(write_checkpoint(run_dir.checkpoints, 3))):
        with pytest.raises(ValueError, match="is that of a replay of runs/first: choose another"):
            opened(config(tmp_path, checkpoint))
    there = sorted(path.name for path in run_dir.path.iterdir())
    assert there == ["checkpoints", "launcher.lock", "replay_of.json", "run_id"]
    with open_run_dir(config(tmp_path, "auto"), config_name="file", is_replay=True) as (again, _):
        assert again == run_dir
    shutil.rmtree(run_dir.logs)
    run_dir.replay_of.unlink()
    run_dir.config_of("buffer").touch()
    with (
        pytest.raises(ValueError, match="is that of a run of its own, not of a replay"),
        open_run_dir(config(tmp_path, "auto"), config_name="file", is_replay=True),
    ):
        pass
    assert not run_dir.logs.exists()


def test_a_directory_in_use_is_refused_with_the_process_that_uses_it(tmp_path: Path) -> None:
    with (
        open_run_dir(config(tmp_path, "auto"), config_name="file"),
        pytest.raises(ValueError, match=r"mine is in use by process \d+"),
    ):
        opened(config(tmp_path, "auto"))


def test_a_checkpoint_of_another_run_becomes_version_0_of_a_new_one(
    tmp_path: Path, model: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "old" / "checkpoints", 7)
    run_dir, begun = opened(config(tmp_path, str(checkpoint)))
    assert begun.model.path == str(run_dir.start)
    assert begun.checkpoint.resume == str(checkpoint)
    weights = load_file(run_dir.start / "model.safetensors")
    assert torch.equal(weights["embed"], torch.ones(4, 2))
    files = {file.name for file in run_dir.start.iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors", "origin.txt"}


def test_a_run_that_began_from_a_checkpoint_goes_on_with_the_same_version_0(
    tmp_path: Path, model: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path / "old" / "checkpoints", 7)
    run_dir, _ = opened(config(tmp_path, str(checkpoint)))
    _, begun = opened(config(tmp_path, "auto"))
    assert begun.model.path == str(run_dir.start)
    assert begun.checkpoint.resume == str(checkpoint)
    assert as_begun(config(tmp_path), run_dir).model.path == str(run_dir.start)
    with pytest.raises(ValueError, match="begins a new one"):
        opened(config(tmp_path, str(checkpoint)))


def test_going_back_puts_the_newer_checkpoints_aside(tmp_path: Path) -> None:
    run_dir, _ = opened(config(tmp_path, "auto"))
    older, _ = [write_checkpoint(run_dir.checkpoints, version) for version in (2, 4)]
    _, begun = opened(config(tmp_path, str(older)))
    names = sorted(path.name for path in run_dir.checkpoints.iterdir())
    assert names == ["undone-version-00000004", "version-00000002"]
    assert begun.checkpoint.resume == "auto"
    assert not run_dir.start.exists()


def test_going_back_twice_keeps_what_was_put_aside_before(tmp_path: Path) -> None:
    run_dir, _ = opened(config(tmp_path, "auto"))
    older = write_checkpoint(run_dir.checkpoints, 2)
    for _ in range(3):
        write_checkpoint(run_dir.checkpoints, 4)
        opened(config(tmp_path, str(older)))
    aside = ["undone-2-version-00000004", "undone-3-version-00000004", "undone-version-00000004"]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == [*aside, older.name]
    with pytest.raises(ValueError, match="was put aside"):
        opened(config(tmp_path, str(run_dir.checkpoints / aside[0])))
    assert older.is_dir()


@pytest.mark.parametrize(
    ("resume", "says"),
    [("nevr", "did you mean 'never'"), ("no/such/place", "no directory"), (".", "not a whole")],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, resume: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        opened(config(tmp_path, resume))
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_that_lacks_bytes_is_refused(tmp_path: Path, model: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "old", 1)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"damaged: model\.safetensors"):
        opened(config(tmp_path, str(checkpoint)))
    weights.write_bytes(whole[:-1] + b"!")
    with pytest.raises(ValueError, match="is damaged"):
        opened(config(tmp_path, str(checkpoint)))
    assert not (tmp_path / "runs" / "mine" / "start").exists()


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"embed": torch.zeros(4, 2), "layers.9": torch.zeros(1)}, "layers.9"),
        ({"lm_head.weight": torch.zeros(4, 2)}, "embed"),
        ({"embed": torch.zeros(4, 3)}, r"embed is \[4, 3\] there, \[4, 2\] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, model: Path, tensors: dict[str, torch.Tensor], says: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "old", 1, **tensors)
    with pytest.raises(ValueError, match=says):
        opened(config(tmp_path, str(checkpoint)))


@pytest.mark.parametrize(
    ("output_dir", "name", "message"),
    [
        ("d/" * 400, "mine", "has .* bytes, 480 are the most.*: set output_dir"),
        ("d" * 256, "mine", "256 in one name, 255 are the most: set output_dir"),
        ("d", "n" * 201, "run_name: n* has 201 bytes, 200 are the most"),
        ("d", None, "run_name: n*-.* has 256 bytes, 200 are the most"),
    ],
)
def test_names_that_are_too_long_are_refused_before_anything_is_made(
    tmp_path: Path, output_dir: str, name: str | None, message: str
) -> None:
    long = config(tmp_path, name=name).model_copy(
        update={"output_dir": str(tmp_path / "runs" / output_dir)}
    )
    with pytest.raises(ValueError, match=message), open_run_dir(long, config_name="n" * 240):
        pass
    assert not (tmp_path / "runs").exists()


def test_the_longest_names_that_are_allowed_have_room_for_a_journal(tmp_path: Path) -> None:
    parent = tmp_path / "runs"
    while len(str(parent)) < 480 - 201 - 60:
        parent /= "d" * 50
    parent /= "d" * (480 - 202 - len(str(parent)))
    longest = config(tmp_path, name="n" * 200).model_copy(update={"output_dir": str(parent)})
    run_dir, _ = opened(longest)
    assert len(str(run_dir.path)) == 480
    journal = Journal(run_dir.path)
    journal.write(Change(meta={"inc": "1"})).result()
    journal.close()
    assert open_read_only(run_dir.path).execute("SELECT COUNT(*) FROM meta").fetchone() > (0,)
