"""What a process does with its time: one set of words for all programs (docs/watching.md).

A process is in exactly one state. The phases of its clock (clock.PhaseClock) say which.
"""

from __future__ import annotations

from collections.abc import Mapping

WORKING = (
    *("training", "training again", "generating", "scoring", "serving"),
    *("moving weights", "saving", "other"),
)
"""States in which a process gets something done."""
STARTING = "starting"
"""It is not ready to work yet."""
WAITING_FOR = (
    *("a batch", "leases", "generators", "the learner", "requests"),
    "the buffer",
)
"""What a process may wait for."""
AWAY = "away"
"""The process is not there: not yet, no more, or killed and not back."""
STATES = (*WORKING, STARTING, *(f"waiting for {what}" for what in WAITING_FOR), AWAY)
"""All states, in the order in which they are shown."""
COLORS = {
    **dict.fromkeys(("training", "generating", "serving"), "#3d84c6"),
    "training again": "#86bfe8",
    "scoring": "#d2699a",
    "moving weights": "#9a6fc4",
    "saving": "#4fa36c",
    "other": "#6c7681",
    STARTING: "#a9b1ba",
    **dict.fromkeys(("waiting for a batch", "waiting for leases"), "#e8912d"),
    "waiting for generators": "#e8912d",
    "waiting for the learner": "#f2bd7e",
    "waiting for requests": "#f6e3c8",
    "waiting for the buffer": "#d1443c",
    AWAY: "#ffffff",
}
"""In pictures and on screens: blue works, grey starts, orange waits, red waits for a buffer that
does not answer. A colour is shared where processes of different roles do, or wait, alike."""

_STATE_OF_PHASE = {
    **dict.fromkeys(("prepare", "forward_backward", "optimizer", "other", "log"), "training"),
    "wait_batch": "waiting for a batch",
    **dict.fromkeys(("commit", "wait_buffer"), "waiting for the buffer"),
    **dict.fromkeys(("snapshot", "drain", "swapping"), "moving weights"),
    **dict.fromkeys(("checkpoint", "export"), "saving"),
    **dict.fromkeys(("start", "starting"), STARTING),
}


def state_of(phase: str) -> str:
    """The state that a phase of a process's clock is; `other` for a phase that is not known."""
    state = _STATE_OF_PHASE.get(phase, phase)
    return state if state in STATES else "other"


def is_waiting(state: str) -> bool:
    """Whether a process in this state waits for somebody else."""
    return state.startswith("waiting for ")


def percentages(seconds: Mapping[str, float], *, of: int = 100) -> dict[str, int]:
    """Whole percent (or parts of another whole) of each, in the order of STATES, those with none
    left out; they add up to `of`. Empty when there are no seconds."""
    total = sum(seconds.values())
    if total <= 0:
        return {}
    exact = {state: of * seconds.get(state, 0.0) / total for state in STATES}
    parts = {state: int(share) for state, share in exact.items()}
    nearest = sorted(STATES, key=lambda state: parts[state] - exact[state])
    for state in nearest[: of - sum(parts.values())]:
        parts[state] += 1
    return {state: share for state, share in parts.items() if share}
