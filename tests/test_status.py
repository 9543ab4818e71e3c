"""`asyncrl-launch status`: the screen's numbers, and the commands that watch a run that goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_runs import Launched, launched, write_scripted_config
from rich.console import Console
from run_records import write_run

from asyncrl.launch.status_screen import head_lines, member_cells, screen
from asyncrl.launch.time_table import short, states_text, time_bar, work_text

LAUNCHER = [sys.executable, "-m", "asyncrl.launch"]
VALUES: dict[str, Any] = {
    "run": "known",
    "step": 9,
    "version": 8,
    "published": 7,
    "weights": {
        **{"transport": "collective", "num_generators": 2, "num_serving": 1},
        **{"last_version": 7, "propagation_s": 0.31, "paused_s": 0.042},
    },
    "max_steps": 20,
    "max_staleness": 2,
    "staleness": {"0": 10, "1": 30, "2": 60},
    "reward_mean": 0.25,
    "counts": {"waiting": 1, "leased": 2, "ready": 3, "assigned": 4, "trained": 32},
    "admitted": 42,
    "evals": [{"version": 0, "accuracy": 0.125}],
    "waiting_for": "step 9: need 4 groups, have 3, 2 in flight",
    "waiting_s": 7.25,
    "ended": "",
    "leases": [
        {"group": "0/40", "attempt": 1, "member": "generator-0-aa", "age_s": 3, "started": True},
        {"group": "0/41", "attempt": 0, "member": "generator-1-bb", "age_s": 99, "started": False},
    ],
    "members": [
        {
            **{"name": "learner-cc", "role": "learner", "host": "one", "pid": 11, "alive": True},
            **{"state": "waiting for step 9", "state_s": 7.25, "version": 8, "leases": 0},
            **{"tokens_per_s": 120.4, "last_seen_s": 0.5, "suspended": False},
        },
        {
            **{"name": "generator-0-aa", "role": "generator", "host": "two", "pid": 12},
            **{"state": "generating", "state_s": 61.0, "version": 7, "leases": 1, "alive": True},
            **{"tokens_per_s": 1000.0, "last_seen_s": 1.0, "suspended": False},
        },
        {
            **{"name": "generator-1-bb", "role": "generator", "host": "two", "pid": 13},
            **{"state": "dead", "state_s": 500.0, "version": 5, "leases": 1, "alive": False},
            **{"tokens_per_s": 0.0, "last_seen_s": 503.0, "suspended": False},
        },
    ],
    "time": [
        {
            **{"process": "buffer", "role": "buffer"},
            "recent": {
                "serving": 6.0,
                "waiting for generators": 120.0,
                "waiting for requests": 174,
            },
            "run": {
                "serving": 60.0,
                "waiting for generators": 1200.0,
                "waiting for requests": 1740,
            },
        },
        {
            **{"process": "learner", "role": "learner"},
            "recent": {"training": 160, "saving": 20, "waiting for a batch": 120},
            "run": {"training": 1690, "starting": 100, "waiting for a batch": 1200, "away": 10},
        },
        {
            **{"process": "generator-0", "role": "generator"},
            "recent": {"generating": 294, "waiting for leases": 3, "waiting for the buffer": 3},
            "run": {"generating": 2970, "waiting for leases": 30},
        },
    ],
}


def printed(values: dict[str, Any], *, width: int = 140) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(values, width=width))
    return console.export_text()


def test_the_head_of_the_screen_adds_up() -> None:
    lines = dict(head_lines(VALUES))
    assert lines["step"] == "8 of 20 trained"
    assert lines["weights"] == ("version 8, published 7, 1 behind (collective), served by 1 of 2")
    assert lines["last update"] == (
        "version 7: 310 ms from publication to serving, engine paused 42 ms"
    )
    assert lines["staleness"] == (
        "bound 2, so far mean 1.50, max 2 (0: 10%, 1: 30%, 2: 60% of 100 tokens)"
    )
    assert lines["reward"] == "0.250, mean of the last groups; held-out accuracy 0.125 at version 0"
    assert lines["tokens/s"] == "generators 1,000, learner 120"
    assert lines["prompts"] == (
        "42 issued = 32 trained + 4 assigned + 3 ready + 2 leased + 1 waiting"
    )


def test_the_head_says_how_full_the_journal_is_or_that_nothing_is_kept() -> None:
    journal = {"durability": "process", "num_bytes": 1_200_000_000, "cap_bytes": 100_000_000_000}
    lines = dict(head_lines(VALUES | {"journal": journal}))
    assert lines["journal"] == "1.2 of 100 GB of finished groups"
    lines = dict(head_lines(VALUES | {"journal": journal | {"durability": "none"}}))
    assert lines["journal"] == (
        "nothing is kept when the buffer ends; 1.2 of 100 GB of finished groups in memory"
    )


def test_before_the_first_update_nothing_is_said_of_its_cost() -> None:
    none = {"transport": "", "num_generators": 0, "num_serving": 0}
    lines = dict(head_lines(VALUES | {"version": 0, "published": 0, "weights": none}))
    assert lines["weights"] == "version 0, published 0"
    assert "last update" not in lines
    unknown = VALUES["weights"] | {"propagation_s": None}
    lines = dict(head_lines(VALUES | {"weights": unknown}))
    assert lines["last update"] == "version 7: engine paused 42 ms"


def test_a_member_is_told_in_one_row() -> None:
    learner, working, dead = (
        list(member_cells(member, VALUES).values()) for member in VALUES["members"]
    )
    assert working == [
        *("generator-0-aa", "two:12", "generating", "61 s", "7", "0", "1,000", "1", "1.0 s ago")
    ]
    assert dead[2:6] == ["dead", "8:20 min", "5", "2"]
    assert learner[2:8] == ["waiting for step 9", "7.2 s", "8", "0", "120", ""]


def test_what_is_waited_for_and_the_oldest_lease_are_on_the_screen() -> None:
    text = printed(VALUES)
    assert "waiting for: step 9: need 4 groups, have 3, 2 in flight (for 7.2 s)" in text
    assert text.index("0/41") < text.index("0/40")
    assert "oldest of 2 leases" in text


def test_where_the_time_goes_is_on_the_screen_of_late_and_over_the_whole_run() -> None:
    text = printed(VALUES, width=160)
    late, _, whole = text.partition("where the time went, whole run of 50:00 min")
    assert "where the time goes, last 5:00 min" in late
    assert "working 60%, waiting for a batch 40%" in late
    assert "53 training, 7 saving" in late
    assert "working 98%, waiting for leases 1%, for the buffer 1%" in late
    assert "working 57%, starting 3%, waiting for a batch 40%" in whole
    young = [row | {"run": row["recent"]} for row in VALUES["time"]]
    assert printed(VALUES | {"time": young}).count("where the time") == 1


def test_who_is_starting_is_not_working() -> None:
    seconds = {"starting": 14.0, "generating": 4.0, "scoring": 0.4, "waiting for leases": 1.6}
    assert states_text(seconds) == "working 22%, starting 70%, waiting for leases 8%"
    assert work_text(seconds) == "20 generating, 2 scoring"
    assert time_bar(seconds, width=10).plain == "██░░░░░░░▒"


def test_many_generators_have_one_row_of_their_time() -> None:
    *others, generator = VALUES["time"]
    many = [generator | {"process": f"generator-{i}"} for i in range(20)]
    text = printed(VALUES | {"time": [*others, *many]})
    assert text.count("20 generators") == 2
    assert "generator-7" not in text


def test_a_bar_has_its_width_whatever_its_parts_are() -> None:
    for row in VALUES["time"]:
        for width in (1, 14, 24):
            assert len(time_bar(row["run"], width=width)) == width
    assert time_bar({"training": 3, "waiting for a batch": 1}, width=4).plain == "███▒"
    assert states_text({"away": 3}) == "away 100%"


def test_in_80_columns_each_member_still_has_one_row() -> None:
    rows = printed(VALUES, width=80).splitlines()
    (row,) = [row for row in rows if row.startswith("learner-cc")]
    assert "waiting for step 9" in row
    assert max(len(row) for row in rows) <= 80
    (header,) = [row for row in rows if row.startswith("member")]
    assert header.split() == ["member", "state", "since", "version", "tokens/s", "leases"]
    pids = [row.strip() for row in rows if row.startswith("pids")]
    assert pids == ["pids on one: learner-cc 11", "pids on two: generator-0-aa 12"]


def test_a_long_state_stands_below_the_table_in_full() -> None:
    state = "generating, weights 1.12 were not taken: the shape of layers.3.weight is another"
    learner, generator, dead = VALUES["members"]
    text = printed(VALUES | {"members": [learner, generator | {"state": state}, dead]}, width=120)
    [row] = [row for row in text.splitlines() if row.startswith("generator-0-aa  ")]
    assert "generating …" in row
    assert f"generator-0-aa: {state}" in text


def test_a_run_without_members_and_one_that_has_ended_are_screens_too() -> None:
    early = VALUES | {"members": [], "leases": [], "staleness": {}, "counts": {}, "evals": []}
    assert "nobody has joined" in printed(early | {"reward_mean": None, "admitted": 0})
    assert "the run has ended: all is done" in printed(VALUES | {"ended": "all is done"})
    assert "the run failed: no luck" in printed(VALUES | {"ended": "no luck", "failed": True})


def test_a_run_in_which_many_have_died_is_still_one_screen() -> None:
    *alive, dead = VALUES["members"]
    gone = [dead | {"name": f"generator-9-{i}"} for i in range(40)]
    text = printed(VALUES | {"members": [*gone, *alive]})
    assert text.index("generator-0-aa") < text.index("generator-9-0")
    assert "and 35 more that are gone" in text


def test_whoever_was_refused_of_late_is_named_with_the_reason() -> None:
    refused = [
        {"name": f"generator-{i}", "code": "mismatch", "reason": f"no {i}"} for i in (1, 2, 3)
    ]
    text = printed(VALUES | {"refused_members": refused})
    assert "refused generator-3: no 3" in text
    assert "generator-1: no 1" not in text


def test_a_narrow_terminal_keeps_the_names() -> None:
    text = printed(VALUES, width=80)
    assert "generator-1-bb" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.44, "0.4 s"), (42, "42 s"), (187, "3:07 min"), (7500, "2:05 h")],
)
def test_durations_are_short(seconds: float | None, text: str) -> None:
    assert short(seconds) == text


def command(*arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """`asyncrl-launch ...` as a user runs it, on a wide terminal."""
    return subprocess.run(
        [*LAUNCHER, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "COLUMNS": "160"},
    )


@pytest.mark.parametrize("arguments", [["status", "--help"], ["--help"]])
def test_help_does_not_load_what_takes_seconds(arguments: list[str]) -> None:
    done = command(*arguments, timeout_s=20)
    assert done.returncode == 0
    program = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "import asyncrl.launch.cli, asyncrl.launch.status, asyncrl.launch.show\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'reasoning_gym', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_status_of_nothing_and_of_an_ended_run_is_one_message_and_code_2(tmp_path: Path) -> None:
    done = command("status")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Name its directory, or give --connect" in done.stderr
    known = write_run(tmp_path)
    done = command("status", known)
    assert done.returncode == 2
    assert "no buffer has listened here yet" in done.stderr
    (known / "buffer_address").write_text("tcp://127.0.0.1:9")
    done = command("status", known)
    assert done.returncode == 2
    assert "no buffer answers at tcp://127.0.0.1:9" in done.stderr
    assert "all 6 steps of max_steps are trained" in done.stderr
    assert "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, random_tiny_task: Path) -> Iterator[Launched]:
    """A run with two scripted generators that has trained two steps and goes on."""
    directory = tmp_path_factory.mktemp("live")
    config = write_scripted_config(directory / "scripted.yaml", random_tiny_task, max_epochs=50)
    with launched(config, "local.generators=2", directory=directory) as launcher:
        launcher.wait_for_steps(2)
        yield launcher


@pytest.mark.e2e
def test_status_of_a_live_run_names_members_and_numbers(live: Launched) -> None:
    done = command("status", live.run_dir)
    assert done.returncode == 0, done.stderr
    for part in ("learner", "generator-0", "generator-1", "waiting for:", "issued ="):
        assert part in done.stdout
    values = json.loads(command("status", live.run_dir, "--json").stdout)
    assert values["version"] >= 2
    assert sum(values["counts"].values()) == values["admitted"]
    pids = {member["pid"] for member in values["members"]}
    assert {p.pid for p in live.children("generators")} <= pids


@pytest.mark.e2e
def test_status_by_address_needs_no_run_directory(live: Launched) -> None:
    address = (live.run_dir / "buffer_address").read_text().strip()
    done = command("status", "--connect", address, "--json")
    assert json.loads(done.stdout)["version"] >= 2


@pytest.mark.e2e
def test_show_and_report_work_while_the_run_goes_on(live: Launched) -> None:
    shown = command("show", live.run_dir, "--step", "1", "--json")
    groups = json.loads(shown.stdout)
    assert {group["step"] for group in groups} == {1}
    assert all(rollout["text"] for group in groups for rollout in group["rollouts"])
    done = command("report", live.run_dir)
    assert done.returncode == 0, done.stderr
    assert "not at its end" in Path(done.stdout.strip()).read_text()


@pytest.mark.e2e
def test_a_stopped_generator_is_named_with_its_silence(live: Launched) -> None:
    victim = live.children("generators")[0]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        row = until(lambda: _dead_row(live, victim.pid), timeout_s=20)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert row["last_seen_s"] >= 3.0
    assert f":{victim.pid}" in printed(VALUES | {"members": [row]})


@pytest.mark.e2e
def test_watching_ends_when_the_buffer_is_gone(live: Launched) -> None:
    """The last test of this run: it ends it."""
    watcher = subprocess.Popen(
        [*LAUNCHER, "status", str(live.run_dir), "--json", "--watch", "0.3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    first, second = (json.loads(watcher.stdout.readline()) for _ in range(2))
    assert first["version"] <= second["version"]
    live.process.terminate()
    _, errors = watcher.communicate(timeout=30)
    assert "answers no more" in errors
    assert watcher.returncode == 0
    done = command("status", live.run_dir)
    assert done.returncode == 2
    assert "not at its end" in done.stderr


def _dead_row(live: Launched, pid: int) -> dict[str, Any] | None:
    values = json.loads(command("status", live.run_dir, "--json").stdout)
    rows = [member for member in values["members"] if member["pid"] == pid]
    return rows[0] if rows and not rows[0]["alive"] else None


def until(look: Callable[[], dict[str, Any] | None], *, timeout_s: float) -> dict[str, Any]:
    """What `look` finds, asked again until it does."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        found = look()
        if found is not None:
            return found
    raise TimeoutError(f"not within {timeout_s} s")
