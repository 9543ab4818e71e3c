"""Rosters: who is sent which weights, whatever generators do."""

from __future__ import annotations

from itertools import pairwise

from asyncrl.messages import Hello, OpenGroup, Ready, Roster, Staged
from asyncrl.types import WeightId
from buffer.members import Member, Members
from buffer.transfers import JOIN_WINDOW_S, Transfers

V1, V2 = WeightId(1, 1), WeightId(1, 2)


class Scene:
    """A learner, generators, and the requests that they make."""

    def __init__(self, *names: str) -> None:
        self.members = Members(heartbeat_s=1.0)
        self.transfers = Transfers(self.members)
        self.num_requests = 0
        self.now = 0.0
        self.learner = self._hello("learner", "learner")
        self.generators = {name: self._hello("generator", name) for name in names}
        for member in self.generators.values():
            self.transfers.newer(member, WeightId(0, 0))

    def _hello(self, role: str, name: str) -> Member:
        hello = Hello(role=role, member=name, run_id=None, host="h", pid=1)  # type: ignore[arg-type]
        return self.members.hello(name.encode(), hello, now=0.0)

    def publish(self, weights: WeightId) -> None:
        self.transfers.publish(weights, b"manifest")

    def ready(self, *names: str, weights: WeightId = V1, error: str = "") -> None:
        for name in names:
            message = Ready(inc=1, version=weights.version, error=error)
            self.transfers.ready(self.generators[name], message, now=self.now)

    def close(self, weights: WeightId = V1) -> Roster | None:
        self.num_requests += 1
        return self.transfers.close_roster(weights, request=self.num_requests, now=self.now)

    def open(self, number: int, *, refused: dict[str, str] | None = None) -> bool:
        return self.transfers.open(
            OpenGroup(
                inc=1,
                version=1,
                roster=number,
                host="::1",
                port=1,
                backend="gloo",
                bucket_bytes=8,
                refused=refused or {},
            )
        )

    def opened(self, *names: str) -> Roster:
        """These are ready, and the roster of them has a sender that listens."""
        self.ready(*names)
        roster = self.close()
        assert roster is not None
        assert self.open(roster.roster)
        return roster

    def staged(self, name: str, number: int, *, error: str = "", is_lost: bool = False) -> None:
        message = Staged(inc=1, version=1, roster=number, error=error, is_lost=is_lost)
        self.transfers.staged(self.generators[name], message)


def names(roster: Roster | None) -> list[str]:
    assert roster is not None
    return [member.name for member in roster.members]


def test_a_roster_closes_when_everybody_is_ready_or_the_others_have_had_their_time() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    assert scene.close() is None
    scene.ready("a")
    assert scene.close() is None, "b is worth waiting for"
    scene.now = JOIN_WINDOW_S
    assert names(scene.close()) == ["a"]

    scene = Scene("a", "b")
    scene.publish(V1)
    scene.ready("a", "b")
    assert names(scene.close()) == ["a", "b"]


def test_seats_follow_one_another_and_are_known_once_the_sender_listens() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    for name, devices in (("a", ["cpu", "cpu"]), ("b", ["cpu"])):
        message = Ready(inc=1, version=1, devices=devices)
        scene.transfers.ready(scene.generators[name], message, now=0.0)
    roster = scene.close()
    assert roster is not None
    assert scene.transfers.seat(scene.generators["a"], V1) is None
    assert scene.open(roster.roster)
    seats = [scene.transfers.seat(scene.generators[name], V1) for name in ("a", "b")]
    assert [(seat.rank, seat.size) for seat in seats if seat] == [(1, 4), (3, 4)]


def test_the_same_request_gets_the_same_roster() -> None:
    scene = Scene("a")
    scene.publish(V1)
    scene.ready("a")
    first = scene.transfers.close_roster(V1, request=7, now=0.0)
    assert scene.transfers.close_roster(V1, request=7, now=1.0) is first
    assert names(first) == ["a"]
    assert first is not None
    assert scene.open(first.roster)
    again = scene.transfers.close_roster(V1, request=6, now=1.0)
    assert again is not None and not again.members
    assert scene.transfers.seat(scene.generators["a"], V1), "an old request ends no broadcast"


def test_members_of_a_group_that_was_never_opened_are_ready_again() -> None:
    scene = Scene("a")
    scene.publish(V1)
    scene.ready("a")
    scene.close()
    assert names(scene.close()) == ["a"]


def test_who_is_silent_after_a_broadcast_is_not_waited_for_and_comes_back_alone() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    first = scene.opened("a", "b")
    scene.staged("a", first.roster, error="the group broke", is_lost=True)
    outcome, is_complete = scene.transfers.outcome(first.roster)
    assert (outcome.failed, outcome.missing) == ({"a": "the group broke"}, ["b"])
    assert not is_complete, "b is alive as far as anybody knows"
    scene.ready("a")
    second = scene.close()
    assert names(second) == ["a"], "b is not waited for"
    assert second is not None
    scene.open(second.roster)
    scene.staged("a", second.roster)
    scene.ready("b")
    assert names(scene.close()) == ["b"]


def test_a_dead_generator_completes_the_outcome() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    roster = scene.opened("a", "b")
    scene.staged("a", roster.roster)
    scene.generators["b"].end("dead", since=0.0)
    outcome, is_complete = scene.transfers.outcome(roster.roster)
    assert (outcome.staged, list(outcome.failed), is_complete) == (["a"], ["b"], True)
    assert not outcome.missing, "the learner would ask again and again"


def test_nobody_waits_for_generators_after_the_end_of_the_run() -> None:
    scene = Scene("a")
    scene.publish(V1)
    roster = scene.opened("a")
    assert scene.transfers.outcome(roster.roster)[1] is False
    outcome, is_complete = scene.transfers.outcome(roster.roster, has_ended=True)
    assert (outcome.failed, is_complete) == ({"a": "the run has ended"}, True)


def test_a_refusal_is_told_once_and_ends_only_with_the_next_offer() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    scene.ready("a", error="tensor x is missing")
    assert scene.close() is None, "b is worth waiting for"
    scene.ready("b")
    roster = scene.close()
    assert roster is not None
    assert (names(roster), roster.refusals) == (["b"], {"a": "tensor x is missing"})
    scene.open(roster.roster)
    scene.staged("b", roster.roster)
    assert scene.close() is None
    seat = scene.transfers.seat(scene.generators["a"], V1)
    assert seat is not None and seat.is_over
    scene.publish(V2)
    scene.ready("a", weights=V2)
    scene.now = JOIN_WINDOW_S
    assert names(scene.close(V2)) == ["a"]


def test_a_newer_offer_ends_the_wait_for_the_older_one() -> None:
    scene = Scene("a")
    scene.publish(V1)
    scene.ready("a")
    scene.publish(V2)
    seat = scene.transfers.seat(scene.generators["a"], V1)
    assert seat is not None and seat.is_over
    closed = scene.close(V1)
    assert closed is not None and closed.is_over
    scene.ready("a", weights=V1)  # came too late
    assert scene.close(V2) is None


def test_a_learner_that_is_not_there_offers_nothing() -> None:
    scene = Scene("a")
    scene.publish(V1)
    scene.learner.end("dead", since=0.0)
    assert scene.transfers.newer(scene.generators["a"], WeightId(0, 0)) is None
    seat = scene.transfers.seat(scene.generators["a"], V1)
    assert seat is not None and seat.is_over
    scene.learner.alive = True
    assert scene.transfers.newer(scene.generators["a"], WeightId(0, 0)) is not None
    scene.transfers.withdraw()
    assert scene.transfers.newer(scene.generators["a"], WeightId(0, 0)) is None


def test_who_has_the_version_but_does_not_serve_it_yet_is_not_waited_for() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    roster = scene.opened("a", "b")
    scene.staged("a", roster.roster)
    scene.staged("b", roster.roster, error="no memory")
    scene.ready("b")
    assert names(scene.close()) == ["b"]


def test_refusals_are_told_when_nobody_else_is_there() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    scene.ready("a", error="tensor x is missing")
    scene.generators["b"].end("dead", since=0.0)
    roster = scene.close()
    assert roster is not None
    assert (roster.roster, roster.refusals) == (0, {"a": "tensor x is missing"})


def test_a_newer_offer_frees_those_whose_group_was_never_opened() -> None:
    scene = Scene("a")
    scene.publish(V1)
    scene.ready("a")
    assert names(scene.close()) == ["a"]  # the learner has news, and does not read the answer
    scene.publish(V2)
    seat = scene.transfers.seat(scene.generators["a"], V1)
    assert seat is not None and seat.is_over
    scene.ready("a", weights=V2)
    assert names(scene.close(V2)) == ["a"]


def test_a_suspect_is_sent_weights_although_others_are_always_ready() -> None:
    scene = Scene("good", "bad")
    rosters = [play_version(scene, version) for version in range(1, 200)]
    turns = [version for version, names in enumerate(rosters, 1) if names == ["bad"]]
    assert turns, "it was passed over for ever"
    waits = [later - earlier for earlier, later in pairwise(turns)]
    assert waits == sorted(waits), "it breaks every broadcast, and is tried more and more rarely"


def test_when_a_broadcast_is_lost_by_all_and_nobody_owns_up_each_gets_its_own() -> None:
    scene = Scene("good", "cut-off")
    scene.publish(V1)
    got: list[str] = []
    for _ in range(4):
        scene.ready(*(name for name in ("cut-off", "good") if name not in got))
        scene.now += JOIN_WINDOW_S
        roster = scene.close()
        if roster is None:
            continue
        assert scene.open(roster.roster)
        is_lost = "cut-off" in names(roster)
        for name in names(roster):
            error = "not everybody came" if is_lost else ""
            scene.staged(name, roster.roster, error=error, is_lost=is_lost)
            got += [] if is_lost else [name]
    assert got == ["good"], "one that cannot reach the learner keeps weights from the other"


def test_one_of_many_that_loses_every_broadcast_is_found_in_few_of_them() -> None:
    everybody = [f"generator-{number}" for number in range(64)]
    scene = Scene(*everybody)
    scene.publish(V1)
    got: set[str] = set()
    num_broadcasts = 0
    while len(got) < 63:
        scene.ready(*(name for name in everybody if name not in got))
        scene.now += JOIN_WINDOW_S
        roster = scene.close()
        if roster is None:
            continue
        assert scene.open(roster.roster)
        num_broadcasts += 1
        is_lost = "generator-17" in names(roster)
        for name in names(roster):
            error = "not everybody came" if is_lost else ""
            scene.staged(name, roster.roster, error=error, is_lost=is_lost)
            got |= set() if is_lost else {name}
    assert num_broadcasts <= 11
    assert got == {*everybody} - {"generator-17"}


def test_a_suspect_whose_turn_it_is_may_be_ready_a_moment_later_than_the_others() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    roster = scene.opened("a", "b")
    for name in ("a", "b"):
        scene.staged(name, roster.roster, error="the learner stood still", is_lost=True)
    roster = scene.opened("a")
    assert names(roster) == ["a"]
    scene.staged("a", roster.roster)
    scene.publish(V2)
    scene.ready("a", weights=V2)
    assert scene.close(V2) is None, "it is b's turn"
    scene.ready("b", weights=V2)
    assert names(scene.close(V2)) == ["b"]


def play_version(scene: Scene, version: int) -> list[str]:
    """Both are ready for each version at once, which takes a second; `bad` breaks its broadcasts.
    Returns who was in the roster."""
    weights = WeightId(1, version)
    scene.publish(weights)
    scene.ready("good", "bad", weights=weights)
    scene.now += 1.0
    roster = scene.close(weights)
    assert roster is not None
    scene.open(roster.roster)
    for name in names(roster):
        error = "the receiver is broken" if name == "bad" else ""
        scene.staged(name, roster.roster, error=error)
    return names(roster)


def test_who_cannot_be_in_the_group_leaves_the_roster_and_waits_for_the_next_offer() -> None:
    scene = Scene("a", "b")
    scene.publish(V1)
    scene.ready("a", "b")
    roster = scene.close()
    assert roster is not None
    assert scene.open(roster.roster, refused={"a": "it has no GPU"})
    seat, over = (scene.transfers.seat(scene.generators[name], V1) for name in ("b", "a"))
    assert seat is not None and (seat.rank, seat.size) == (1, 2)
    assert over is not None and (over.is_over, over.reason) == (True, "it has no GPU")
    assert scene.transfers.newer(scene.generators["a"], WeightId(0, 0)) is None
    scene.publish(V2)
    assert scene.transfers.newer(scene.generators["a"], WeightId(0, 0)) is not None
