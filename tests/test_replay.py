"""A recorded run trained once more, from its journal alone."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from learner_cases import save_model
from recorded_runs import (
    STEPS,
    delete_batches,
    launch_replay,
    make_recorded_run,
    recorded_config,
    same_state,
    write_journal,
)

from asyncrl.clock import PhaseClock
from asyncrl.config.load import load_recorded, load_resolved, save_resolved
from asyncrl.journal.recorded import RecordedRun
from asyncrl.launch.replay import become_replay, find_start
from asyncrl.launch.status import show_status
from asyncrl.run_dir import RunDir
from learner.__main__ import replay_sides
from learner.loop import Learner
from learner.ranks import start_ranks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only read."""
    return make_recorded_run(tmp_path_factory.mktemp("recorded"), untrained=1)


@pytest.fixture
def journal_only(tmp_path: Path) -> Path:
    """A run with a journal of 5 trained steps, and no checkpoint. Costs no training."""
    config = recorded_config(tmp_path)
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    run_dir.make_run_id()
    save_resolved(config, run_dir.config)
    write_journal(run_dir.path, config, num_assigned=STEPS, digests={})
    return run_dir.path


def replay(recorded: Path, directory: Path, *overrides: str) -> Learner:
    """A learner that has replayed, in this process."""
    config = load_recorded(recorded / "config.yaml", overrides)
    directory.mkdir(exist_ok=True)
    run_dir, ranks = RunDir(directory), start_ranks()
    line, outlet = replay_sides(recorded, config, run_dir, ranks)
    clock = PhaseClock("start")
    learner = Learner(config, run_dir, line=line, outlet=outlet, ranks=ranks, clock=clock)
    learner.take_over()
    learner.run()
    return learner


def records(directory: Path, name: str) -> list[Any]:
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in lines if name in record]


def test_a_replay_reaches_the_parameters_of_the_recorded_run_bit_for_bit(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        replay(recorded, tmp_path / "again")
    assert all(same_state(recorded, tmp_path / "again", version) for version in (2, 4, 5))
    final = Path("final") / "model.safetensors"
    assert (recorded / final).read_bytes() == (tmp_path / "again" / final).read_bytes()
    assert "5 of 5 published versions (1 to 5) have the digest of the recorded run" in caplog.text
    assert "fork" not in caplog.text
    assert records(tmp_path / "again", "replay/same_digest") == [1.0] * STEPS
    assert records(tmp_path / "again", "buffer/reward_mean") == [0.5] * STEPS
    losses = [records(directory, "train/loss") for directory in (recorded, tmp_path / "again")]
    assert losses[0] == losses[1]


def test_a_replay_with_another_learning_rate_says_where_it_parts(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        replay(recorded, tmp_path / "again", "learner.optim.lr=1e-4")
    forks = [record.message for record in caplog.records if "fork" in record.message]
    assert len(forks) == 1
    assert forks[0].startswith("fork: version 1 has digest ")
    assert "0 of 5 published versions" in caplog.text
    assert not same_state(recorded, tmp_path / "again", STEPS)


def test_a_replay_goes_on_from_its_own_checkpoint(
    recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        replay(recorded, tmp_path / "again", "max_steps=3")
        assert "3 of 3 published versions (1 to 3)" in caplog.text
        replay(recorded, tmp_path / "again")
    assert "going on from the checkpoint of version 3" in caplog.text
    assert "3 of 3 published versions (3 to 5)" in caplog.text
    assert same_state(recorded, tmp_path / "again", STEPS)
    assert records(tmp_path / "again", "train/num_groups") == [2.0] * STEPS


def spoil(segment: Path) -> None:
    """One byte of the first payload is another."""
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize(
    ("happens", "told"),
    [
        (
            Path.unlink,
            ["the batch of step 3 is not in", "1 of 2 groups are there. Runs with"],
        ),
        (spoil, ["group 0/30 of step 3 cannot be read: ", "segments/000007 is damaged"]),
    ],
)
def test_a_batch_that_is_deleted_or_damaged_meanwhile_fails_the_replay_with_a_checkpoint(
    journal_only: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    happens: Callable[[Path], None],
    told: list[str],
) -> None:
    config = load_recorded(journal_only / "config.yaml")
    run_dir, ranks = RunDir(tmp_path / "again"), start_ranks()
    run_dir.path.mkdir()
    line, outlet = replay_sides(journal_only, config, run_dir, ranks)
    clock = PhaseClock("start")
    learner = Learner(config, run_dir, line=line, outlet=outlet, ranks=ranks, clock=clock)
    learner.take_over()
    happens(journal_only / "segments" / "000007")
    assert learner.run() == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"the run failed at version 3: {told[0]}")
    assert told[1] in last
    assert (run_dir.checkpoints / "version-00000003").is_dir()


def test_without_early_batches_a_replay_begins_at_the_first_checkpoint_that_has_all_later_ones(
    journal_only: Path,
) -> None:
    run = RecordedRun(journal_only)
    assert find_start(run, last=None).version == 0
    for version in (2, 4, 5):
        checkpoint = journal_only / "checkpoints" / f"version-{version:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "complete.json").write_text('{"model.safetensors": {"bytes": 0}}')
        (checkpoint / "model.safetensors").touch()
    delete_batches(journal_only, before=2)
    assert run.missing_steps(before=STEPS) == [0, 1]
    start = find_start(run, last=None)
    assert (start.version, start.checkpoint) == (2, run.checkpoints()[2])
    (run.checkpoints()[2] / "model.safetensors").unlink()
    assert find_start(run, last=None).version == 4
    (run.checkpoints()[2] / "model.safetensors").touch()
    (journal_only / "segments" / "000006").unlink()  # one group of step 2
    assert find_start(run, last=None).version == 4


def test_a_run_without_a_beginning_is_refused_with_the_numbers(journal_only: Path) -> None:
    delete_batches(journal_only, before=3)
    with pytest.raises(ValueError, match="of its 5 steps the batches of 3 are deleted") as caught:
        find_start(RecordedRun(journal_only), last=None)
    assert "no whole checkpoint of a version from 3 to 4 to begin from (there are: none)" in str(
        caught.value
    )
    assert "buffer.keep_payloads=always" in str(caught.value)
    for segment in (journal_only / "segments").iterdir():
        segment.unlink()
    with pytest.raises(ValueError, match="batches of 5 are deleted, .* step 4, so none is left"):
        find_start(RecordedRun(journal_only), last=None)


def test_what_cannot_be_replayed_is_refused_before_a_directory_is_made(
    journal_only: Path, tmp_path: Path
) -> None:
    def refused(run: Path, *overrides: str, config: Path | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            become_replay(str(run), config, overrides, ranks=None)
        return str(caught.value)

    assert "neither a run directory" in refused(tmp_path / "nothing")
    assert "journal" not in refused(journal_only, "learner.optim.lr=fast")
    assert "learner.optim.lrr: unknown key" in refused(journal_only, "learner.optim.lrr=1")

    other = save_model(tmp_path / "other")
    (other / "tokenizer.json").write_text('{"another": "one"}')
    message = refused(journal_only, f"model.path={other}")
    assert f"{other} has another tokenizer" in message
    assert str(tmp_path / "model") in message

    garbage = tmp_path / "garbage"
    shutil.copytree(journal_only, garbage)
    (garbage / "journal.sqlite").write_bytes(b"no database" * 1000)
    assert "journal.sqlite cannot be read: file is not a database" in refused(garbage)
    (garbage / "journal.sqlite").unlink()
    assert "there is no journal at" in refused(garbage)

    spoil(journal_only / "segments" / "000007")
    message = refused(journal_only)
    assert message.startswith("group 0/30 of step 3 cannot be read: ")
    assert "segments/000007 is damaged: the " in message
    assert message.endswith("max_steps=3 replays what was trained before it")
    RecordedRun(journal_only).check_batches(since=0, before=3)
    with closing(sqlite3.connect(journal_only / "journal.sqlite")) as database:
        database.execute("UPDATE meta SET value='3' WHERE key='schema'")
        database.commit()
    assert "has schema 3, this program reads" in refused(journal_only)
    assert not list(tmp_path.glob("*-replay"))


def test_a_replay_never_writes_into_another_runs_directory(
    journal_only: Path, tmp_path: Path
) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(ValueError) as caught:
            become_replay(str(journal_only), None, overrides, ranks=None)
        return str(caught.value)

    def files() -> dict[Path, bytes]:
        """Without those that SQLite makes for whoever reads."""
        found = [path for path in journal_only.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in found if "sqlite-" not in path.name}

    before = files()
    assert "is not empty: choose another run_name" in refused("run_name=run")
    message = refused("run_name=run", "checkpoint.resume=auto")
    assert "is that of a run of its own, not of a replay" in message
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    other.make_run_id()
    other.replay_of.write_text('{"path": "runs/elsewhere", "run_id": "0"}')
    with pytest.raises(ValueError, match="other is a replay of a recorded run: no buffer knows"):
        show_status(str(other.path), connect=None, as_json=False, watch_s=None)
    message = refused("run_name=other", "checkpoint.resume=auto")
    assert "is a replay of runs/elsewhere, not of" in message
    assert files() == before


def test_settings_of_a_recorded_run_are_its_own_until_something_is_laid_over_them(
    journal_only: Path,
) -> None:
    file = journal_only / "config.yaml"
    assert load_recorded(file) == load_resolved(file)
    changed = load_recorded(file, ["learner.optim.lr=1e-5", "learner.loss.mask=ppo_clip"])
    assert (changed.learner.optim.lr, changed.learner.loss.mask) == (1e-5, "ppo_clip")
    preset = load_recorded(file, ["algorithm=grpo", "learner.optim.lr=1e-5"])
    assert (preset.learner.advantage.std, preset.learner.optim.lr) == ("group", 1e-5)
    with pytest.raises(ValueError, match="clip_low: does nothing with learner.loss.mask 'dppo_tv'"):
        load_recorded(file, ["learner.loss.clip_low=0.1"])


@pytest.mark.e2e
def test_the_command_begins_at_a_checkpoint_and_says_what_differs(
    recorded: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    delete_batches(run, before=2)
    process = launch_replay(run, f"output_dir={tmp_path}", "local.cpu_threads=1", "seed=7")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"replays steps 2 to 4 of {run}, from {run}/checkpoints/version-00000002" in errors
    assert "changes nothing, the batches are those of the record: seed is 7, it was 0" in errors
    assert "4 of 4 published versions (2 to 5) have the digest of the recorded run" in errors
    assert "5 of the 5 steps" in errors.splitlines()[-1]
    assert same_state(recorded, tmp_path / "run-replay", STEPS)
    assert (tmp_path / "run-replay" / "config.yaml").is_file()
