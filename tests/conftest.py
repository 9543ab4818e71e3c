"""Fixtures for all tests, and the settings that each of them needs."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["tiny_fixtures", "generator_fixtures", "scripted_run_fixtures"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes depends on what else the machine does; tests have their own time-outs.
settings.register_profile("asyncrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("asyncrl")
