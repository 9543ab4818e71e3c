"""What a generator needs besides its engine, for test modules that have a fixture `config`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.config.schema import Config
from generators.rewards import RewardWorkers
from generators.tokens import Tokens


@pytest.fixture(scope="module")
def rewards(config: Config) -> Iterator[RewardWorkers]:
    workers = RewardWorkers(config.reward)
    workers.start()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def tokens(config: Config) -> Tokens:
    return Tokens(config)
