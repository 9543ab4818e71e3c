"""Every message that crosses the wire between a program and the buffer.

A program sends a request and gets exactly one reply, matched by the request's number; replies may
come in any order, so a request that waits (LeaseRequest, Fetch, WatchWeights, Ready,
CloseRoster, AwaitStaged) holds up no other.
The one exception is Started, which is not answered. Any request may be answered by Refused.

| sender    | request       | reply                     |
|-----------|---------------|---------------------------|
| any       | Hello         | Welcome                   |
| any       | StatusRequest | Status                    |
| any       | Heartbeat     | Beat                      |
| any       | Leave         | Ok                        |
| generator | LeaseRequest  | Leases                    |
| generator | Started       | (none)                    |
| generator | Submit, Failed| Verdict                   |
| generator | WatchWeights  | Weights                   |
| generator | Ready         | Seat                      |
| generator | Staged, Served| Ok                        |
| learner   | Register      | Registered                |
| learner   | Fetch         | Batch, Waiting or End     |
| learner   | Commit        | Committed                 |
| learner   | Published, Checkpointed | Ok              |
| learner   | CloseRoster   | Roster                    |
| learner   | OpenGroup     | Ok                        |
| learner   | AwaitStaged   | Outcome                   |
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from asyncrl.log_limits import cut
from asyncrl.types import GroupId, WeightId

PROTOCOL = 4
"""Raised by any change to a message. Peers of another protocol are refused at Hello."""

Kind = Literal["train", "eval"]
Role = Literal["generator", "learner", "monitor"]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Text = Annotated[str, AfterValidator(cut)]
"""Words for people: they land in logs and in the journal, so they are cut where they are long."""
Name = Annotated[str, Field(max_length=255)]
"""What somebody or something is called; longer ones are refused."""
Seconds = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Settings = dict[str, str]
Pair = Annotated[list[Count], Field(min_length=2, max_length=2)]


class Message(BaseModel):
    """Base of all messages: unknown fields and wrong types are refused when decoding."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants"
    )


class Hello(Message):
    """First message on a connection, sent again whenever the buffer has forgotten it."""

    type: Literal["hello"] = "hello"
    role: Role
    member: Name
    """Unique for each life of a process, as `generator-0-8f3a`."""
    run_id: Name | None
    """Refused when it names another run; None takes whatever run the buffer serves."""
    protocol: int = PROTOCOL
    host: Name
    pid: int
    settings: Settings = {}
    """What must be the same on both sides (asyncrl/handshake.py). Empty for monitors."""

    @classmethod
    def here(
        cls, role: Role, *, name: str, run_id: str | None, settings: Settings | None = None
    ) -> Hello:
        """The hello of this process, in this life of it."""
        member = f"{name}-{secrets.token_hex(2)}"
        host, pid = socket.gethostname(), os.getpid()
        return cls(
            role=role, member=member, run_id=run_id, host=host, pid=pid, settings=settings or {}
        )


class Welcome(Message):
    """The member has joined. It checks `settings` against its own, as the buffer did."""

    type: Literal["welcome"] = "welcome"
    run_id: str
    run_name: str
    """Name of the run directory, under each program's own output_dir."""
    heartbeat_s: float
    settings: Settings


class Refused(Message):
    """The request is not carried out. `code` is for programs, `reason` for people."""

    type: Literal["refused"] = "refused"
    code: Literal[
        "hello_first", "wrong_run", "protocol", "mismatch", "fenced", "invalid", "stopping"
    ]
    reason: Text


class Ok(Message):
    type: Literal["ok"] = "ok"


class LeaseRequest(Message):
    """Asks for up to `slots` groups; answered when there is one, or empty after a few seconds."""

    type: Literal["lease_request"] = "lease_request"
    slots: Count
    serving: Pair
    """WeightId that the generator serves now."""

    @property
    def weights(self) -> WeightId:
        return WeightId(*self.serving)


class Lease(Message):
    """The right to generate one group."""

    type: Literal["lease"] = "lease"
    kind: Kind
    group: Pair
    attempt: Count
    seed_k: Count
    """Failures caused by content so far (versions.sample_seed)."""
    row: dict[str, Any]
    num_rollouts: Annotated[int, Field(ge=1)]
    temperature: float
    min_version: Count
    """Oldest version that may serve it. An eval lease pins the first served version >= this."""
    timeout_s: float
    """From Started to Submit; then the lease passes to another generator."""

    @property
    def group_id(self) -> GroupId:
        return GroupId(*self.group)


class Leases(Message):
    type: Literal["leases"] = "leases"
    leases: list[Lease]
    void: list[list[int]] = []
    """[epoch, position, attempt] of train leases that are the generator's no longer: it gives up
    what it still generates for them. Each is told at once; Beat tells those that were missed."""
    done: bool = False
    """True: the run has ended, there will be no further lease."""


class Started(Message):
    """Generation of a leased group began, served by `version`. Starts the lease's clock."""

    type: Literal["started"] = "started"
    kind: Kind
    group: Pair
    attempt: Count
    version: Count


class Submit(Message):
    """A finished group; one frame follows, made by wire.encode_group."""

    type: Literal["submit"] = "submit"
    kind: Kind
    group: Pair
    attempt: Count


class Failed(Message):
    """A leased group could not be finished."""

    type: Literal["failed"] = "failed"
    kind: Kind
    group: Pair
    attempt: Count
    reason: Text
    content: bool
    """True: the prompt or its answers caused it, another generator would fail too."""
    hopeless: bool = False
    """True: no further attempt can help (the prompt is too long). Its fate is dropped."""
    lengths: list[Count] = []
    """Of a group given up because its lease is void: tokens sampled so far of each rollout. They
    show what dropping late groups does to the lengths."""


class Verdict(Message):
    """Answer to Submit and Failed. Whatever it says, the sender may forget the group."""

    type: Literal["verdict"] = "verdict"
    verdict: Literal[
        "accepted", "filtered", "duplicate", "superseded", "stale", "unknown", "invalid"
    ]
    reason: Text = ""


class Heartbeat(Message):
    """Sent by a thread of its own: says that the process lives, and what it is doing."""

    type: Literal["heartbeat"] = "heartbeat"
    state: Text
    """What it does now, in words: "generating", "waiting for leases", "train step 7: backward"."""
    state_s: Seconds = 0.0
    """Seconds in this state."""
    seconds: Annotated[dict[str, Seconds], Field(max_length=64)] = {}
    """Seconds in each phase since the process started (clock.PhaseClock); they add up."""
    serving: Pair
    """Generator: weights that it serves. Learner: [inc, version] where it stands."""
    held: list[list[int]] = []
    """[epoch, position, attempt] of each train lease in hand."""
    num_running: Count = 0
    num_tokens: Count = 0
    """Generator: tokens sampled since the process started. Learner: tokens trained."""
    paused_s: Seconds = 0.0
    """Seconds the engine stood still for swaps since the process started."""


class Beat(Message):
    """Answer to a heartbeat: the newest published weights ride along."""

    type: Literal["beat"] = "beat"
    inc: Count
    version: Count
    void: list[list[int]] = []
    """Generator: those of Heartbeat.held that are its leases no longer."""
    done: bool


class Leave(Message):
    """The member ends now; its leases pass on at once."""

    type: Literal["leave"] = "leave"
    reason: Text
    is_done: bool = False
    """Learner: the run is over, and its last checkpoint and export are written."""


class WatchWeights(Message):
    """Answered when weights newer than `have` are published, or after a few seconds."""

    type: Literal["watch_weights"] = "watch_weights"
    have: Pair


class Weights(Message):
    """The newest published weights that can be taken; with transport `collective` one frame
    follows, their manifest (asyncrl/manifest.py)."""

    type: Literal["weights"] = "weights"
    inc: Count
    version: Count
    transport: Literal["none", "disk", "collective"]
    """none: there is nothing to take now. Either nothing was published, or the learner that has
    it is not there."""
    location: str = ""
    """For transport `disk`: the directory that holds them (weights manifest inside)."""


class Ready(Message):
    """This generator wants to be sent the offered weights, or says why it cannot take them.
    Answered when it has a seat, or after a few seconds with none yet: then it asks again."""

    type: Literal["ready"] = "ready"
    inc: Count
    version: Count
    devices: Annotated[list[Name], Field(max_length=64)] = []
    """Where each of its receivers (one for each tensor-parallel rank) takes them in: "cpu", or the
    UUID of a GPU."""
    error: Text = ""
    """Not empty: the manifest does not fit its model, and it stays with what it serves."""


class Seat(Message):
    """Where the members of a roster meet (asyncrl/process_groups.py)."""

    type: Literal["seat"] = "seat"
    roster: Count = 0
    """Its number; 0: there is no seat yet."""
    is_over: bool = False
    """True: there will be none. Ask what is newest."""
    reason: Text = ""
    """Why, where it is not that these weights are offered no longer."""
    host: Name = ""
    port: Count = 0
    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_bytes: Count = 0
    """Every broadcast but the last brings so many bytes of the flat buffer (manifest.Layout)."""
    rank: Count = 0
    """Of the generator's first receiver; the others follow it."""
    size: Count = 0


class Staged(Message):
    """A generator has left the group of a roster: with the whole version, verified, or without."""

    type: Literal["staged"] = "staged"
    inc: Count
    version: Count
    roster: Count
    error: Text = ""
    """Empty: it has the version."""
    is_lost: bool = False
    """True: the group failed under it, by another one's fault as far as it knows."""


class Served(Message):
    """A generator serves these weights from now on."""

    type: Literal["served"] = "served"
    inc: Count
    version: Count
    seconds: Annotated[dict[str, Seconds], Field(max_length=32)]
    """What each phase took at this generator: rendezvous, transfer, verify (both transports), wait
    (for an evaluation), pause, load, reset, resume. `stage` is the first three together."""


class Register(Message):
    """A learner takes over the run from the checkpoint of version `checkpoint_version`."""

    type: Literal["register"] = "register"
    checkpoint_version: Count
    config_digest: Name


class Registered(Message):
    type: Literal["registered"] = "registered"
    inc: Annotated[int, Field(ge=1)]
    committed: Count
    """Highest version ever committed. Versions below it are replayed and published silently."""


class Fetch(Message):
    """Asks for the batch of `step`; may be sent ahead of time (prefetch)."""

    type: Literal["fetch"] = "fetch"
    inc: Count
    step: Count


class Record(Message):
    """A record that the buffer made for metrics.jsonl; the learner, its only writer, logs it."""

    type: Literal["record"] = "record"
    name: Literal["eval", "buffer", "weights"]
    step: Count
    values: dict[str, float | int | str]


class Batch(Message):
    """The groups of one step, in admission order; one frame per group follows."""

    type: Literal["batch"] = "batch"
    step: Count
    max_staleness: Count
    """The bound in force when the batch was assigned."""
    replayed: bool
    """True: this step was committed before; the learner is catching up."""
    waited_for: Text = ""
    records: list[Record]


class Waiting(Message):
    """The batch of `step` is not complete yet: says in words and numbers what is missing."""

    type: Literal["waiting"] = "waiting"
    step: Count
    reason: Text
    checkpoint: bool = False
    """As in Committed: asked of a learner that has nothing else to do."""
    records: list[Record]


class End(Message):
    """There is no such step: the run has ended, and why."""

    type: Literal["end"] = "end"
    reason: Text
    failed: bool = False
    """True: the run cannot go on (say, no prompt gives a usable group); exit code 1."""
    stopped: bool = False
    """True: somebody asked for it; the run can be resumed, and has no final export."""
    records: list[Record]


class Commit(Message):
    """Step `version - 1` is trained: the learner's weights are now `version`."""

    type: Literal["commit"] = "commit"
    inc: Count
    version: Annotated[int, Field(ge=1)]
    metrics: dict[str, float]


class Committed(Message):
    """Answer to Commit."""

    type: Literal["committed"] = "committed"
    stop: bool
    """True: the run is being stopped. Train no further batch, fetch the End instead."""
    checkpoint: bool = False
    """True: the journal is near its cap; a checkpoint now lets it delete what is older."""


class Published(Message):
    """Weights can be taken: at `location`, or (transport `collective`) from the learner, as often
    as generators are ready for them; then one frame follows, their manifest."""

    type: Literal["published"] = "published"
    inc: Count
    version: Count
    transport: Literal["disk", "collective"]
    location: str = ""
    """For transport `disk`: the directory."""
    digest: Name
    """Hash over all tensors as published: same digest, same weights."""


class CloseRoster(Message):
    """Asks who is to be sent these weights. Answered when everybody who is there is ready, or some
    are and the others have had their time; after a few seconds with an empty roster."""

    type: Literal["close_roster"] = "close_roster"
    inc: Count
    version: Count


class RosterMember(Message):
    """One generator of a roster."""

    type: Literal["roster_member"] = "roster_member"
    name: Name
    devices: list[Name]
    """As in Ready: it has so many seats."""


class Roster(Message):
    """Who takes part in one broadcast. Refusals are said once."""

    type: Literal["roster"] = "roster"
    roster: Count
    """Its number; 0: nobody is ready."""
    is_over: bool = False
    """True: the buffer does not know this offer (it has restarted): publish it again."""
    members: list[RosterMember] = []
    refusals: dict[str, Text] = {}
    """By generator: why it cannot take these weights, in its own words."""


class OpenGroup(Message):
    """The sender listens: the members of the roster are told where, and come."""

    type: Literal["open_group"] = "open_group"
    inc: Count
    version: Count
    roster: Count
    host: Name
    port: Count
    backend: Literal["gloo", "nccl"]
    bucket_bytes: Annotated[int, Field(ge=1)]
    refused: dict[str, Text] = {}
    """By generator: why it cannot be in this group, and leaves the roster."""


class AwaitStaged(Message):
    """Asks what became of a roster. Answered when every member has left the group or is dead, or
    after `wait_s`, a few seconds at most."""

    type: Literal["await_staged"] = "await_staged"
    inc: Count
    version: Count
    roster: Count
    wait_s: Seconds


class Outcome(Message):
    """What became of a roster so far, by generator."""

    type: Literal["outcome"] = "outcome"
    staged: list[Name] = []
    """These have the whole version."""
    failed: dict[str, Text] = {}
    """These have not, and why, in their own words."""
    missing: list[Name] = []
    """These have said nothing yet."""


class Checkpointed(Message):
    """Checkpoints of these versions exist; payloads older than all of them may go."""

    type: Literal["checkpointed"] = "checkpointed"
    inc: Count
    versions: list[Count]


class StatusRequest(Message):
    type: Literal["status_request"] = "status_request"


class Status(Message):
    """What the run does now, for people and for tests (docs/watching.md names the keys)."""

    type: Literal["status"] = "status"
    values: dict[str, Any]


AnyMessage = Annotated[
    Hello
    | Welcome
    | Refused
    | Ok
    | LeaseRequest
    | Leases
    | Started
    | Submit
    | Failed
    | Verdict
    | Heartbeat
    | Beat
    | Leave
    | WatchWeights
    | Weights
    | Ready
    | Seat
    | Staged
    | Served
    | Register
    | Registered
    | Fetch
    | Batch
    | Waiting
    | End
    | Commit
    | Committed
    | Published
    | CloseRoster
    | Roster
    | OpenGroup
    | AwaitStaged
    | Outcome
    | Checkpointed
    | StatusRequest
    | Status,
    Field(discriminator="type"),
]
