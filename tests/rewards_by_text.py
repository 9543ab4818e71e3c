"""Reward functions of the tests, with verl's signature."""


def checksum(data_source, solution_str, ground_truth, extra_info):
    """Varies with the text and means nothing: gives scripted groups a spread."""
    return sum(map(ord, solution_str)) % 8 / 8


def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
