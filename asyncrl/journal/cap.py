"""The arithmetic of buffer.max_journal_gb: how large a group may be, and what a run must keep."""

from __future__ import annotations

import math

from asyncrl.config import Config
from asyncrl.journal.journal import SEGMENT_BYTES
from asyncrl.journal.segments import CHECKSUM_BYTES
from asyncrl.wire import TOKEN_BYTES

_SEGMENTS_IN_CAP = 16
_LOOSE_SEGMENTS = 2
"""The one that is being written, and the oldest one that holds a group that is still needed."""


def segment_bytes(config: Config) -> int:
    """Segments are deleted whole, so they are small where the cap is."""
    return min(SEGMENT_BYTES, cap_bytes(config) // _SEGMENTS_IN_CAP)


def cap_bytes(config: Config) -> int:
    return int(config.buffer.max_journal_gb * 1e9)


def largest_group_bytes(config: Config) -> int:
    """The frame of a group (wire.encode_group) whose prompt and responses have their full length,
    with 256 bytes of rewards and their parts for each, and its checksum."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    samples = config.group_size * (256 + TOKEN_BYTES * response)
    return 1024 + 4 * prompt + samples + CHECKSUM_BYTES


def check_cap(config: Config) -> int:
    """Bytes that the run may have to keep at once. ValueError, with the numbers, for a cap that it
    would be stuck at."""
    needed_bytes = _needed_bytes(config)
    if needed_bytes > cap_bytes(config):
        raise ValueError(_too_small(config, needed_bytes))
    return needed_bytes


def in_gb(num_bytes: float) -> str:
    """In the unit of the setting, with three digits that count."""
    return f"{num_bytes / 1e9:.3g} GB"


def _steps_needed(config: Config) -> int:
    return config.checkpoint.keep_last + 2 * config.max_staleness + 1


def _needed_bytes(config: Config) -> int:
    groups = _steps_needed(config) * config.prompts_per_step
    return groups * largest_group_bytes(config) + _LOOSE_SEGMENTS * segment_bytes(config)


def _too_small(config: Config, needed_bytes: int) -> str:
    groups_bytes = needed_bytes - _LOOSE_SEGMENTS * segment_bytes(config)
    share = 1 - _LOOSE_SEGMENTS / _SEGMENTS_IN_CAP
    least = min(groups_bytes / share, groups_bytes + _LOOSE_SEGMENTS * SEGMENT_BYTES)
    return (
        f"buffer.max_journal_gb: {config.buffer.max_journal_gb:g} is too little: the run may have "
        f"to keep {_steps_needed(config)} steps (checkpoint.keep_last + 2 * max_staleness + 1) of "
        f"{config.prompts_per_step} groups (prompts_per_step) of "
        f"{in_gb(largest_group_bytes(config))} (group_size * data.max_response_length * "
        f"{TOKEN_BYTES} bytes and the prompt). Use {math.ceil(least / 1e6) / 1e3:g} or more, or "
        "make one of these smaller"
    )
