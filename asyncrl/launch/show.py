"""`asyncrl-launch show`: prompts and responses of a run as text, with what became of them."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from asyncrl.journal.claim import NOTHING_KEPT, is_nothing_kept
from asyncrl.journal.tables import GroupRow
from asyncrl.launch.output import plain_console
from asyncrl.report.reading import RunRecords, find_rollouts, read_run
from asyncrl.report.rollouts import ShownGroup, ShownRollout, show, text_decoder, version_spans
from asyncrl.report.summary import fates_text


@dataclass(frozen=True, slots=True)
class Filter:
    """Which groups: those for which all that is given holds. Without any, the newest step's."""

    step: int | None = None
    prompt: str | None = None
    """EPOCH/POSITION."""
    fate: str | None = None

    @property
    def options(self) -> str:
        """As it is given on the command line; empty where nothing is."""
        given = {"--step": self.step, "--prompt": self.prompt, "--fate": self.fate}
        return " ".join(f"{name} {value}" for name, value in given.items() if value is not None)


def show_rollouts(name: str, *, wanted: Filter, limit: int, as_json: bool) -> int:
    """Prints the newest `limit` groups that are wanted. Returns the exit code.

    Raises ValueError when there is no such run or no such group.
    """
    run = read_run(find_rollouts(name))
    found = select(run, wanted)
    text = text_decoder(run)
    groups = [show(run, row, text) for row in found[-limit:]]
    if as_json:
        print(json.dumps([dataclasses.asdict(group) for group in groups]))
        return 0
    console = plain_console()
    for group in groups:
        for line in group_lines(group, run):
            console.print(line, soft_wrap=True)
    hint = _hint(run, shown=len(groups), found=len(found), wanted=wanted)
    console.print(hint, style="dim", soft_wrap=True)
    return 0


def select(run: RunRecords, wanted: Filter) -> list[GroupRow]:
    """Groups in order of admission. Raises ValueError, saying what there is, when there is none."""
    if is_nothing_kept(run.path):
        raise ValueError(f"{run.path}: {NOTHING_KEPT}")
    if not run.groups:
        raise ValueError(f"{run.path}: the journal holds no prompt yet")
    if not wanted.options:
        steps = [row.step for row in run.groups if row.step is not None]
        wanted = Filter(step=max(steps)) if steps else wanted
    found = [row for row in run.groups if _fits(row, wanted)]
    if not found:
        newest = max((row.step for row in run.groups if row.step is not None), default=None)
        steps_text = "no step was assigned" if newest is None else f"steps 0 to {newest}"
        raise ValueError(
            f"{run.path}: no prompt fits {wanted.options}. There are {steps_text}, and prompts: "
            f"{fates_text(run.fates)}"
        )
    return found


def group_lines(group: ShownGroup, run: RunRecords) -> Iterator[Text]:
    """One group for a terminal."""
    facts = [group.fate if group.step is None else f"{group.fate} in step {group.step}"]
    if group.staleness is not None:
        facts.append(f"staleness {group.staleness} of {_bound(run, group.step)}")
    if group.reason:
        facts.append(group.reason)
    facts += [f"attempt {group.attempt}", group.generator or "no generator"]
    if group.reward_mean is not None:
        facts.insert(0, f"reward {group.reward_mean:.3f}")
    yield Text(f"group {group.group}  ", style="bold").append("  ".join(facts), style="not bold")
    if group.note:
        yield Text(f"  {group.note}", style="yellow")
    if group.prompt:
        yield Text("  prompt", style="dim")
        yield Text(_indented(group.prompt))
    for number, rollout in enumerate(group.rollouts, 1):
        yield Text(f"  response {number}  {_rollout_facts(rollout)}", style="dim")
        yield Text(_indented(rollout.text))
    yield Text("")


def visible(text: str) -> str:
    """Control characters (a model may write any) made visible, but for line ends and tabs."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else c.encode("unicode_escape").decode()
        for c in text
    )


def parse_prompt(text: str) -> tuple[int, int]:
    """EPOCH/POSITION as numbers. Raises ValueError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ValueError(f"--prompt {text}: expected EPOCH/POSITION, as 0/17")
    return int(match[1]), int(match[2])


def _fits(row: GroupRow, wanted: Filter) -> bool:
    return (
        (wanted.step is None or row.step == wanted.step)
        and (wanted.fate is None or row.state == wanted.fate)
        and (wanted.prompt is None or (row.epoch, row.position) == parse_prompt(wanted.prompt))
    )


def _bound(run: RunRecords, step: int | None) -> int | None:
    return next((row.max_staleness for row in run.steps if row.step == step), None)


def _rollout_facts(rollout: ShownRollout) -> str:
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    parts = [f"{name} {value:g}" for name, value in rollout.reward_parts.items()]
    facts = [reward + (f" ({', '.join(parts)})" if parts else ""), rollout.finish_reason]
    return "  ".join([*facts, f"{rollout.num_tokens} tokens", version_spans(rollout.versions)])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text).splitlines() or [""])


def _hint(run: RunRecords, *, shown: int, found: int, wanted: Filter) -> str:
    which = f"for {wanted.options}" if wanted.options else "of the newest step"
    fates: Sequence[str] = [state for state in run.fates if state != "not_issued"]
    return (
        f"{shown} of {found} prompts {which}. Others: --step N, --prompt EPOCH/POSITION, "
        f"--fate {'|'.join(fates)}, --limit N"
    )
