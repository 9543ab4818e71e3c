"""The report's numbers: a run directory with known content, and directories of runs that failed."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_records import (
    BEGAN,
    BOUND,
    PAUSE_S,
    REWARDS,
    STALENESS,
    STEP_S,
    STEPS,
    buffer_values,
    write_run,
)

from asyncrl.journal import Journal
from asyncrl.journal.tables import BeatRow, Change
from asyncrl.messages import End
from asyncrl.report.page import write_report
from asyncrl.report.reading import RunRecords, find_run, read_metrics, read_run
from asyncrl.report.samples import choose
from asyncrl.report.series import (
    averaged,
    evaluations,
    run_clock,
    sampling_speed,
    smoothed,
    staleness_shares,
    trained_steps,
)
from asyncrl.report.summary import (
    fates_text,
    gather,
    headline,
    outcome,
    table,
    waiting_shares,
)
from asyncrl.report.timeline import binned, drawn_lanes, known_lanes
from asyncrl.report.updates import brief, stagings
from asyncrl.shares import Lane, Span

PICTURES = ["reward", "shares", "staleness", "throughput", "timeline", "updates"]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def execute(run_dir: Path, statements: str) -> None:
    """Changes the journal behind the back of all code."""
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as database:
        database.executescript(statements)


def test_every_step_counts_once_at_the_time_it_was_first_trained(known: Path) -> None:
    steps = trained_steps(read_run(known))
    assert [step.step for step in steps] == list(range(STEPS))
    resumed = [PAUSE_S if step >= 4 else 0.0 for step in range(STEPS)]
    assert [step.at for step in steps] == [
        BEGAN + STEP_S * (step + 1) + resumed[step] for step in range(STEPS)
    ]
    assert [step.number("buffer/reward_mean") for step in steps] == REWARDS
    assert [step.staleness for step in steps] == [{age: 24.0} for age in STALENESS]


def test_a_step_that_was_trained_anew_after_a_fork_replaces_the_first(known: Path) -> None:
    again = {"step": 3, "time": BEGAN + PAUSE_S + 99, "attempt": 3, "time/step_s": 1.0}
    with (known / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(again | {"train/replayed": 0.0}) + "\n")
    steps = trained_steps(read_run(known))
    assert [step.step for step in steps] == list(range(STEPS))
    assert steps[3].at == BEGAN + PAUSE_S + 99


def test_buffer_numbers_of_a_step_come_from_metrics_where_the_journal_lacks_it(known: Path) -> None:
    (known / "journal.sqlite").unlink()
    steps = trained_steps(read_run(known))
    assert [step.number("buffer/reward_mean") for step in steps] == REWARDS


def test_evaluations_count_once(known: Path) -> None:
    lines = (known / "metrics.jsonl").read_text().splitlines()
    (known / "metrics.jsonl").write_text("\n".join([*lines, lines[0]]))
    points = evaluations(read_run(known))
    assert [(point.version, point.accuracy) for point in points] == [(0, 0.25), (6, 0.75)]


def test_the_runs_clock_leaves_out_the_pause_and_nothing_else(known: Path) -> None:
    clock = run_clock(read_run(known))
    assert clock.seconds(BEGAN) == 0
    assert clock.seconds(BEGAN + 25) == 25
    assert len(clock.resumed_at) == 1
    [resumed] = clock.resumed_at
    assert clock.seconds(BEGAN + 1800) == resumed
    assert clock.seconds(BEGAN + PAUSE_S + 30) == pytest.approx(resumed + 10)
    assert clock.total_s < 150


def test_a_process_is_drawn_in_full_and_where_it_was_not_there_as_away() -> None:
    spans = [
        Span(0, 10, {"training": 4, "waiting for a batch": 6}),
        Span(20, 25, {"training": 5}),
    ]
    lane = Lane("it", "learner", spans)
    parts = binned(lane, np.linspace(0, 30, 7))
    assert np.sum(list(parts.values()), axis=0).tolist() == pytest.approx([1] * 6)
    assert parts["waiting for a batch"].tolist() == pytest.approx([0.6, 0.6, 0, 0, 0, 0])
    assert parts["away"].tolist() == pytest.approx([0, 0, 1, 1, 0, 1])
    uneven = binned(lane, np.array([0.0, 7.0, 30.0]))
    assert uneven["waiting for a batch"] * np.array([7, 23]) == pytest.approx([4.2, 1.8])


def drawn_seconds(run: RunRecords) -> dict[str, dict[str, float]]:
    """What the timeline shows of each process, in seconds by state."""
    clock = run_clock(run)
    found = {}
    for lane in drawn_lanes(run, known_lanes(run, clock), clock):
        total: defaultdict[str, float] = defaultdict(float)
        for span in lane.spans:
            for state, seconds in span.seconds.items():
                total[state] += seconds
        found[lane.name] = dict(total)
    return found


def test_time_of_each_process_is_that_of_its_records_and_beats(known: Path) -> None:
    found = drawn_seconds(read_run(known))
    assert list(found) == ["learner", "generator-0", "generator-1"]
    learner = {"waiting for a batch": 32, "training": 30, "training again": 10}
    assert found["learner"] == pytest.approx(learner | {"moving weights": 8})
    names = ("starting", "generating", "waiting for leases")
    assert found["generator-0"] == pytest.approx(dict(zip(names, (10, 42, 18), strict=True)))
    assert found["generator-1"] == pytest.approx(dict(zip(names, (5, 21, 9), strict=True)))


def test_the_speed_of_the_generators_is_what_their_heartbeats_counted(known: Path) -> None:
    run = read_run(known)
    clock = run_clock(run)
    points = sampling_speed(run, clock)
    width = points[1][0] - points[0][0]
    assert sum(speed * width for _, speed in points) == pytest.approx(3 * 210)
    together = [speed for seconds, speed in points if 20 < seconds < 30]
    assert together == pytest.approx([14.0] * len(together))


def test_without_heartbeats_the_speed_is_that_of_the_buffers_records(known: Path) -> None:
    run = read_run(known)
    run.beats.clear()
    assert [speed for _, speed in sampling_speed(run, run_clock(run))] == [
        40.0 + step for step in range(STEPS)
    ]


def test_waiting_before_the_first_step_is_not_counted(known: Path) -> None:
    run = read_run(known)
    first = next(record for record in run.metrics if "time/step_s" in record)
    first |= {"time/wait_batch_s": 1000.0, "time/step_s": 1006.0}
    facts = gather(run)
    assert dict(waiting_shares(facts))["learner"] == pytest.approx(0.4)


def with_beats_of_the_learner(run: RunRecords, *said: tuple[float, dict[str, float]]) -> RunRecords:
    """Heartbeats of its first life: seconds since the run began, and what it had done by then."""
    for at, seconds in said:
        row = BeatRow(BEGAN + at, "learner-cccc", "learner", "it", json.dumps(seconds), 0, 0)
        run.beats.append(row)
    return run


def test_a_long_wait_for_the_first_batch_is_not_spread_over_the_steps_after_it(
    known: Path,
) -> None:
    """The learner's heartbeats lie far apart: one before step 0 ends (at 10 s), the next after."""
    run = read_run(known)
    first = next(record for record in run.metrics if "time/step_s" in record)
    first |= {"time/wait_batch_s": 8.0, "time/forward_backward_s": 1.0}
    run = with_beats_of_the_learner(
        run,
        (1.0, {"wait_batch": 1.0}),
        (12.0, {"wait_batch": 10.0, "forward_backward": 1.0, "snapshot": 1.0}),
    )
    assert dict(waiting_shares(gather(run)))["learner"] == pytest.approx(0.4)


def test_the_learners_heartbeats_count_where_it_wrote_no_step(known: Path) -> None:
    """Its first life ends with step 3, at 40 s, and then saves."""
    run = with_beats_of_the_learner(
        read_run(known),
        (20.0, {"wait_batch": 8.0, "forward_backward": 10.0, "snapshot": 2.0}),
        (35.0, {"wait_batch": 16.0, "forward_backward": 16.0, "snapshot": 3.0}),
        (49.0, {"wait_batch": 16.0, "forward_backward": 20.0, "snapshot": 4.0, "checkpoint": 9.0}),
    )
    assert drawn_seconds(run)["learner"] == pytest.approx(
        {
            **{"waiting for a batch": 32, "training": 30, "training again": 10},
            **{"moving weights": 8, "saving": 9},
        }
    )


def test_shares_of_staleness_add_up_to_one_in_every_step(known: Path) -> None:
    grid = staleness_shares(trained_steps(read_run(known)))
    assert grid.shape == (BOUND + 1, STEPS)
    assert grid.argmax(axis=0).tolist() == STALENESS
    assert grid.sum(axis=0).tolist() == [1.0] * STEPS


def test_many_columns_become_means_of_some() -> None:
    grid = np.array([[0.0, 1.0, np.nan, 0.5, np.nan, np.nan, 0.25]])
    starts, means = averaged(grid, at_most=4)
    assert starts.tolist() == [0, 2, 4, 6]
    assert means[0].tolist() == pytest.approx([0.5, 0.5, np.nan, 0.25], nan_ok=True)
    _, same = averaged(grid, at_most=7)
    assert same[0].tolist() == pytest.approx(grid[0].tolist(), nan_ok=True)


def test_two_processes_of_one_name_that_live_together_have_a_row_each(known: Path) -> None:
    run = read_run(known)
    beats = [
        beat._replace(member=beat.member.replace("generator-1-", "generator-0-"))
        for beat in run.beats
    ]
    assert set(drawn_seconds(run)) == {"learner", "generator-0", "generator-1"}
    object.__setattr__(run, "beats", beats)
    assert set(drawn_seconds(run)) == {"learner", "generator-0", "generator-0-cccc"}


def test_fates_add_up_to_what_the_data_holds(known: Path) -> None:
    fates = read_run(known).fates
    assert list(fates.items()) == [
        *(("trained", 12), ("filtered", 2), ("quarantined", 1), ("not_issued", 5))
    ]
    assert fates_text(fates) == "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued"


def test_the_summary_says_what_the_records_say(known: Path) -> None:
    facts = gather(read_run(known))
    lines = dict(table(facts))
    assert lines["steps"] == "6 of 6"
    assert lines["outcome"] == "all 6 steps of max_steps are trained"
    assert lines["staleness of trained tokens"] == "mean 1.00, max 2 of 2"
    assert lines["median step"] == "10.0 s"
    assert lines["median wait for a batch"] == "4.0 s"
    assert lines["lives of the learner"] == "2"
    assert lines["tokens trained, with prompts"] == "600"
    assert lines["learner waited, after the first step"] == "40%"
    assert lines["response tokens that came in"] == "180"
    top = dict(headline(facts))
    assert top["training reward, first and last step"] == "0.100 → 0.600"
    assert top["held-out accuracy"] == "0.250 → 0.750"
    assert top["learner waited, after the first step"] == "40%"


def test_a_bound_that_changed_on_resuming_is_told_in_order(known: Path) -> None:
    execute(known, "UPDATE steps SET max_staleness=4 WHERE step>3")
    assert dict(table(gather(read_run(known))))["max_staleness"] == "2, then 4"


def test_samples_show_each_kind_of_fate_once_or_twice(known: Path) -> None:
    titles = [sample.title for sample in choose(read_run(known))]
    assert titles == [
        *["best of the last steps"] * 2,
        *["worst of the last steps"] * 2,
        *["oldest of the last steps"] * 2,
        *["filtered: all rewards are 0"] * 2,
        "quarantined: failed 3 times",
    ]
    best, *_ = choose(read_run(known))
    assert best.rollout is not None
    assert best.rollout.reward == 1.0


def test_the_page_holds_the_numbers_and_the_pictures(known: Path) -> None:
    page = write_report(known)
    html = page.read_text()
    assert page == known / "report" / "report.html"
    assert [file.stem for file in sorted(page.parent.glob("*.png"))] == PICTURES
    assert html.count("<img ") == len(PICTURES)
    assert "20 = 12 trained + 2 filtered + 1 quarantined + 5 not issued" in html
    assert "0.100 → 0.600" in html
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)\w""", html)


def test_what_a_model_wrote_is_text_on_the_page_and_not_html(known: Path) -> None:
    (known / "config.yaml").write_text("algorithm: <script>alert(1)</script>\n")
    html = write_report(known).read_text()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html


def test_a_run_without_a_step_has_a_report(tmp_path: Path) -> None:
    path = tmp_path / "early"
    path.mkdir()
    (path / "config.yaml").write_text("max_steps: 3\n")
    html = write_report(path).read_text()
    assert "no step was trained" in html
    assert "<img" not in html
    Journal(path).close()
    (path / "metrics.jsonl").write_text('{"step": 0, "torn')
    assert "0 of 3" in write_report(path).read_text()


def test_a_run_that_was_only_evaluated_has_a_picture_of_it(known: Path) -> None:
    first, *_ = (known / "metrics.jsonl").read_text().splitlines()
    (known / "metrics.jsonl").write_text(first + "\n")
    write_report(known)
    assert (known / "report" / "reward.png").stat().st_size > 0


def test_an_update_costs_what_learner_and_generators_said_of_its_last_publication(
    known: Path,
) -> None:
    first, _, fourth, fifth = gather(read_run(known)).updates
    assert (first.version, first.num_generators, first.blocked_s) == (1, 2, 1.0)
    assert (first.propagation_s, first.longest_s) == (1.5, 2.0)
    assert first.seconds["transfer"] == 0.5
    assert first.on_the_way_s == pytest.approx(1.5 - 0.53 - 0.1)
    assert (fourth.num_generators, fourth.propagation_s, fourth.on_the_way_s) == (1, None, None)
    assert fourth.seconds["stage"] == pytest.approx(0.28)
    assert fifth.version == 5


def test_without_a_journal_the_costs_of_updates_come_from_the_metrics(known: Path) -> None:
    (known / "journal.sqlite").unlink()
    values = {"num_served": 2, "propagation_mean_s": 0.5, "propagation_max_s": 0.7}
    phases = {"stage_mean_s": 0.25, "paused_mean_s": 0.1, "transfer_mean_s": 0.2}
    record = {f"weights/{name}": value for name, value in (values | phases).items()}
    with (known / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 2, "time": BEGAN, "attempt": 1} | record) + "\n")
    [cost] = gather(read_run(known)).updates
    assert (cost.version, cost.num_generators, cost.blocked_s) == (2, 2, 1.0)
    assert (cost.propagation_s, cost.longest_s) == (0.5, 0.7)
    assert (cost.seconds["stage"], cost.seconds["paused"]) == (0.25, 0.1)
    assert cost.on_the_way_s == pytest.approx(0.3)


def test_staging_ends_where_the_swap_begins(known: Path) -> None:
    member, begin, end = stagings(read_run(known))[0]
    assert member == "generator-0-aaaa"
    assert end == pytest.approx(BEGAN + STEP_S - 0.1)
    assert end - begin == pytest.approx(0.53)


def test_the_summary_has_the_medians_of_an_update(known: Path) -> None:
    lines = dict(table(gather(read_run(known))))
    assert lines["versions that generators served"] == "4"
    found = {n.split(": ")[1]: v for n, v in lines.items() if n.startswith("a weight update")}
    assert found == {
        "learner blocked": "1.0 s",
        "staging": "530 ms",
        "generator paused": "100 ms",
        "from publication to serving": "1.5 s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.0004, "0.4 ms"), (0.034, "34 ms"), (1.25, "1.2 s"), (61.0, "61 s")],
)
def test_seconds_of_an_update_are_short(seconds: float, text: str) -> None:
    assert brief(seconds) == text


def test_many_steps_and_many_processes_can_be_drawn(known: Path) -> None:
    lines = []
    for step in range(300):
        values = {f"buffer/{name}": value for name, value in buffer_values(0).items()}
        at = BEGAN + step
        record = {"step": step, "time": at, "attempt": 1, "time/step_s": 1.0, "time/start_s": 1.0}
        lines.append(json.dumps(record | values | {"staleness/tokens_1": 3.0}))
    (known / "metrics.jsonl").write_text("\n".join(lines))
    journal = Journal(known)
    beats = read_run(known).beats[:3]
    many = [beat._replace(member=f"generator-{i}-ffff") for i in range(20) for beat in beats]
    journal.write(Change(beats=tuple(many))).result()
    journal.close()
    assert len(gather(read_run(known)).lanes) >= 20
    write_report(known)


def test_a_journal_that_is_damaged_is_named_in_one_message(known: Path) -> None:
    (known / "journal.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(ValueError, match=r"journal\.sqlite cannot be read"):
        read_run(known)


def test_a_journal_of_an_earlier_version_can_be_read(known: Path) -> None:
    execute(
        known,
        "DROP TABLE beats; DROP TABLE served; ALTER TABLE groups DROP COLUMN leased_at; "
        "ALTER TABLE steps DROP COLUMN at;",
    )
    run = read_run(known)
    assert run.groups[0].leased_at is None
    assert [step.max_staleness for step in run.steps] == [BOUND] * STEPS
    write_report(known)


def test_a_run_is_found_by_name_and_a_near_name_is_told(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (known.parent / "runs").mkdir()
    known.rename(known.parent / "runs" / "known")
    monkeypatch.chdir(known.parent)
    assert find_run("known") == Path("runs/known")
    with pytest.raises(ValueError, match="did you mean 'known'"):
        find_run("knwon")


def test_a_run_in_the_middle_is_not_called_ended(known: Path) -> None:
    execute(known, "UPDATE meta SET value='4' WHERE key='committed'")
    assert outcome(read_run(known)) == "not at its end: 4 steps are trained"


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ({"reason": "data exhausted after 6 steps"}, "data exhausted after 6 steps"),
        ({"reason": "nothing usable came", "failed": True}, "failed: nothing usable came"),
        ({"reason": "stopped by SIGINT", "stopped": True}, "stopped by SIGINT"),
    ],
)
def test_the_end_is_told_as_the_buffer_declared_it(
    known: Path, end: dict[str, Any], told: str
) -> None:
    journal = Journal(known)
    text = End(records=[], **end).model_dump_json()
    journal.write(Change(meta={"end": text})).result()
    journal.close()
    assert outcome(read_run(known)) == told


def test_a_moving_mean_looks_back() -> None:
    assert smoothed([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]


def test_a_member_that_had_said_nothing_yet_is_no_sign_of_work(known: Path) -> None:
    journal = Journal(known)
    silent = BeatRow(BEGAN + 40, "generator-1-cccc", "generator", "dead", "{}", 0, 0)
    journal.write(Change(beats=(silent,))).result()
    journal.close()
    run = read_run(known)
    assert silent not in run.beats
    assert min(speed for _, speed in sampling_speed(run, run_clock(run))) >= 0


def test_torn_lines_of_metrics_are_passed_over(known: Path) -> None:
    assert len(read_metrics(known / "metrics.jsonl")) == 2 * 8 + 2


def test_lines_of_the_metrics_file_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    good = {"step": 1, "time": 5.0, "train/loss": 0.5}
    lines = [json.dumps(good), "null", "[1]", '{"step": 2, "time/step_s": 1.0}', '{"step": 3, "ti']
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\xff\x00\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [good]
