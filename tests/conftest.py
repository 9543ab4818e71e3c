"""Fixtures for all tests, and the settings that each of them needs."""

from __future__ import annotations

import os

pytest_plugins = ["tiny_fixtures"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on the network
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
