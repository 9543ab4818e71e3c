"""`asyncrl-launch export`: every stored response is a row, and what is left out is counted."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from run_records import GROUPS, STALENESS, STEPS, TOKENS, write_run

from asyncrl.journal import Journal
from asyncrl.journal.claim import note_nothing_kept
from asyncrl.journal.tables import Change
from asyncrl.report import export
from asyncrl.report.export import COLUMNS, export_run


@pytest.fixture
def known(tmp_path: Path, random_tiny_task: Path) -> Path:
    return write_run(tmp_path, model=random_tiny_task / "model")


def exported(run: Path, **options: object) -> pa.Table:
    out = run / "out.parquet"
    assert export_run(str(run), out=out, **({"step": None, "fate": None} | options)) == 0  # type: ignore[arg-type]
    return parquet.read_table(out)


def test_every_stored_response_is_a_row_with_all_that_was_submitted(
    known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = exported(known)
    assert table.schema == COLUMNS
    assert table.num_rows == 2 * (STEPS * GROUPS + 1)
    row = table.slice(7, 1).to_pylist()[0]  # the second response of group 3, in step 1
    assert (row["epoch"], row["position"], row["sample"]) == (0, 3, 1)
    assert (row["state"], row["step"], row["attempt"]) == ("trained", 1, 0)
    assert (row["source"], row["generator"], row["inc"]) == ("known", "generator-0-aaaa", 1)
    assert row["prompt_ids"] == [0, 1, 2, 3]
    assert row["token_ids"] == [3, 4, 5, 6, 7, 8]
    assert row["logprobs"] == [-1.0] * TOKENS
    assert row["versions"] == [0, 0, 0, 0, 0, 1]
    assert row["loss_mask"] == [True] * TOKENS
    assert (row["reward"], row["reward_parts"]) == (1.0, [("format", 0.5)])
    assert (row["finish_reason"], row["temperature"]) == ("stop", 1.0)
    assert (row["staleness"], row["group_staleness"]) == (STALENESS[1], STALENESS[1])
    told = capsys.readouterr().out
    assert told.startswith(f"26 rollouts of 13 prompts in {known / 'out.parquet'} (")
    assert "1 (no text: no group was finished)" in told
    assert "1 (text deleted: older than the oldest checkpoint)" in told


def test_text_is_that_of_the_models_tokenizer_and_empty_without_it(known: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_of(known))
    first = exported(known).slice(0, 1).to_pylist()[0]
    assert first["prompt"] == tokenizer.decode(first["prompt_ids"])
    assert first["response"] == tokenizer.decode(first["token_ids"])
    config = known / "config.yaml"
    config.write_text(config.read_text().replace("model", "no/model"))
    assert exported(known).column("response").null_count == 26


def model_of(run: Path) -> str:
    return str(export.setting(export.read_config(run), "model.path"))


def test_a_step_or_a_fate_alone_is_exported(known: Path) -> None:
    assert set(exported(known, step=2).column("position").to_pylist()) == {4, 5}
    filtered = exported(known, fate="filtered")
    assert set(filtered.column("position").to_pylist()) == {12}
    assert filtered.column("staleness").null_count == 2


def test_row_groups_are_written_one_by_one_and_the_file_appears_whole(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(known)
    monkeypatch.setattr(export, "ROW_GROUP_BYTES", 400)
    monkeypatch.setattr(export, "_LOOK_ROWS", 3)
    assert exported(known).equals(whole)
    assert parquet.ParquetFile(known / "out.parquet").num_row_groups > 3
    (known / "segments" / "000001").write_bytes(b"")
    with pytest.raises(ValueError, match="nothing to export.*segments/000001 is cut"):
        exported(known)
    assert parquet.read_table(known / "out.parquet").equals(whole)
    assert [name for name in os.listdir(known) if name.startswith(".out")] == []


def test_damaged_groups_are_left_out_and_counted_with_their_segment(
    known: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment = known / "segments" / "000001"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: len(whole) // 2])
    some = exported(known)
    assert 0 < some.num_rows < 26
    told = capsys.readouterr().out
    assert "no text" in told
    cut = re.search(r"(\d+) \(\S+/segments/000001 is cut: .* from byte \d+ on", told)
    assert cut is not None
    assert some.num_rows + 2 * int(cut[1]) == 26
    segment.write_bytes(whole[:9] + bytes([whole[9] ^ 1]) + whole[10:])
    assert exported(known).num_rows == 24
    told = capsys.readouterr().out
    assert "1 (" in told
    assert "segments/000001 is damaged: the " in told
    assert "bytes from byte 0 on are not those that were written" in told
    assert "; group 0/0 is the first)" in told
    segment.write_bytes(b"x" * len(whole))
    with pytest.raises(ValueError, match=r"nothing to export.*000001 is damaged"):
        exported(known)
    with closing(sqlite3.connect(known / "journal.sqlite")) as database:
        database.execute("UPDATE meta SET value='3' WHERE key='schema'")
        database.commit()
    with pytest.raises(ValueError, match=r"has schema 3, this program reads"):
        exported(known)


def test_a_run_that_goes_on_is_exported_as_far_as_it_is(known: Path) -> None:
    journal = Journal(known)
    before = exported(known).num_rows
    journal.write(Change(meta={"committed": "7"})).result(timeout=5)
    assert exported(known).num_rows == before
    journal.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--step", "99"],
            "nothing to export. There are steps 0 to 5, and prompts: "
            "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued",
        ),
        (["--fate", "nonsense"], "nothing to export. There are steps 0 to 5, and prompts: "),
        (["no/directory/out.parquet"], "no/directory/out.parquet cannot be written: make the dir"),
        (["."], ". is no regular file"),
        (["train.jsonl"], "train.jsonl: what is written is Parquet"),
    ],
)
def test_mistakes_are_one_message_and_code_2(known: Path, arguments: list[str], told: str) -> None:
    command = [sys.executable, "-m", "asyncrl.launch", "export", str(known), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_only_a_regular_file_is_replaced_and_through_a_link_the_one_that_it_points_at(
    known: Path, tmp_path: Path
) -> None:
    pipe, directory, link = (tmp_path / name for name in ("pipe", "directory", "link"))
    os.mkfifo(pipe)
    directory.mkdir()
    for target in (pipe, directory):
        link.symlink_to(target)
        for out in (target, link):
            with pytest.raises(ValueError, match="is no regular file, and is not replaced"):
                export_run(str(known), out=out, step=None, fate=None)
        link.unlink()
    assert pipe.is_fifo()
    assert list(directory.iterdir()) == []
    for before in (None, b"an earlier export"):
        target = tmp_path / f"{before is None}.parquet"
        if before is not None:
            target.write_bytes(before)
        link.symlink_to(target.name)
        assert export_run(str(known), out=link, step=None, fate=None) == 0
        assert link.is_symlink()
        assert parquet.read_table(target).num_rows == 26
        link.unlink()


def test_a_run_of_which_nothing_is_kept_says_so(tmp_path: Path) -> None:
    (tmp_path / "run_id").write_text("run-1")
    note_nothing_kept(tmp_path)
    with pytest.raises(ValueError, match=r"nothing is kept .* \(buffer.durability is none\)"):
        export_run(str(tmp_path), out=None, step=None, fate=None)
