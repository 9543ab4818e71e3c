"""Scripted generators and learners that talk to a real buffer over real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from asyncrl.client import Client
from asyncrl.config import Config
from asyncrl.handshake import member_settings
from asyncrl.messages import (
    Batch,
    Commit,
    Committed,
    End,
    Fetch,
    Heartbeat,
    Hello,
    Lease,
    LeaseRequest,
    Leave,
    Message,
    Published,
    Register,
    Registered,
    Started,
    StatusRequest,
    Submit,
    Verdict,
    Waiting,
)
from asyncrl.types import GroupId, Rollout, RolloutGroup, WeightId
from asyncrl.versions import sample_seed
from asyncrl.wire import Packet, decode_group, encode_group, view

CALL_S = 20.0
RewardOf = Callable[[GroupId, int], float | None]


def mixed(id: GroupId, sample: int) -> float:
    """Rewards that differ inside each group."""
    return float(sample % 2)


def make_config(**settings: Any) -> Config:
    """A configuration for scripted peers; dots in names are written as two underscores."""
    tree: dict[str, Any] = {
        "max_staleness": 0,
        "prompts_per_step": 4,
        "group_size": 2,
        "model": {"path": "none"},
        "data": {"train_files": ["none"], "shuffle": False, "max_response_length": 8},
        "reward": {"path": "none:none"},
        "network": {"heartbeat_s": 0.3, "buffer": "tcp://127.0.0.1:0"},
    }
    for name, value in settings.items():
        *sections, key = name.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return Config.model_validate(tree)


def rows(number: int, *, source: str = "words") -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}", "source": source, "answer": f"{i}", "extra": {}} for i in range(number)
    ]


def make_group(
    lease: Lease, *, version: int, inc: int = 0, reward_of: RewardOf = mixed, length: int = 3
) -> RolloutGroup:
    """Tokens depend on the seed and the version, as those of the scripted engine."""
    rollouts = []
    for sample in range(lease.num_rollouts):
        seed = sample_seed(0, lease.kind, *lease.group_id, sample, lease.seed_k)
        generator = np.random.default_rng([seed, version])
        rollouts.append(
            Rollout(
                token_ids=generator.integers(0, 100, length).astype(np.int32),
                logprobs=-generator.random(length).astype(np.float32),
                versions=np.full(length, version, np.int32),
                loss_mask=np.ones(length, np.bool_),
                finish_reason="stop",
                reward=reward_of(lease.group_id, sample),
            )
        )
    return RolloutGroup(
        id=lease.group_id,
        attempt=lease.attempt,
        source=str(lease.row["source"]),
        prompt_ids=np.arange(2, dtype=np.int32),
        temperature=lease.temperature,
        inc=inc,
        rollouts=tuple(rollouts),
    )


class Peer:
    """A member with one connection."""

    def __init__(self, address: str, role: Any, name: str, *, run_id: str | None = None) -> None:
        hello = Hello(role=role, member=name, run_id=run_id, host="test", pid=os.getpid())
        self.name = name
        self.client = Client(address, hello=hello)

    def fits(self, config: Config) -> Self:
        """Joins, from now on, as a member of a run with this configuration."""
        hello = self.client.hello
        settings = member_settings(config, hello.role)
        self.client.hello = hello.model_copy(update={"settings": settings})
        return self

    async def ask(self, message: Message, *frames: bytes) -> Any:
        return (await self.packet(message, *frames)).message

    async def packet(self, message: Message, *frames: bytes) -> Packet:
        return await self.client.call(message, frames=frames, deadline_s=CALL_S)

    async def leave(self) -> None:
        await self.ask(Leave(reason="the test says so"))

    async def status(self) -> dict[str, Any]:
        values: dict[str, Any] = (await self.ask(StatusRequest())).values
        return values

    async def close(self) -> None:
        await self.client.close()


class Generator(Peer):
    """Serves whatever is published, at once."""

    def __init__(self, address: str, name: str, *, reward_of: RewardOf = mixed) -> None:
        super().__init__(address, "generator", name)
        self.serving = WeightId(0, 0)
        self.reward_of = reward_of
        self.verdicts: list[Verdict] = []
        self.held: list[list[int]] = []

    async def lease(self, slots: int = 1) -> list[Lease]:
        request = LeaseRequest(slots=slots, serving=list(self.serving))
        leases: list[Lease] = (await self.ask(request)).leases
        return leases

    async def start(self, lease: Lease) -> None:
        await self.client.send(
            Started(
                kind=lease.kind,
                group=lease.group,
                attempt=lease.attempt,
                version=self.serving.version,
            )
        )

    async def submit(self, lease: Lease, *, version: int | None = None) -> Verdict:
        group = make_group(
            lease,
            version=self.serving.version if version is None else version,
            inc=self.serving.inc,
            reward_of=self.reward_of,
        )
        return await self.submit_frame(lease, encode_group(group))

    async def submit_frame(self, lease: Lease, frame: bytes) -> Verdict:
        message = Submit(kind=lease.kind, group=lease.group, attempt=lease.attempt)
        verdict: Verdict = await self.ask(message, frame)
        self.verdicts.append(verdict)
        return verdict

    async def beat(
        self,
        state: str = "generating",
        *,
        held: list[list[int]] | None = None,
        tokens: int = 0,
        state_s: float = 0.0,
        seconds: dict[str, float] | None = None,
    ) -> Any:
        beat = Heartbeat(
            state=state,
            state_s=state_s,
            seconds=seconds or {},
            serving=list(self.serving),
            held=held or [],
            num_tokens=tokens,
        )
        reply = await self.ask(beat)
        self.serving = max(self.serving, WeightId(reply.inc, reply.version))
        return reply

    async def work(self, *, slots: int = 2) -> None:
        """Generates until the run is done, with heartbeats beside it."""
        beats = asyncio.create_task(self.beat_for_ever())
        try:
            while True:
                request = LeaseRequest(slots=slots, serving=list(self.serving))
                reply = await self.ask(request)
                if reply.done:
                    return
                self.held = [[*lease.group, lease.attempt] for lease in reply.leases]
                for lease in reply.leases:
                    await self.start(lease)
                    await self.submit(lease)
                self.held = []
                await self.beat()
        finally:
            beats.cancel()

    async def beat_for_ever(self) -> None:
        while True:
            await self.beat(held=self.held)
            await asyncio.sleep(0.1)


class Learner(Peer):
    """Registers, fetches, commits and publishes; trains nothing."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address, "learner", name)
        self.inc = 0
        self.version = 0
        self.committed = 0
        self.batches: dict[int, tuple[Batch, tuple[bytes, ...]]] = {}
        self.waits: list[Waiting] = []
        self.records: list[Any] = []

    async def register(self, version: int = 0) -> Registered:
        reply: Registered = await self.ask(
            Register(checkpoint_version=version, config_digest="same")
        )
        self.inc, self.version, self.committed = reply.inc, version, reply.committed
        return reply

    async def fetch(self, step: int) -> Batch | End:
        """The batch of a step, or the End, however long it takes."""
        while True:
            packet = await self.packet(Fetch(inc=self.inc, step=step))
            reply = packet.message
            self.records += reply.records
            if isinstance(reply, Waiting):
                self.waits.append(reply)
                continue
            if isinstance(reply, Batch):
                self.batches[step] = (reply, tuple(bytes(view(frame)) for frame in packet.frames))
            return reply

    async def commit(self) -> bool:
        """The next version is trained and, unless it was before, published. True: the run is being
        stopped."""
        self.version += 1
        commit = Commit(inc=self.inc, version=self.version, metrics={"loss": 0.5})
        committed: Committed = await self.ask(commit)
        if self.version >= self.committed:
            await self.publish(self.version)
        return committed.stop

    async def publish(self, version: int) -> None:
        await self.ask(
            Published(
                inc=self.inc,
                version=version,
                transport="disk",
                location=f"/w/{version}",
                digest=f"{version}",
            )
        )

    async def train(self, *, stop_at: int | None = None) -> End | None:
        """Trains to the end, fetching the next batch ahead; or until version `stop_at`."""
        ahead = asyncio.create_task(self.fetch(self.version))
        try:
            while True:
                reply = await ahead
                if isinstance(reply, End):
                    await self.ask(Leave(reason="all is written", is_done=True))
                    return reply
                if self.version == stop_at:
                    return None
                ahead = asyncio.create_task(self.fetch(self.version + 1))
                if await self.commit():
                    return await self.end()
        finally:
            ahead.cancel()

    async def end(self) -> End:
        """The End, which there must be now."""
        reply = await self.fetch(self.version)
        assert isinstance(reply, End)
        return reply

    async def beat(
        self, state: str = "training", *, seconds: dict[str, float] | None = None
    ) -> Any:
        return await self.ask(
            Heartbeat(state=state, seconds=seconds or {}, serving=[self.inc, self.version])
        )

    def groups(self, step: int) -> list[RolloutGroup]:
        return [decode_group(frame) for frame in self.batches[step][1]]

    def trained_ids(self) -> list[GroupId]:
        return [group.id for step in sorted(self.batches) for group in self.groups(step)]

    def max_staleness(self) -> int:
        return max(
            step - group.oldest_version for step in self.batches for group in self.groups(step)
        )
