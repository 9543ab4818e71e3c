"""The learner's loop against a scripted buffer on a real socket: what it says, and when."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learner_cases import make_config, make_groups, save_model

from asyncrl.config import Config
from asyncrl.messages import (
    Batch,
    Checkpointed,
    Commit,
    Committed,
    End,
    Fetch,
    Hello,
    Ok,
    Published,
    Record,
    Refused,
    Register,
    Registered,
    Waiting,
    Welcome,
)
from asyncrl.run_dir import RunDir
from asyncrl.transport import RefusedError, Reply, Server
from asyncrl.wire import Packet, encode_group
from learner.loop import Learner
from learner.ranks import start_ranks


class ScriptedBuffer:
    """Answers as a buffer whose batches are all ready; `heard` is what the learner said."""

    def __init__(self, *, num_steps: int, committed: int = 0) -> None:
        self.num_steps = num_steps
        self.committed = committed
        self.inc = 2 if committed else 1
        self.waiting: dict[int, int] = {}
        """How often Fetch of a step is answered by Waiting first."""
        self.waiting_for: dict[int, str] = {}
        """A step whose batch is not ready before the learner has said this."""
        self.failed = False
        self.fence_at: int | None = None
        self.heard: list[str] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> ScriptedBuffer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = Server("tcp://127.0.0.1:0", self._answer)
        self.address = server.address
        serving = asyncio.create_task(server.serve())
        self._ready.set()
        await self._stop.wait()
        serving.cancel()
        await server.close()

    async def _answer(self, peer: bytes, packet: Packet) -> Reply:
        message: Any = packet.message
        match message:
            case Hello():
                return Welcome(run_id="run", run_name="run", heartbeat_s=1, settings={})
            case Register():
                self.heard.append(f"register {message.checkpoint_version}")
                return Registered(inc=self.inc, committed=self.committed)
            case Fetch():
                return self._fetch(message.step)
            case Commit() if message.version == self.fence_at:
                return Refused(code="fenced", reason="learner 3 has registered")
            case Commit():
                self.heard.append(f"commit {message.version}")
                return Committed(stop=False)
            case Published():
                self.heard.append(f"published {message.inc}.{message.version}")
            case Checkpointed():
                self.heard.append(f"checkpointed {message.versions}")
        return Ok()

    def _fetch(self, step: int) -> Reply:
        if step >= self.num_steps:
            return End(reason="all steps are trained", failed=self.failed, records=[])
        self.waiting[step] = self.waiting.get(step, 0) - 1
        if self.waiting[step] >= 0 or self.waiting_for.get(step, "") not in ["", *self.heard]:
            return Waiting(step=step, reason="1 group is missing", records=[])
        record = Record(name="eval", step=step, values={"accuracy": 0.5})
        batch = Batch(
            step=step,
            max_staleness=step,  # the groups are all of version 0
            replayed=step < self.committed,
            records=[record],
        )
        return batch, tuple(encode_group(group) for group in make_groups(2, start=10 * step))


@pytest.fixture
def make_learner(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    model = save_model(tmp_path / "model")

    def make(buffer: ScriptedBuffer, **sections: Any) -> Learner:
        tree = make_config(model).model_dump()
        for name, values in sections.items():
            tree[name] = {**tree[name], **values}
        tree["weights"]["dir"] = str(tmp_path / "weights")
        config = Config.model_validate(tree)
        run_dir = RunDir(tmp_path / "run")
        (tmp_path / "run").mkdir(exist_ok=True)
        return Learner(config, run_dir, address=buffer.address, ranks=start_ranks())

    return make  # type: ignore[return-value]


def test_each_step_is_committed_then_published_and_the_run_ends_whole(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        assert make_learner(buffer).run() == 0
    committed = [said for said in buffer.heard if said.startswith("commit")]
    assert committed == ["commit 1", "commit 2", "commit 3"]
    assert "published 1.3" in buffer.heard
    for said in buffer.heard:
        if said.startswith("published"):
            version = said.split(".")[1]
            assert buffer.heard.index(f"commit {version}") < buffer.heard.index(said)
    assert (tmp_path / "run" / "checkpoints" / "version-00000003").is_dir()
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_seconds_by_phase_add_up_and_the_buffers_records_are_logged(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=2) as buffer:
        make_learner(buffer).run()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "time/step_s" in record]
    assert [record["step"] for record in steps] == [0, 1]
    for record in steps:
        phases = {k: v for k, v in record.items() if k.startswith("time/") and k != "time/step_s"}
        assert sum(phases.values()) == pytest.approx(record["time/step_s"])
        assert {"time/wait_batch_s", "time/forward_backward_s", "time/commit_s"} <= phases.keys()
    assert [r["eval/accuracy"] for r in records if "eval/accuracy" in r] == [0.5, 0.5]


def test_a_resumed_learner_replays_silently_and_publishes_at_the_committed_version(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=2) as first:
        make_learner(first).run()
    with ScriptedBuffer(num_steps=5, committed=4) as second:
        assert make_learner(second, checkpoint={"resume": "auto"}).run() == 0
    assert second.heard[0] == "register 2"
    published = [said for said in second.heard if said.startswith("published")]
    assert set(published) <= {"published 2.4", "published 2.5"}
    assert published[-1] == "published 2.5"
    assert [said for said in second.heard if said.startswith("commit")] == [
        "commit 3",
        "commit 4",
        "commit 5",
    ]


def test_a_learner_that_resumes_at_the_committed_version_publishes_at_once(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=2) as first:
        make_learner(first).run()
    with ScriptedBuffer(num_steps=2, committed=2) as second:
        assert make_learner(second, checkpoint={"resume": "auto"}).run() == 0
    assert second.heard == ["register 2", "published 2.2"]


def test_a_version_passed_over_is_published_while_there_is_nothing_to_train(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=2) as busy:
        make_learner(busy, weights={"publish_every": 3}).run()
    assert not [said for said in busy.heard if said.startswith("published")]
    with ScriptedBuffer(num_steps=2) as idle:
        idle.waiting_for[1] = "published 1.1"
        make_learner(idle, weights={"publish_every": 3}).run()
    assert [said for said in idle.heard if said.startswith("published")] == ["published 1.1"]


def test_a_fenced_learner_stops(make_learner: Callable[..., Learner]) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.fence_at = 2
        learner = make_learner(buffer)
        with pytest.raises(RefusedError, match="learner 3 has registered") as caught:
            learner.run()
        assert caught.value.code == "fenced"
        learner.line.close()


def test_a_failed_run_keeps_its_checkpoint_and_says_why(
    make_learner: Callable[..., Learner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedBuffer(num_steps=1) as buffer:
        buffer.failed = True
        assert make_learner(buffer).run() == 1
    assert "the run failed at version 1: all steps are trained" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "version-00000001").is_dir()
    assert not (tmp_path / "run" / "final").exists()


def test_tokens_over_the_bound_stop_the_learner_before_they_are_trained(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        honest = buffer._fetch

        def lies(step: int) -> Reply:
            reply = honest(step)
            if isinstance(reply, tuple) and isinstance(reply[0], Batch):
                return reply[0].model_copy(update={"max_staleness": 1}), reply[1]
            return reply

        monkeypatch.setattr(buffer, "_fetch", lies)
        learner = make_learner(buffer)
        with pytest.raises(RuntimeError, match="step 2 got tokens aged 2 to 2"):
            learner.run()
        learner.line.close()
    assert "commit 3" not in buffer.heard


def test_waiting_is_said_with_its_reason(
    make_learner: Callable[..., Learner],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.loop.SAY_WAITING_S", 0.0)
    with caplog.at_level(logging.INFO), ScriptedBuffer(num_steps=1) as buffer:
        buffer.waiting[0] = 2
        make_learner(buffer).run()
    assert "waiting for: 1 group is missing" in caplog.text
