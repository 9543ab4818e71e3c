"""The claims about weights, as numbers of one run of bench_weights.py, and its tables."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.table import Table

WAYS = {
    "gloo": "gloo, staged",
    "gloo_slow": "gloo, staged, 50 MB/s",
    "none": "gloo, none",
    "none_slow": "gloo, none, 50 MB/s",
    "disk": "disk",
    "local": "load alone",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One number and what it is to be."""

    words: str
    number: float
    target: str
    is_met: bool


def median(rounds: list[dict[str, float]], key: str) -> float:
    return statistics.median(each[key] for each in rounds)


def claims(result: dict[str, Any]) -> list[Claim]:
    alone, pair = (
        {name: statistics.median(taken) for name, taken in result[f"alone_{n}"].items()}
        for n in (1, 2)
    )
    paused = {way: median(result[way], "paused_s") for way in WAYS}
    speed = pair["broadcast"] / median(result["idle"], "transfer_s")
    shortest = result["num_bytes"] / 50e6
    return [
        _at_most("snapshot / bare copy_, 1 rank", alone["snapshot"] / alone["copy"], 1.5),
        _at_most("snapshot / bare all-gathers, 2 ranks", pair["snapshot"] / pair["gathers"], 1.5),
        _below(
            "staged pause, slowed to 50 MB/s / unslowed: off 1 by",
            abs(paused["gloo_slow"] / paused["gloo"] - 1),
            0.2,
        ),
        _at_most("staged pause / pause + load alone", paused["gloo"] / paused["local"], 1.2),
        _at_most("the same, slowed to 50 MB/s", paused["gloo_slow"] / paused["local"], 1.2),
        _at_least("none, slowed: pause / bytes at 50 MB/s", paused["none_slow"] / shortest, 1.0),
        _at_least("transfer / one gloo broadcast, in speed, engine idle", speed, 0.5),
        _at_least("tokens/s during staging / before", kept_tokens(result["gloo"]), 0.7),
        _at_least("the same, slowed to 50 MB/s", kept_tokens(result["gloo_slow"]), 0.7),
    ]


def kept_tokens(rounds: list[dict[str, float]]) -> float:
    """Tokens sampled while versions were taken in, as a share of those sampled in as much time
    before; of all rounds together, as one may be shorter than a step of the engine."""
    expected = sum(each["staging_s"] * each["tokens_per_s_before"] for each in rounds)
    return sum(each["tokens_during"] for each in rounds) / max(1.0, expected)


def ways_table(result: dict[str, Any]) -> Table:
    """Median (smallest - largest) of each way that a version came."""
    title = f"{result['model']}, {result['num_bytes'] / 1e6:.1f} MB: seconds of one version"
    shown = Table(title=title)
    shown.add_column("way")
    for name in ("transfer", "checksums", "engine paused", "served after", "tokens/s kept"):
        shown.add_column(name, justify="right")
    for way, words in WAYS.items():
        rounds = result[way]
        kept = "-" if way in ("none", "none_slow") else f"{100 * kept_tokens(rounds):.0f} %"
        keys = ("transfer_s", "verify_s", "paused_s", "published_to_served_s")
        shown.add_row(words, *(_spread(rounds, key) for key in keys), kept)
    return shown


def claims_table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title="Claims")
    shown.add_column("model")
    shown.add_column("claim")
    for name in ("number", "target", ""):
        shown.add_column(name, justify="right")
    for result in results:
        for claim in result["claims"]:
            verdict = "[green]met[/]" if claim["is_met"] else "[bold red]missed[/]"
            row = (claim["words"], f"{claim['number']:.2f}", claim["target"], verdict)
            shown.add_row(result["model"], *row)
        shown.add_section()
    return shown


def _spread(rounds: list[dict[str, float]], key: str) -> str:
    values = [each[key] for each in rounds]
    return f"{statistics.median(values):.3f} ({min(values):.3f} - {max(values):.3f})"


def _at_most(words: str, number: float, limit: float) -> Claim:
    return Claim(words, number, f"<= {limit:g}", number <= limit)


def _below(words: str, number: float, limit: float) -> Claim:
    return Claim(words, number, f"< {limit:g}", number < limit)


def _at_least(words: str, number: float, limit: float) -> Claim:
    return Claim(words, number, f">= {limit:g}", number >= limit)
