"""A member of a group, as a process of its own: receives slices until nothing comes any more.

Arguments: port, prefix, rank, size. Prints a line when it is in the group, and after each slice.
"""

from __future__ import annotations

import sys

import torch

from asyncrl.process_groups import Group, Seat


def main() -> None:
    port, prefix, rank, size = sys.argv[1:]
    seat = Seat("127.0.0.1", int(port), prefix, int(rank), int(size), "gloo")
    group = Group(seat, device=torch.device("cpu"), join_s=60, stall_s=60)
    print("joined", flush=True)
    data = torch.zeros(1 << 16, dtype=torch.uint8)
    while True:
        group.broadcast(data)
        print("slice", flush=True)


if __name__ == "__main__":
    main()
