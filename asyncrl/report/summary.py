"""A run in a few numbers: what it was, how it ended, where the prompts and the time went."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from asyncrl.journal.claim import is_nothing_kept
from asyncrl.report.reading import RunRecords, in_order
from asyncrl.report.series import (
    EvalPoint,
    TrainedStep,
    evaluations,
    run_clock,
    sampling_speed,
    tokens_by_staleness,
    tokens_in,
    trained_steps,
)
from asyncrl.report.timeline import drawn_lanes, known_lanes
from asyncrl.report.updates import UpdateCost, brief, median, update_costs
from asyncrl.run_clock import RunClock
from asyncrl.shares import Lane, Shares, shares
from asyncrl.states import AWAY, is_waiting


class Line(NamedTuple):
    """One line of the table."""

    name: str
    value: str


class RunFacts(NamedTuple):
    """A run with everything that is computed from its records once."""

    run: RunRecords
    clock: RunClock
    steps: list[TrainedStep]
    evals: list[EvalPoint]
    lanes: list[Lane]
    """What each process did, on the clock of the run."""
    updates: list[UpdateCost]

    @property
    def shares(self) -> list[Shares]:
        """Where the wall time of each process went, over the whole run."""
        return shares(self.lanes, since_s=0.0, until_s=self.clock.total_s)


def gather(run: RunRecords) -> RunFacts:
    clock = run_clock(run)
    lanes = known_lanes(run, clock)
    steps = trained_steps(run)
    return RunFacts(run, clock, steps, evaluations(run), lanes, update_costs(run, steps))


def headline(facts: RunFacts) -> list[Line]:
    """The few numbers that come first."""
    steps, evals = facts.steps, facts.evals
    rewards = [r for step in steps if (r := step.number("buffer/reward_mean")) is not None]
    lines = [Line("steps", _steps(facts)), Line("wall time", duration(facts.clock.total_s))]
    if rewards:
        lines.append(
            Line("training reward, first and last step", f"{rewards[0]:.3f} → {rewards[-1]:.3f}")
        )
    if evals:
        values = [f"{point.accuracy:.3f}" for point in (evals[0], evals[-1])[: len(evals)]]
        lines.append(Line("held-out accuracy", " → ".join(values)))
    if steps:
        lines.append(Line("staleness", staleness_text(facts)))
    return lines + _waited_lines(facts)


def table(facts: RunFacts) -> list[Line]:
    """The summary in full; a line that a run gives no number for is left out."""
    run, steps = facts.run, facts.steps
    lines = [
        Line("run", str(run.path.resolve())),
        Line("outcome", outcome(run)),
        Line("model", str(run.setting("model.path"))),
        Line("algorithm", str(run.setting("algorithm"))),
        Line(
            "a step",
            f"{run.setting('prompts_per_step')} prompts, "
            f"{run.setting('group_size')} responses each",
        ),
        Line("max_staleness", bounds(run)),
        Line("steps", _steps(facts)),
        Line("prompts by fate", prompts_text(run)),
    ]
    if run.metrics:
        begin = min(record["time"] for record in run.metrics)
        lines.append(
            Line("first record", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)))
        )
        lines.append(Line("lives of the learner", str(_num_lives(run))))
    if facts.clock.total_s:
        lines.append(Line("wall time, pauses left out", duration(facts.clock.total_s)))
    if steps:
        lines += _step_lines(facts)
    lines += _update_lines(facts.updates)
    lines += [
        Line(f"held-out accuracy, version {point.version}", f"{point.accuracy:.3f}")
        for point in (facts.evals[:1] + facts.evals[1:][-1:])
    ]
    return lines + _waited_lines(facts)


def outcome(run: RunRecords) -> str:
    """How the run ended, as far as its journal knows."""
    if is_nothing_kept(run.path):
        return "not known: nothing is kept (buffer.durability is none)"
    if run.meta.get("end"):
        end = json.loads(run.meta["end"])
        return f"failed: {end['reason']}" if end["failed"] else str(end["reason"])
    max_steps = run.setting("max_steps")
    if isinstance(max_steps, int) and run.committed >= max_steps:
        return f"all {max_steps} steps of max_steps are trained"
    if run.committed == 0:
        return "no step was trained"
    return f"not at its end: {run.committed} steps are trained"


def prompts_text(run: RunRecords) -> str:
    """Its prompts by fate, where they are kept."""
    return "not known" if is_nothing_kept(run.path) else fates_text(run.fates)


def fates_text(fates: dict[str, int]) -> str:
    """As `60 = 48 trained + 12 filtered`."""
    if not fates:
        return "none were issued"
    parts = [f"{count} {state.replace('_', ' ')}" for state, count in in_order(fates).items()]
    return f"{sum(fates.values())} = {' + '.join(parts)}"


def staleness_text(facts: RunFacts) -> str:
    """Mean and maximum over all trained tokens, with the bound."""
    tokens = tokens_by_staleness(facts.steps)
    total = sum(tokens.values())
    if not total:
        return "no trained tokens"
    mean = sum(age * count for age, count in tokens.items()) / total
    highest = max(age for age, count in tokens.items() if count)
    return f"mean {mean:.2f}, max {highest} of {bounds(facts.run)}"


def bounds(run: RunRecords) -> str:
    """max_staleness; all of its values where it changed on resuming."""
    used = list(dict.fromkeys(step.max_staleness for step in run.steps))
    return ", then ".join(map(str, used)) if used else str(run.setting("max_staleness"))


def waiting_shares(facts: RunFacts) -> list[tuple[str, float]]:
    """Part of the time that it was there in which a process waited, for the learner and all
    generators together.

    Counted from the end of the first step: before it, everybody waits for engines to load.
    """
    if not facts.steps:
        return []
    since_s = facts.clock.seconds(facts.steps[0].at)
    lanes = drawn_lanes(facts.run, facts.lanes, facts.clock)
    found = shares(lanes, since_s=since_s, until_s=facts.clock.total_s)
    roles = (("learner", "learner"), ("generators", "generator"))
    waited = [(name, _waited([s for s in found if s.role == role])) for name, role in roles]
    return [(name, share) for name, share in waited if share is not None]


def duration(seconds: float) -> str:
    """As `42 s`, `3 min 07 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _step_lines(facts: RunFacts) -> list[Line]:
    steps = facts.steps
    lines = [Line("staleness of trained tokens", staleness_text(facts))]
    medians: list[tuple[str, str, Callable[[float], str]]] = [
        ("time/step_s", "median step", "{:.1f} s".format),
        ("time/wait_batch_s", "median wait for a batch", "{:.1f} s".format),
        ("train/tokens_per_s", "median speed of the learner", "{:,.0f} tokens/s".format),
    ]
    for name, title, form in medians:
        values = _numbers(steps, name)
        if values:
            lines.append(Line(title, form(statistics.median(values))))
    speeds = [speed for _, speed in sampling_speed(facts.run, facts.clock) if speed]
    if speeds:
        median = f"{statistics.median(speeds):,.0f} tokens/s"
        lines.append(Line("median speed of the generators", median))
    lines.append(Line("response tokens that came in", f"{tokens_in(facts.run):,}"))
    trained = sum(_numbers(steps, "train/num_tokens"))
    lines.append(Line("tokens trained, with prompts", f"{trained:,.0f}"))
    skipped = sum(_numbers(steps, "train/skipped"))
    if skipped:
        lines.append(Line("steps skipped, loss or gradient not finite", f"{skipped:.0f}"))
    return lines


def _update_lines(costs: Sequence[UpdateCost]) -> list[Line]:
    """Medians over versions."""
    medians = (
        ("learner blocked", median(cost.blocked_s for cost in costs)),
        ("staging", median(cost.seconds.get("stage") for cost in costs)),
        ("generator paused", median(cost.seconds.get("paused") for cost in costs)),
        ("from publication to serving", median(cost.propagation_s for cost in costs)),
    )
    lines = [
        Line(f"a weight update, median: {name}", brief(seconds))
        for name, seconds in medians
        if seconds is not None
    ]
    return [Line("versions that generators served", str(len(costs))), *lines] if costs else []


def _waited_lines(facts: RunFacts) -> list[Line]:
    shares = waiting_shares(facts)
    return [Line(f"{name} waited, after the first step", f"{share:.0%}") for name, share in shares]


def _numbers(steps: Iterable[TrainedStep], name: str) -> list[float]:
    return [value for step in steps if (value := step.number(name)) is not None]


def _steps(facts: RunFacts) -> str:
    max_steps = facts.run.setting("max_steps")
    done = facts.steps[-1].step + 1 if facts.steps else facts.run.committed
    return f"{done} of {max_steps}" if max_steps else str(done)


def _num_lives(run: RunRecords) -> int:
    return max(int(record.get("attempt", 1)) for record in run.metrics)


def _waited(those: Sequence[Shares]) -> float | None:
    states = [(state, s) for each in those for state, s in each.seconds.items() if state != AWAY]
    total = sum(s for _, s in states)
    return sum(s for state, s in states if is_waiting(state)) / total if total else None
