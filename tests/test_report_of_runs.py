"""The report that a run leaves behind: at a good end, after a failure, and in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from local_runs import Finished, launched, run_local, write_scripted_config
from scripted_run_fixtures import GROUPS, STEPS

from asyncrl.report.reading import read_run
from asyncrl.report.summary import gather

pytestmark = pytest.mark.e2e

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), ""
)
LOOK = """<!doctype html>
<iframe src="report.html" style="width:1280px; height:900px; border:0"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument;
  document.querySelector("#found").textContent = JSON.stringify({
    images: [...page.images].map(image => image.complete && image.naturalWidth),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
    width: [page.documentElement.scrollWidth, page.documentElement.clientWidth],
    summary: Object.fromEntries([...page.querySelectorAll("#summary tr")].map(
      row => [row.cells[0].innerText, row.cells[1].innerText])),
  });
});
</script>
"""
"""A page beside the report that looks at it from outside: the report itself may run no script."""


def summary(page: Path) -> dict[str, str]:
    """The table of a report as it stands in the file."""
    rows = re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page.read_text())
    return {html.unescape(name): html.unescape(value) for name, value in rows}


def test_a_run_that_ended_says_where_its_report_is_and_its_numbers_are_those_of_the_metrics(
    scripted_run: Finished,
) -> None:
    page = scripted_run.run_dir / "report" / "report.html"
    assert f"report {page}" in scripted_run.output, scripted_run.logs()
    lines = summary(page)
    seconds = [record["time/step_s"] for record in scripted_run.steps]
    trained = sum(record["train/num_tokens"] for record in scripted_run.steps)
    assert lines["steps"] == f"{STEPS} of {STEPS}"
    assert lines["outcome"] == f"all {STEPS} steps of max_steps are trained"
    assert lines["median step"] == f"{statistics.median(seconds):.1f} s"
    assert lines["tokens trained, with prompts"] == f"{trained:,.0f}"
    assert lines["prompts by fate"].startswith(f"60 = {STEPS * GROUPS} trained")
    assert {path.stem for path in page.parent.glob("*.png")} >= {"reward", "staleness", "timeline"}


def test_the_seconds_of_every_process_add_up_to_its_life(scripted_run: Finished) -> None:
    by_member = defaultdict(list)
    for beat in read_run(scripted_run.run_dir).beats:
        by_member[beat.member].append((beat.at, sum(json.loads(beat.seconds).values())))
    assert len(by_member) == 3
    for name, heard in by_member.items():
        last_at, last_age = heard[-1]
        life_s = last_at - min(at - age for at, age in heard)
        assert last_age == pytest.approx(life_s, rel=0.01, abs=0.03), name


def test_the_row_of_every_process_adds_up_to_the_wall_time_of_the_run(
    scripted_run: Finished,
) -> None:
    facts = gather(read_run(scripted_run.run_dir))
    rows = {each.process: each.seconds for each in facts.shares}
    assert list(rows) == ["buffer", "learner", "generator-0"]
    for name, seconds in rows.items():
        assert sum(seconds.values()) == pytest.approx(facts.clock.total_s, rel=0.01), name
    assert {"serving", "waiting for requests"} <= rows["buffer"].keys()
    assert {"starting", "training", "saving", "waiting for a batch"} <= rows["learner"].keys()
    assert {"starting", "generating", "waiting for leases"} <= rows["generator-0"].keys()
    waited_s = rows["learner"]["waiting for a batch"]
    for_generators_s = rows["buffer"].get("waiting for generators", 0.0)
    assert for_generators_s == pytest.approx(waited_s, abs=0.5)


def test_a_run_that_failed_before_its_first_step_has_a_report_of_that(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    (tmp_path / "alike.py").write_text("def score(**_):\n    return 1.0\n")
    config = write_scripted_config(
        tmp_path / "scripted.yaml",
        random_tiny_task,
        reward={"path": f"{tmp_path}/alike.py:score", "workers": 1},
        buffer={"zero_variance": "refill", "max_filtered_in_a_row": 8},
    )
    finished = run_local(config, "generator.scripted.tokens_per_s=500", directory=tmp_path)
    assert finished.code == 1, finished.logs()
    [line] = finished.errors.splitlines()
    said = re.match(r"the run failed: ((\d+) groups in a row gave nothing to train on)", line)
    assert said
    assert int(said[2]) >= 8  # several may come in at once
    lines = summary(finished.run_dir / "report" / "report.html")
    assert lines["outcome"].startswith(f"failed: {said[1]}")
    assert lines["steps"] == "0"


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_a_warning_and_no_failure(
    tmp_path: Path, random_tiny_task: Path
) -> None:
    config = write_scripted_config(tmp_path / "scripted.yaml", random_tiny_task, max_steps=3)
    with launched(config, directory=tmp_path) as launcher:
        launcher.wait_for_steps(1)
        (launcher.run_dir / "report").write_text("in the way")
        finished = launcher.finish()
    assert finished.code == 0, finished.logs()
    assert "there is no report" in finished.errors
    assert "Traceback" not in finished.errors


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_a_browser_shows_the_report_whole_and_asks_nobody(scripted_run: Finished) -> None:
    page = scripted_run.run_dir / "report" / "report.html"
    found, errors = seen_by_browser(page)
    assert errors == []
    assert found["requests"] == []
    assert len(found["images"]) == 4
    assert min(found["images"]) > 1000
    assert found["width"][0] <= found["width"][1]
    assert found["summary"] == summary(page)


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium on this machine")
def test_the_look_of_the_browser_finds_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(
        '<img src="http://localhost:9/x.png" style="width: 3000px"><table id="summary"></table>'
        "<script>nowhere()</script>"
    )
    found, errors = seen_by_browser(page)
    assert len(errors) >= 1
    assert found["requests"] == ["http://localhost:9/x.png"]
    assert found["images"] == [0]
    assert found["width"][0] > found["width"][1]


def seen_by_browser(page: Path) -> tuple[dict[str, Any], list[str]]:
    """What LOOK finds on the page, and the errors of the browser's console."""
    look = page.with_name("look.html")
    look.write_text(LOOK)
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
        *("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost", "--enable-logging=stderr"),
        *(f"--user-data-dir={page.parent}/browser", "--virtual-time-budget=10000", "--dump-dom"),
    ]
    done = subprocess.run(
        [BROWSER, *options, look.as_uri()], capture_output=True, text=True, timeout=60
    )
    look.unlink()
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr
    errors = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(match[1])), errors
