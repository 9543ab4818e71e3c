"""Groups of gloo: who meets whom, how long anything takes, and what is left of it."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from asyncrl.process_groups import Disposable, Group, GroupError, Meeting, Seat

CPU = torch.device("cpu")
ROOM_S = 3.0
"""For a loaded machine, beyond a deadline."""


@contextmanager
def meeting(host: str = "127.0.0.1") -> Iterator[Meeting]:
    with closing(Meeting(host, timeout_s=5)) as open_meeting:
        yield open_meeting


def seat_at(place: Meeting, rank: int, *, size: int = 2, prefix: str = "weights-0.1-1") -> Seat:
    return Seat(place.host, place.port, prefix, rank, size, "gloo")


def join(seat: Seat, *, join_s: float = 10, stall_s: float = 10, store: object = None) -> Group:
    return Group(seat, device=CPU, join_s=join_s, stall_s=stall_s, store=store)  # type: ignore[arg-type]


def bytes_of(number: int, length: int = 10) -> torch.Tensor:
    return torch.full((length,), number, dtype=torch.uint8)


def receive_one(seat: Seat) -> torch.Tensor:
    data = bytes_of(0)
    with closing(join(seat)) as group:
        group.broadcast(data)
    return data


def send_to_one(place: Meeting, *, prefix: str = "weights-0.1-1") -> None:
    """One broadcast from this thread to another one."""
    receiver = Disposable(lambda: receive_one(seat_at(place, 1, prefix=prefix)), name="receiver")
    with closing(join(seat_at(place, 0, prefix=prefix), store=place.store)) as group:
        group.broadcast(bytes_of(7))
        assert receiver.result(timeout_s=10).tolist() == [7] * 10


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def num_open() -> tuple[int, int]:
    """Files and sockets; threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@contextmanager
def ends_within(limit_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s + ROOM_S


@pytest.mark.parametrize(
    ("host", "others"),
    [
        ("127.0.0.1", ["127.0.0.2", "::1"]),
        ("127.0.0.2", ["127.0.0.1", "::1"]),
        ("::1", ["127.0.0.1"]),
        ("localhost", ["127.0.0.2"]),
    ],
)
def test_a_meeting_is_reachable_at_one_address_only(host: str, others: list[str]) -> None:
    try:
        place = Meeting(host, timeout_s=5)
    except OSError:
        pytest.skip(f"{host} is no address of this machine")
    with closing(place):
        assert can_connect(place.host, place.port)
        assert [other for other in others if can_connect(other, place.port)] == []
        send_to_one(place)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "nowhere.invalid"])
def test_a_meeting_is_on_one_interface_of_this_machine(host: str) -> None:
    with pytest.raises(OSError):
        Meeting(host, timeout_s=1)


def test_the_sender_says_who_is_missing() -> None:
    with meeting() as place:
        second = Disposable(lambda: join(seat_at(place, 2, size=4), join_s=1), name="second")
        with (
            ends_within(1),
            pytest.raises(GroupError, match=r"not everybody came to .*: rank 1, 3 of 4 is missing"),
        ):
            join(seat_at(place, 0, size=4), join_s=1, store=place.store)
        with pytest.raises(GroupError, match="the sender waits for others"):
            second.result(timeout_s=10)


def test_a_late_member_waits_no_longer_than_its_deadline_for_those_who_gave_up() -> None:
    with meeting() as place:
        with pytest.raises(GroupError):
            join(seat_at(place, 0), join_s=0.1, store=place.store)
        with ends_within(1), pytest.raises(GroupError, match="the sender waits for others"):
            join(seat_at(place, 1), join_s=1)


def test_a_member_hears_at_once_that_the_sender_has_gone() -> None:
    with meeting() as place:
        seat = seat_at(place, 1)
    with ends_within(0), pytest.raises(GroupError, match="Connection refused"):
        join(seat, join_s=60)


def test_groups_with_other_prefixes_do_not_meet() -> None:
    with meeting() as place:
        stranger = Disposable(
            lambda: join(seat_at(place, 1, prefix="weights-0.2-1"), join_s=1), name="stranger"
        )
        with pytest.raises(GroupError, match="rank 1 of 2 is missing"):
            join(seat_at(place, 0), join_s=1, store=place.store)
        with pytest.raises(GroupError):
            stranger.result(timeout_s=10)
        send_to_one(place, prefix="weights-0.3-1")


def test_nothing_is_left_of_fifty_groups_and_of_ten_that_failed() -> None:
    def one_that_fails() -> None:
        with meeting() as place, pytest.raises(GroupError):
            join(seat_at(place, 0), join_s=0.02, store=place.store)

    def one_that_works() -> None:
        with meeting() as place:
            send_to_one(place)

    one_that_works()  # what torch keeps for ever
    gc.collect()
    gc.disable()
    try:
        before = num_open()
        for _ in range(50):
            one_that_works()
        for _ in range(10):
            one_that_fails()
        wait_until_no_more_than(before)
    finally:
        gc.enable()


def wait_until_no_more_than(before: tuple[int, int]) -> None:
    """Threads end a moment after they have said what they had to say."""
    ends = time.monotonic() + ROOM_S
    while any(now > then for now, then in zip(num_open(), before, strict=True)):
        assert time.monotonic() < ends, (before, num_open())
        time.sleep(0.01)


def start_member(place: Meeting, rank: int, size: int) -> subprocess.Popen[str]:
    program = os.path.join(os.path.dirname(__file__), "group_member.py")
    command = [sys.executable, program, str(place.port), "weights-0.1-1", str(rank), str(size)]
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )


def broadcast_until_it_fails(group: Group) -> float:
    """Seconds that the failing broadcast took."""
    data = bytes_of(1, 1 << 16)
    with closing(group):
        while True:
            began = time.monotonic()
            try:
                group.broadcast(data)
            except GroupError:
                return time.monotonic() - began


@contextmanager
def group_with_member(stall_s: float) -> Iterator[tuple[Group, Disposable[float], int]]:
    """The sender's end, a thread that receives until it cannot, and the process id of a third
    member that has received a slice."""
    with meeting() as place, start_member(place, 2, 3) as member:
        try:
            receiver = Disposable(
                lambda: broadcast_until_it_fails(
                    join(seat_at(place, 1, size=3), join_s=60, stall_s=stall_s)
                ),
                name="receiver",
            )
            sender = join(seat_at(place, 0, size=3), join_s=60, stall_s=stall_s, store=place.store)
            sender.broadcast(bytes_of(1, 1 << 16))
            assert member.stdout is not None
            assert [member.stdout.readline() for _ in range(2)] == ["joined\n", "slice\n"]
            yield sender, receiver, member.pid
        finally:
            member.kill()


def test_a_killed_member_is_an_error_at_once_for_all_others() -> None:
    with group_with_member(stall_s=30) as (sender, receiver, pid):
        os.kill(pid, signal.SIGKILL)
        assert broadcast_until_it_fails(sender) < ROOM_S
        assert receiver.result(timeout_s=ROOM_S) < 2 * ROOM_S


def test_a_stopped_member_is_an_error_for_all_others_at_their_deadline() -> None:
    stall_s = 2.0
    with group_with_member(stall_s) as (sender, receiver, pid):
        os.kill(pid, signal.SIGSTOP)
        assert stall_s * 0.9 < broadcast_until_it_fails(sender) < stall_s + ROOM_S
        assert receiver.result(timeout_s=ROOM_S) < stall_s + ROOM_S


def test_a_receiver_gives_up_at_its_deadline_while_other_threads_go_on() -> None:
    """The interpreter's lock is free while a broadcast waits."""
    counted, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not is_over.wait(0.001):
            counted += 1

    with meeting() as place:
        receiver = Disposable(lambda: join(seat_at(place, 1), stall_s=1), name="receiver")
        sender = join(seat_at(place, 0), store=place.store)
        with closing(sender), closing(receiver.result(timeout_s=10)) as group:
            counter = threading.Thread(target=count)
            counter.start()
            with ends_within(1), pytest.raises(GroupError, match="gone or stands still"):
                group.broadcast(bytes_of(0))
            is_over.set()
            counter.join()
    assert counted > 100  # of nearly 1000


def test_only_bytes_go_out() -> None:
    with meeting() as place, closing(join(seat_at(place, 0, size=1), store=place.store)) as group:
        with pytest.raises(AssertionError):
            group.broadcast(torch.zeros(4, dtype=torch.bfloat16))
        group.broadcast(torch.zeros(4, dtype=torch.bfloat16).view(torch.uint8))


def test_a_thread_that_nobody_waits_for_tells_what_became_of_it() -> None:
    goes_on = threading.Event()
    waiting = Disposable(lambda: goes_on.wait(10), name="waiting")
    with pytest.raises(TimeoutError, match=r"no end within 0\.01 s"):
        waiting.result(timeout_s=0.01)
    goes_on.set()
    assert waiting.result(timeout_s=10) is True
    with pytest.raises(ZeroDivisionError):
        Disposable(lambda: 1 // 0, name="failing").result(timeout_s=10)
