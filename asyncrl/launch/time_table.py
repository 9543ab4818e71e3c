"""Where the time of each process went, for a terminal: a bar, and what it is made of in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from asyncrl.states import AWAY, COLORS, STARTING, WORKING, is_waiting, percentages

SHOWN_GENERATORS = 6
"""With more of them, all generators together have one row."""
WIDE = 120
"""Columns of a terminal from which on it is told what the work was."""
Values = dict[str, Any]
_MARKS = {STARTING: "░", AWAY: "·"}


def time_tables(time: Sequence[Values], *, width: int) -> list[Table]:
    """The rows of a status' `time`: the last minutes, and the whole run where it is longer."""
    if not time:
        return []
    recent_s = max(sum(row["recent"].values()) for row in time)
    run_s = max(sum(row["run"].values()) for row in time)
    whole = time_table(
        time, "run", f"where the time went, whole run of {short(run_s)}", width=width
    )
    if run_s <= recent_s + 1.0:
        return [whole]
    title = f"where the time goes, last {short(recent_s)}"
    return [time_table(time, "recent", title, width=width), whole]


def time_table(time: Sequence[Values], key: str, title: str, *, width: int) -> Table:
    """One row for each process of which something is known in that time."""
    table = Table(
        *("process", "bar", "states", "work"),
        box=None,
        pad_edge=False,
        show_header=False,
        title=f"\n{title}",
        title_justify="left",
        title_style="dim",
    )
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[3].style = "dim"
    rows = _rows(time, key)
    is_wide = width >= WIDE
    bar_width = 24 if is_wide else 14
    room = width - bar_width - max((len(name) for name, _ in rows), default=0) - 6
    for name, seconds in rows:
        bar, work = time_bar(seconds, width=bar_width), work_text(seconds) if is_wide else ""
        states = folded(states_text(seconds), 0.65 * room if is_wide else room)
        table.add_row(name, bar, states, folded(work, 0.35 * room))
    return table


def time_bar(seconds: Mapping[str, float], *, width: int) -> Text:
    """`width` characters in the colours of the states; full ones work, pale ones start
    or wait."""
    bar = Text()
    for state, count in percentages(seconds, of=width).items():
        mark = _MARKS.get(state, "▒" if is_waiting(state) else "█")
        bar.append(mark * count, style="dim" if state == AWAY else COLORS[state])
    return bar


def states_text(seconds: Mapping[str, float]) -> str:
    """As `working 50%, starting 9%, waiting for a batch 40%, for the buffer 1%`; the numbers add
    up to 100."""
    shares = percentages(seconds)
    working = sum(share for state, share in shares.items() if state in WORKING)
    parts = [f"working {working}%"] if working else []
    parts += [f"{STARTING} {shares[STARTING]}%"] if STARTING in shares else []
    waiting = [f"{state} {share}%" for state, share in shares.items() if is_waiting(state)]
    parts += waiting[:1] + [text.removeprefix("waiting ") for text in waiting[1:]]
    return ", ".join([*parts, *([f"{AWAY} {shares[AWAY]}%"] if AWAY in shares else [])])


def work_text(seconds: Mapping[str, float]) -> str:
    """What the work was, as `54 training, 4 moving weights`; empty where it is of one kind."""
    shares = percentages(seconds)
    parts = [f"{share} {state}" for state, share in shares.items() if state in WORKING]
    return ", ".join(parts) if len(parts) > 1 else ""


def short(seconds: float | None) -> str:
    """As `0.4 s`, `42 s`, `3:07 min` or `2:05 h`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def folded(text: str, width: float) -> str:
    """In lines of this width that end between two parts, not within one."""
    lines: list[str] = []
    for part in text.split(", "):
        if lines and len(lines[-1]) + len(part) + 3 <= width:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",\n".join(lines)


def _rows(time: Sequence[Values], key: str) -> list[tuple[str, Mapping[str, float]]]:
    known = [row for row in time if row[key]]
    generators = [row for row in known if row["role"] == "generator"]
    if len(generators) <= SHOWN_GENERATORS:
        return [(row["process"], row[key]) for row in known]
    together: Counter[str] = Counter()
    for row in generators:
        together.update(row[key])
    others = [(row["process"], row[key]) for row in known if row["role"] != "generator"]
    return [*others, (f"{len(generators)} generators", together)]
