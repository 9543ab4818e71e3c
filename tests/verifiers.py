"""Reward functions that misbehave in the ways that users' do. Used by test_reward_workers.py."""

import asyncio
import os
import signal
import time

import numpy as np


def score(data_source, solution_str, ground_truth, extra_info):
    """Does what the response says."""
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "hang hard":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(600)
    if solution_str == "raise":
        raise KeyError("no such answer")
    if solution_str == "exit":
        os._exit(7)
    if solution_str == "numpy":
        return np.float32(0.5)
    if solution_str == "bool":
        return True
    if solution_str == "dict":
        return {"score": np.int64(1), "format": 0.25, "comment": "fine"}
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "1.0"
    return float(solution_str == ground_truth)


async def score_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return float(solution_str == ground_truth)


def missing_answer(data_source, solution_str, ground_truth, extra_info):
    raise LookupError("there is never an answer")


def slow(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.3)
    return 1.0


def hang_if_asked(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "hang":
        time.sleep(600)
    return 1.0
