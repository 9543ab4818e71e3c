"""The screen of `asyncrl-launch status`: from the values of a Status to something to print."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.launch.time_table import short, time_tables
from asyncrl.report.reading import in_order
from asyncrl.report.updates import brief

SHOWN_LEASES = 5
SHOWN_GONE = 5
"""Dead members, and those that have left, that have a row."""
SHOWN_REFUSED = 2
LONG_STATE = 36
"""Characters of a state above which it stands below the table."""
_AND = re.compile("[,;:] ")
"""Between the parts of a state."""
WIDE = 110
"""Columns of a terminal from which on the table of members has all of its columns."""
MEMBER_COLUMNS = (
    *("member", "where", "state", "since", "version", "behind", "tokens/s", "leases", "heard"),
)
ONLY_WIDE = {"where", "behind", "heard"}
Values = dict[str, Any]


def screen(values: Values, *, width: int) -> RenderableType:
    """Everything on one screen of `width` columns, the most important first."""
    is_wide = width >= WIDE
    members = members_table(values, is_wide=is_wide)
    parts: list[RenderableType] = [_head(values), _waiting(values), members]
    parts += [Text(line, style="yellow") for line in state_lines(values)]
    parts += [Text(line, style="dim") for line in process_lines(values) if not is_wide]
    parts += [Text(line, style="yellow") for line in refused_lines(values)]
    parts += time_tables(values.get("time") or [], width=width)
    if values.get("leases"):
        parts.append(leases_table(values))
    return Group(*parts)


def _head(values: Values) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for name, text in head_lines(values):
        grid.add_row(name, Text(text))
    return grid


def head_lines(values: Values) -> list[tuple[str, str]]:
    """Run, progress, staleness, reward, speed and prompts, a line each."""
    speeds = {role: tokens_per_s(values, role) for role in ("learner", "generator")}
    lines = [
        ("step", progress_text(values)),
        ("weights", weights_text(values)),
        *([("last update", update)] if (update := update_text(values)) else []),
        ("staleness", staleness_text(values)),
        ("reward", reward_text(values)),
        (
            "tokens/s",
            f"generators {speeds['generator']:,.0f}, learner {speeds['learner']:,.0f}",
        ),
        ("prompts", prompts_text(values)),
    ]
    if "journal" in values:
        lines.append(("journal", journal_text(values)))
    return [("run", str(values["run"])), *lines] if values.get("run") else lines


def progress_text(values: Values) -> str:
    limit = values.get("max_steps")
    return f"{values['version']}{f' of {limit}' if limit else ''} trained"


def weights_text(values: Values) -> str:
    behind = values["version"] - values["published"]
    late = f", {behind} behind" if behind > 0 else ""
    weights = values.get("weights") or {}
    by = f" ({weights['transport']})" if weights.get("transport") else ""
    text = f"version {values['version']}, published {values['published']}{late}{by}"
    if weights.get("num_generators"):
        text += f", served by {weights['num_serving']} of {weights['num_generators']}"
    return text


def update_text(values: Values) -> str:
    """What the last update cost; empty where there was none yet."""
    weights = values.get("weights") or {}
    if "last_version" not in weights:
        return ""
    arrived_s, paused_s = weights["propagation_s"], weights["paused_s"]
    arrived = "" if arrived_s is None else f"{brief(arrived_s)} from publication to serving, "
    return f"version {weights['last_version']}: {arrived}engine paused {brief(paused_s)}"


def staleness_text(values: Values) -> str:
    """The bound, and how old the trained tokens were so far."""
    tokens = {int(age): count for age, count in values.get("staleness", {}).items()}
    total = sum(tokens.values())
    bound = f"bound {values['max_staleness']}"
    if not total:
        return f"{bound}, nothing trained yet"
    mean = sum(age * count for age, count in tokens.items()) / total
    parts = ", ".join(f"{age}: {count / total:.0%}" for age, count in sorted(tokens.items()))
    return f"{bound}, so far mean {mean:.2f}, max {max(tokens)} ({parts} of {total:,} tokens)"


def reward_text(values: Values) -> str:
    reward = values.get("reward_mean")
    text = (
        "no group has come in yet" if reward is None else f"{reward:.3f}, mean of the last groups"
    )
    evals = values.get("evals") or []
    if evals and "accuracy" in evals[-1]:
        newest = evals[-1]
        text += f"; held-out accuracy {newest['accuracy']:.3f} at version {newest['version']}"
    return text


def prompts_text(values: Values) -> str:
    counts = in_order(values["counts"])
    parts = " + ".join(f"{count} {state}" for state, count in counts.items())
    return f"{values['admitted']} issued" + (f" = {parts}" if parts else "")


def journal_text(values: Values) -> str:
    """How full it is, or that nothing is kept."""
    journal = values["journal"]
    size = f"{journal['num_bytes'] / 1e9:.3g} of {journal['cap_bytes'] / 1e9:.3g} GB"
    if journal["durability"] == "none":
        return f"nothing is kept when the buffer ends; {size} of finished groups in memory"
    return f"{size} of finished groups"


def tokens_per_s(values: Values, role: str) -> float:
    """Of all members of a role together."""
    those = [m for m in values["members"] if m["role"] == role]
    return sum(float(m.get("tokens_per_s") or 0.0) for m in those)


def _waiting(values: Values) -> Text:
    if values.get("ended"):
        how = "failed" if values.get("failed") else "has ended"
        return Text(f"\nthe run {how}: {values['ended']}\n", style="bold")
    waited = values.get("waiting_s")
    since = f" (for {short(waited)})" if waited else ""
    return Text(f"\nwaiting for: {values.get('waiting_for') or 'nothing'}{since}\n", style="bold")


def members_table(values: Values, *, is_wide: bool) -> Table:
    """One row for each process that is there, and for some of those that were."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    shown = [name for name in MEMBER_COLUMNS if is_wide or name not in ONLY_WIDE]
    for name in shown:
        is_text = name in ("member", "where", "state")
        justify: JustifyMethod = "left" if is_text else "right"
        table.add_column(name, justify=justify, no_wrap=name != "state")
    members = sorted(values["members"], key=lambda m: not m["alive"])
    num_alive = sum(member["alive"] for member in members)
    for member in members[: num_alive + SHOWN_GONE]:
        style = "red" if not member["alive"] else "yellow" if member.get("suspended") else ""
        cells = member_cells(member, values)
        table.add_row(*(cells[name] for name in shown), style=style)
    if len(members) > num_alive + SHOWN_GONE:
        table.add_row(f"and {len(members) - num_alive - SHOWN_GONE} more that are gone")
    if not members:
        table.add_row("nobody has joined")
    return table


def member_cells(member: Values, values: Values) -> dict[str, str]:
    """The cells of one row by column, in order."""
    newest = values["published"] if member["role"] == "generator" else values["version"]
    leases = member.get("leases")
    if leases is None:
        leases = sum(lease["member"] == member["name"] for lease in values.get("leases", []))
    is_generator = member["role"] == "generator"
    state = _state(member) if member["alive"] or member["state"] in ("dead", "left") else "dead"
    cells = (
        member["name"],
        f"{member['host']}:{member['pid']}",
        state,
        short(member.get("state_s")),
        str(member["version"]),
        str(max(0, newest - member["version"])),
        f"{member['tokens_per_s']:,.0f}",
        str(leases) if is_generator else "",
        f"{short(member['last_seen_s'])} ago",
    )
    return dict(zip(MEMBER_COLUMNS, cells, strict=True))


def _state(member: Values) -> str:
    """Without what makes it long."""
    state = str(member["state"])
    return state if len(state) <= LONG_STATE else f"{_AND.split(state)[0]} …"


def state_lines(values: Values) -> list[str]:
    """The states that are too long for the table."""
    there = [member for member in values["members"] if member["alive"]]
    return [f"{m['name']}: {m['state']}" for m in there if len(m["state"]) > LONG_STATE]


def process_lines(values: Values) -> list[str]:
    """Who runs where with which pid, a line for each host: for a table that has no room for it."""
    by_host: dict[str, list[str]] = {}
    for member in values["members"]:
        if member["alive"]:
            by_host.setdefault(member["host"], []).append(f"{member['name']} {member['pid']}")
    return [f"pids on {host}: {', '.join(members)}" for host, members in by_host.items()]


def refused_lines(values: Values) -> list[str]:
    """Who was not let in of late, and why."""
    refused = values.get("refused_members") or []
    return [f"refused {one['name']}: {one['reason']}" for one in refused[-SHOWN_REFUSED:]]


def leases_table(values: Values) -> Table:
    """The oldest groups in hand."""
    leases = sorted(values["leases"], key=lambda lease: -lease["age_s"])
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title=f"\noldest of {len(leases)} leases",
        title_justify="left",
        title_style="dim",
    )
    for name in ("group", "attempt", "at", "for", ""):
        table.add_column(name, no_wrap=name != "at")
    for lease in leases[:SHOWN_LEASES]:
        begun = "generating" if lease["started"] else "not started"
        table.add_row(
            lease["group"], str(lease["attempt"]), lease["member"], short(lease["age_s"]), begun
        )
    return table
