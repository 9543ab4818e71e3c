"""What can be wrong before an engine loads: data, reward, model, prompts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from asyncrl.address import Address
from asyncrl.config import Config
from asyncrl.journal.cap import check_cap
from asyncrl.launch.models import find_model
from asyncrl.launch.placement import visible_gpus
from asyncrl.tasks.prompts import check_prompts
from asyncrl.tasks.rewards import check_reward, resolve
from asyncrl.tasks.rows import load_rows
from asyncrl.versions import bound_in_words


def check_run(config: Config) -> Config:
    """All that a run needs. Returns the config with the model's directory in it.

    Raises ValueError.
    """
    check_cap(config)
    rows = load_rows(config)
    check_reward(config.reward.path, rows.train[0], timeout_s=config.reward.timeout_s)
    config = with_model(config, find_model(config.model.path))
    if num_overlong := check_prompts(config, rows):
        print(
            f"data: {num_overlong} of {len(rows.train) + len(rows.val)} prompts are over "
            f"data.max_prompt_length = {config.data.max_prompt_length} tokens and will be dropped",
            file=sys.stderr,
        )
    return config


def worst_case(config: Config) -> str:
    """A line about how far generators may be ahead of the learner."""
    return bound_in_words(
        max_staleness=config.max_staleness,
        groups_per_step=config.prompts_per_step,
        group_size=config.group_size,
        order=config.buffer.order,
    )


def check_generator(config: Config) -> Config:
    """The same for what a generator needs by itself: its rows come from the buffer."""
    resolve(config.reward.path)
    return with_model(config, find_model(config.model.path))


def check_port(config: Config) -> None:
    """Before a run directory is made for nothing: ValueError when network.buffer is taken."""
    address = Address.parse(config.network.buffer)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {address}: {error.strerror}. Is another run using this port? "
                "Set network.buffer to a free one"
            ) from None


def check_sender(config: Config) -> None:
    """What a learner of this machine needs to broadcast weights. Raises ValueError."""
    if config.transport == "disk":
        return
    if config.weights.backend == "nccl" and not visible_gpus():
        raise ValueError("weights.backend: nccl, but the learner has no GPU: use auto or gloo")
    host = config.weights.host
    if host is None:
        return
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ValueError(
            f"weights.host: cannot listen at {host}: {error.strerror}: name an address of the "
            "learner's machine, or use weights.transport=disk"
        ) from None


def with_model(config: Config, directory: Path) -> Config:
    """The config with this directory as model.path."""
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(directory)})}
    )
