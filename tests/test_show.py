"""`asyncrl-launch show`: which prompts it prints, and what it says of each."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from run_records import STALENESS, write_run

from asyncrl.journal.tables import SCHEMA
from asyncrl.launch.show import Filter, group_lines, select, show_rollouts, visible
from asyncrl.report.export import export_run
from asyncrl.report.reading import read_run
from asyncrl.report.rollouts import show, text_decoder, version_spans


@pytest.fixture
def known(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_run(tmp_path, model=random_tiny_task / "model")


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`asyncrl-launch show ...` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "asyncrl.launch", "show", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def numbers(run: Path, wanted: Filter) -> list[int]:
    return [row.number for row in select(read_run(run), wanted)]


def test_without_a_filter_it_is_the_newest_step(known: Path) -> None:
    assert numbers(known, Filter()) == [10, 11]


def test_filters_hold_together(known: Path) -> None:
    assert numbers(known, Filter(step=2)) == [4, 5]
    assert numbers(known, Filter(step=2, prompt="0/5")) == [5]
    assert numbers(known, Filter(fate="filtered")) == [12, 14]
    with pytest.raises(ValueError, match="no prompt fits --step 2 --fate filtered"):
        numbers(known, Filter(step=2, fate="filtered"))


def test_prompts_without_a_step_are_shown_where_no_step_was_assigned(known: Path) -> None:
    with closing(sqlite3.connect(known / "journal.sqlite", isolation_level=None)) as database:
        database.execute("DELETE FROM groups WHERE step IS NOT NULL")
    assert numbers(known, Filter()) == [12, 13, 14]


def test_a_group_is_told_in_full(known: Path) -> None:
    run = read_run(known)
    [row] = select(run, Filter(prompt="0/3"))
    group = show(run, row, text_decoder(run))
    assert (group.fate, group.step, group.staleness) == ("trained", 1, STALENESS[1])
    assert (group.generator, group.attempt) == ("generator-0-aaaa", 0)
    first, second = group.rollouts
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert first.versions == {0: 6}
    assert second.versions == {0: 5, 1: 1}
    assert version_spans(second.versions) == "v0 x5, v1 x1"
    assert (second.finish_reason, second.reward_parts) == ("stop", {"format": 0.5})


def test_text_comes_from_the_tokenizer_of_the_run_and_ids_without_it(known: Path) -> None:
    from transformers import AutoTokenizer

    run = read_run(known)
    tokenizer = AutoTokenizer.from_pretrained(run.setting("model.path"))
    ids = [5, 9, 20, 7]
    assert text_decoder(run)(ids) == tokenizer.decode(ids)
    run.config["model"]["path"] = "no/model"
    assert text_decoder(run)(ids) == "ids 5 9 20 7"


def test_deleted_and_missing_text_is_said(known: Path) -> None:
    run = read_run(known)
    for number, note in [(14, "text deleted: older than the oldest checkpoint"), (13, "no text")]:
        [row] = select(run, Filter(prompt=f"0/{number}"))
        group = show(run, row, text_decoder(run))
        assert group.rollouts == ()
        assert group.note.startswith(note)
    [filtered] = select(run, Filter(prompt="0/12"))
    not_kept = filtered._replace(segment=None, offset=None, length=None)
    assert show(run, not_kept, text_decoder(run)).note.startswith("text not kept: it was filtered")
    segment = known / "segments" / "000001"
    segment.write_bytes(bytes(100) + segment.read_bytes()[100:])
    damaged = show(run, run.groups[0], text_decoder(run))
    assert damaged.rollouts == ()
    assert "segments/000001 is damaged: the " in damaged.note
    assert show(run, run.groups[5], text_decoder(run)).note == ""
    run.meta["schema"] = "3"
    assert "has schema 3" in show(run, run.groups[5], text_decoder(run)).note
    run.meta["schema"] = str(SCHEMA)
    segment.unlink()
    note = show(run, run.groups[0], text_decoder(run)).note
    assert note == "text missing: segments/000001 is not there"


def test_control_characters_of_a_model_do_not_reach_the_terminal(known: Path) -> None:
    assert visible("a\x1b[31mb\n\tc\x07") == "a\\x1b[31mb\n\tc\\x07"
    run = read_run(known)
    group = show(run, run.groups[0], lambda ids: "\x1b]0;owned\x07")
    assert all("\x1b" not in line.plain for line in group_lines(group, run))


def test_the_command_prints_text_rewards_versions_and_fate(known: Path) -> None:
    done = command(known, "--prompt", "0/3")
    assert done.returncode == 0, done.stderr
    for part in (
        "group 0/3",
        "trained in step 1",
        "staleness 1 of 2",
        "reward 1 (format 0.5)",
        "v0 x5, v1 x1",
        "generator-0-aaaa",
        "1 of 1 prompts",
    ):
        assert part in done.stdout


def test_the_command_gives_programs_the_same_as_json(known: Path) -> None:
    done = command(known, "--fate", "filtered", "--limit", "1", "--json")
    [group] = json.loads(done.stdout)
    assert (group["group"], group["fate"], group["rollouts"]) == ("0/14", "filtered", [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "99"], "no prompt fits --step 99. There are steps 0 to 5"),
        (["--prompt", "5"], "--prompt 5: expected EPOCH/POSITION, as 0/17"),
        (["--fate", "lost"], "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued"),
    ],
)
def test_mistakes_are_one_message_and_code_2(known: Path, arguments: list[str], told: str) -> None:
    done = command(known, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unknown_run_is_a_mistake(tmp_path: Path) -> None:
    done = command(tmp_path / "nowhere")
    assert done.returncode == 2
    assert "neither a run directory" in done.stderr


def test_a_replay_names_the_run_whose_prompts_it_trains(tmp_path: Path) -> None:
    (tmp_path / "run_id").write_text("one")
    (tmp_path / "replay_of.json").write_text('{"path": "/runs/recorded", "run_id": "two"}')
    told = f"{tmp_path} is a replay: its prompts and responses are those of /runs/recorded"
    with pytest.raises(ValueError, match=re.escape(told)):
        show_rollouts(str(tmp_path), wanted=Filter(), limit=1, as_json=False)
    with pytest.raises(ValueError, match=re.escape(told)):
        export_run(str(tmp_path), out=None, step=None, fate=None)
