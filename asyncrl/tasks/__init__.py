"""Prompts and rewards: from files or procedural data sets to rows, from a path to a function."""
