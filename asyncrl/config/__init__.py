"""Configuration: schema (the tree), load (files, overrides, errors), presets (algorithms)."""

from asyncrl.config.schema import Config

__all__ = ["Config"]
