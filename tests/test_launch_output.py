"""What commands print, where it cannot be printed, and names that look like markup."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import REPOSITORY
from rich.console import Console
from run_records import write_run

from asyncrl.launch.children import Children, Program
from asyncrl.launch.output import Output, OutputError, plain_console
from asyncrl.launch.progress import Progress, print_summary
from asyncrl.launch.signals import Signals
from asyncrl.launch.supervise import Supervisor
from asyncrl.run_dir import RunDir

COMMANDS = [["show", "RUN"], ["show", "RUN", "--json"], ["report", "RUN"], ["--help"]]


def command(arguments: list[str], run: Path) -> list[str]:
    words = [str(run) if word == "RUN" else word for word in arguments]
    return [sys.executable, "-P", "-m", "asyncrl.launch", *words]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_whose_output_is_full_says_so_in_one_line(
    tmp_path: Path, arguments: list[str]
) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command(arguments, write_run(tmp_path)),
            cwd=REPOSITORY,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        "asyncrl-launch: standard output cannot be written: No space left on device\n"
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_without_a_word(
    tmp_path: Path, arguments: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        command(arguments, write_run(tmp_path)),
        cwd=REPOSITORY,
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("role", ["show", "status", "report"])
def test_a_name_that_no_file_can_have_is_one_message(role: str) -> None:
    ended = subprocess.run(
        command([role, "n" * 300], Path()), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("asyncrl-launch: n")
    assert ended.stderr.count("\n") == 1


def test_a_run_goes_on_when_its_progress_can_no_longer_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", Output(full, is_needed=True))
        with Progress(plain_console(is_needed=False), RunDir(tmp_path), max_steps=1) as progress:
            progress._say("step 1")
        print_summary(plain_console(is_needed=False), RunDir(write_run(tmp_path)))


def test_output_that_is_needed_is_missed_at_once() -> None:
    with Path("/dev/full").open("w") as full:
        console = Console(file=Output(full, is_needed=True))  # type: ignore[arg-type]
        with pytest.raises(OutputError, match="No space left on device"):
            console.print("a group")


def test_brackets_in_a_path_are_printed_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setenv("COLUMNS", "400")
    directory = tmp_path / "odd [b] [red]x[/red] :smile: {y}"
    directory.mkdir(parents=True)
    run = write_run(directory)
    print_summary(plain_console(), RunDir(run))
    assert str(run) in out.getvalue()


def test_no_console_reads_user_text_as_markup() -> None:
    made = {
        (file.name, found)
        for folder in ("asyncrl", "buffer", "generators", "learner")
        for file in (REPOSITORY / folder).rglob("*.py")
        for found in re.findall(r"\bConsole\([^)]*\)", file.read_text())
    }
    assert made
    assert {pair for pair in made if "markup=False" not in pair[1]} == set()


def test_a_program_that_ended_without_a_word_is_told_as_that(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=300)
    (tmp_path / "logs").mkdir()
    with Children(tmp_path / "logs") as children:
        supervisor = Supervisor(
            RunDir(tmp_path),
            children,
            buffer=Program("buffer", "buffer", (sys.executable, "-c", "exit(3)"), {}),
            others=lambda address: [],
            max_restarts=0,
            progress=Progress(console, RunDir(tmp_path), max_steps=None),
            errors=console,
        )
        with Signals() as signals:
            assert supervisor.run(signals) == 1
    assert "buffer ended with exit code 3, without a word" in out.getvalue()
    assert "What it said last" not in out.getvalue()
