"""The report of a run: one HTML file that needs nothing else, and its pictures beside it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from asyncrl.disk import write_whole
from asyncrl.report.plots import draw_all
from asyncrl.report.reading import find_run, read_run
from asyncrl.report.rollouts import version_spans
from asyncrl.report.samples import Sample, choose
from asyncrl.report.summary import RunFacts, gather, headline, outcome, table
from asyncrl.run_dir import RunDir

TEXT_CHARACTERS = 600
"""Longer prompts and responses are shortened in the middle."""
_PICTURES = {
    "reward": (
        "Reward",
        "Mean reward of all groups that came in since the step before, those that were filtered "
        "included, and accuracy on held-out prompts.",
    ),
    "staleness": (
        "Staleness",
        "How old the trained tokens were, in policy versions. Each column is a step; the "
        "stronger the colour, the larger the share of its tokens.",
    ),
    "throughput": (
        "Throughput",
        "The learner's speed counts its waiting; that of the generators is their sum.",
    ),
    "shares": (
        "Where the time went",
        "The wall time of each process, from the begin of the run to its end, all its lives in one "
        "bar. Away: it was not there, or nothing is known of it.",
    ),
    "timeline": (
        "Who worked and who waited",
        "The same along the clock of the run: the colours fill each row by the share of time.",
    ),
    "updates": (
        "What a weight update costs",
        "Only what is blue holds up the learner, and only what is red the generators; all else "
        "goes on beside their work. Mean over the generators that serve a version.",
    ),
}


def report_run(name: str) -> int:
    """`asyncrl-launch report`: writes the report of a run and says where. Returns the exit code."""
    print(write_report(find_run(name)))
    return 0


def write_report(path: Path) -> Path:
    """Writes report/report.html and report/*.png into a run directory; returns the page.

    Any state of a run will do. Raises ValueError for a directory that cannot be read or written.
    """
    facts = gather(read_run(path))
    pictures = draw_all(facts)
    directory = path / "report"
    try:
        directory.mkdir(exist_ok=True)
        for name, png in pictures.items():
            (directory / f"{name}.png").write_bytes(png)
        page = directory / "report.html"
        write_whole(page, render(facts, pictures))
    except OSError as error:
        raise ValueError(f"the report cannot be written: {error}") from None
    return page


def render(facts: RunFacts, pictures: dict[str, bytes]) -> str:
    """The page as HTML, with the PNGs in it. Everything that a model or a user wrote is escaped."""
    run = facts.run
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((Path(__file__).parent / "page.html").read_text())
    config = RunDir(run.path).config
    return template.render(
        name=run.name,
        path=run.path.resolve(),
        outcome=outcome(run),
        headline=headline(facts),
        pictures=[_picture(name, png) for name, png in pictures.items()],
        table=table(facts),
        samples=[_sample(sample) for sample in choose(run)],
        config=config.read_text() if config.exists() else "there is none",
        logs=run.path / "logs",
    )


def shortened(text: str) -> str:
    """Begin and end of a long text."""
    if len(text) <= TEXT_CHARACTERS:
        return text
    half = TEXT_CHARACTERS // 2
    return f"{text[:half]} […] {text[-half:]}"


def _picture(name: str, png: bytes) -> dict[str, str]:
    title, caption = _PICTURES[name]
    return {"title": title, "caption": caption, "data": base64.b64encode(png).decode()}


def _sample(sample: Sample) -> dict[str, Any]:
    group, rollout = sample.group, sample.rollout
    facts = [f"group {group.group}", group.fate + (f": {group.reason}" if group.reason else "")]
    if group.step is not None:
        facts.append(f"step {group.step}, staleness {group.staleness}")
    if rollout is not None:
        reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
        facts += [f"reward {reward}", rollout.finish_reason, version_spans(rollout.versions)]
    facts.append(group.generator)
    return {
        "title": sample.title,
        "facts": " · ".join(facts),
        "note": group.note,
        "prompt": shortened(group.prompt),
        "response": shortened(rollout.text) if rollout else "",
    }
