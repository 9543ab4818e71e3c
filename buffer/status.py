"""Status: what the run does now, for people and for tests (docs/watching.md names the keys)."""

from __future__ import annotations

from typing import Any

from asyncrl.types import WeightId
from buffer.arrivals import mean
from buffer.groups import Group, State
from buffer.members import Member
from buffer.run import Run


def status_values(run: Run, *, now: float) -> dict[str, Any]:
    """Values of messages.Status."""
    return _progress(run) | _people(run, now) | _waits(run, now)


def _progress(run: Run) -> dict[str, Any]:
    books, policy, training = run.books, run.books.ledger.policy, run.books.training
    counts = {state.value: count for state, count in books.ledger.groups.counts.items() if count}
    rewards = books.tally.recent_rewards
    return {
        "step": policy.next_step,
        "version": policy.committed,
        "learner_version": training.position,
        "published": training.newest.version,
        "weights": _weights(run),
        "inc": training.inc,
        "max_steps": run.config.max_steps,
        "max_staleness": policy.max_staleness,
        "counts": counts,
        "admitted": policy.admitted,
        "trained": counts.get(State.TRAINED.value, 0),
        "filtered": counts.get(State.FILTERED.value, 0),
        "staleness": {str(age): count for age, count in sorted(books.tally.staleness.items())},
        "reward_mean": mean(rewards) if rewards else None,
        "learner_metrics": training.metrics,
        "evals": [{"step": r.step, **r.values} for r in books.evaluations.results],
        "forks": training.num_forks,
        "engine": run.members.engine(),
        "journal": books.room.values(),
    }


def _weights(run: Run) -> dict[str, Any]:
    """The newest publication, who serves it, and what the last one cost."""
    newest, alive = run.books.training.newest, run.members.alive()
    is_published = newest.inc > 0
    current = WeightId(newest.inc, newest.version)
    return {
        "transport": ("disk" if newest.location else "collective") if is_published else "",
        "num_generators": len(alive),
        "num_serving": sum(member.serving >= current for member in alive),
        **run.books.updates.last_values(),
    }


def _people(run: Run, now: float) -> dict[str, Any]:
    everybody = run.members.by_name.values()
    return {
        "members": [_member_values(run, m, now) for m in everybody if m.role != "monitor"],
        "leases": [_lease_values(run, group, now) for group in run.books.ledger.groups.leased()],
        "tokens_per_s": round(run.members.tokens_per_s(), 1),
        "time": run.watch.time_values(now=now),
    }


def _waits(run: Run, now: float) -> dict[str, Any]:
    end = run.end
    return {
        "waiting_for": "" if end else run.watch.waiting.text(now=now),
        "waiting_s": 0.0 if end else round(run.watch.waiting.seconds(now=now), 3),
        "stalled_s": 0.0 if end else round(run.watch.watchdog.still_s(now=now), 3),
        "ended": end.reason if end else "",
        "failed": end.failed if end else False,
        "stopped": end.stopped if end else False,
    }


def _member_values(run: Run, member: Member, now: float) -> dict[str, Any]:
    leases = [group for group in run.books.ledger.groups.leased() if group.member == member.name]
    ages = [run.watch.leases.age_s(group, now=now) for group in leases]
    is_suspended = member.alive and run.watch.suspension.is_suspended(member)
    state, state_s, version = member.state, now - member.state_since, member.serving.version
    if is_suspended:
        state = "suspended"
    if member.name == run.books.training.owner:
        version = run.books.training.position
        waited_s = run.watch.waiting.learner_s(now=now)
        if waited_s is not None and member.alive:
            state, state_s = f"waiting for step {version}", waited_s
    return {
        "name": member.name,
        "role": member.role,
        "host": member.host,
        "pid": member.pid,
        "alive": member.alive,
        "state": state,
        "state_s": round(state_s, 3),
        "seconds": member.seconds,
        "version": version,
        "inc": member.serving.inc,
        "last_seen_s": round(now - member.last_seen, 3),
        "leases": len(leases),
        "oldest_lease_s": round(max(ages, default=0.0), 3),
        "suspended": is_suspended,
        "num_running": member.num_running,
        "tokens": member.num_tokens,
        "tokens_per_s": round(member.tokens_per_s, 1),
        "paused_s": round(member.paused_s, 3),
    }


def _lease_values(run: Run, group: Group, now: float) -> dict[str, Any]:
    return {
        "group": str(group.id),
        "attempt": group.attempt,
        "member": group.member,
        "age_s": round(run.watch.leases.age_s(group, now=now), 3),
        "started": group.started_at is not None,
    }
