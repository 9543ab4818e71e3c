"""The learner's loop against a scripted buffer on a real socket: what it says, and when."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learner_cases import make_config, save_model
from safetensors import SafetensorError
from scripted_buffer import ScriptedBuffer

from asyncrl.client import RefusedError
from asyncrl.clock import PhaseClock
from asyncrl.config import Config
from asyncrl.messages import Batch
from asyncrl.run_dir import RunDir
from asyncrl.transport import Reply
from learner.__main__ import live_sides
from learner.joining import join
from learner.loop import Learner
from learner.ranks import start_ranks


@pytest.fixture
def make_learner(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    model = save_model(tmp_path / "model")
    made: list[Learner] = []

    def make(buffer: ScriptedBuffer, *, name: str = "run", **sections: Any) -> Learner:
        tree = make_config(model).model_dump()
        for section, values in sections.items():
            tree[section] = {**tree[section], **values}
        tree["weights"]["dir"] = str(tmp_path / "weights")
        config = Config.model_validate(tree)
        run_dir = RunDir(tmp_path / name)
        run_dir.path.mkdir(exist_ok=True)
        clock = PhaseClock("start")
        joined = join(config, run_dir, address=buffer.address, clock=clock)
        ranks = start_ranks()
        line, outlet = live_sides(joined, config, run_dir, ranks)
        learner = Learner(config, run_dir, line=line, outlet=outlet, ranks=ranks, clock=clock)
        made.append(learner)
        learner.take_over()
        return learner

    yield make
    for learner in made:
        learner.outlet.close(drain_s=0.0)
        learner.line.close("the test is over")


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
    assert buffer.heard[-1] == "leave: the run has ended at version 3: all steps are trained"
    assert not list((tmp_path / "weights").iterdir()), "nobody needs the published weights now"


def test_a_stop_ends_the_run_after_the_step_with_a_checkpoint_and_without_an_export(
    make_learner: Callable[..., Learner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedBuffer(num_steps=5) as buffer:  # whose batches are all ready: fetched ahead
        buffer.stop_at = 2
        assert make_learner(buffer).run() == 0
        with_batch_2 = buffer.num_fetched[2]
    assert buffer.said("commit") == ["commit 1", "commit 2"]
    assert with_batch_2 == 1, "batch 2 was there, and was given up"
    assert (tmp_path / "run" / "checkpoints" / "version-00000002").is_dir()
    assert not (tmp_path / "run" / "final").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "version 2 is in a checkpoint: stopped by SIGINT"


def test_a_stop_ends_a_learner_that_waits_for_a_batch_and_the_run_goes_on_later(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.waiting[1] = 3
        buffer.on_waiting = lambda step: setattr(buffer, "is_stopping", step == 1)
        assert make_learner(buffer).run() == 0
    assert buffer.said("commit") == ["commit 1"]
    with ScriptedBuffer(num_steps=3, committed=1) as later:
        assert make_learner(later).run() == 0
    assert later.said("register") == ["register 1"]
    assert later.said("commit") == ["commit 2", "commit 3"]
    assert (tmp_path / "run" / "final").exists()


def test_signs_of_life_say_in_words_what_the_learner_does_and_their_seconds_add_up(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.waiting[2] = 20
        began = time.monotonic()
        learner = make_learner(buffer)
        assert learner.run() == 0
        took = time.monotonic() - began
    states = [beat.state for beat in buffer.beats]
    assert "starting" in states
    assert "waiting for the batch of step 2" in states
    last = buffer.beats[-1]
    assert last.serving[0] == 1
    assert 0 < last.num_tokens <= learner.num_tokens
    for beat in buffer.beats:
        assert sum(beat.seconds.values()) < took
        assert beat.state_s <= sum(beat.seconds.values()) + 0.01


def test_a_buffer_that_was_stopped_and_came_back_gets_the_batch_trained_after_all(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.stop_at = 1
        buffer.on_commit = lambda: setattr(buffer, "is_stopping", False)  # as after a restart
        assert make_learner(buffer).run() == 0
    assert buffer.said("commit") == ["commit 1", "commit 2", "commit 3"]
    assert buffer.num_fetched[1] == 2, "it was given up at first"


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
        assert make_learner(second).run() == 0
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
        assert make_learner(second).run() == 0
    assert second.heard[:2] == ["register 2", "published 2.2"]
    assert not second.said("commit")


def test_a_replaying_learner_says_so(make_learner: Callable[..., Learner]) -> None:
    with ScriptedBuffer(num_steps=3, committed=3) as buffer:
        learner = make_learner(buffer)
        said = set()
        enter = learner.clock.enter

        def note(phase: str) -> None:
            enter(phase)
            said.add(learner.look().state)

        learner.clock.enter = note  # type: ignore[method-assign]
        learner.run()
    assert {"replaying step 2: forward and backward", "committing version 3"} <= said
    assert "step 2: forward and backward" not in said


def test_a_run_begun_from_the_checkpoint_of_another_one_trains_on_as_that_one(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    optim = {"optim": {"lr": 1e-3, "warmup_steps": 5}}
    with ScriptedBuffer(num_steps=4) as whole:
        make_learner(whole, name="whole", learner=optim).run()
    with ScriptedBuffer(num_steps=2) as first:
        make_learner(first, name="first", learner=optim).run()
    origin = tmp_path / "first" / "checkpoints" / "version-00000002"
    start = tmp_path / "start"
    shutil.copytree(tmp_path / "model", start)
    shutil.copyfile(origin / "model.safetensors", start / "model.safetensors")
    begun = {"checkpoint": {"resume": str(origin)}, "model": {"path": str(start)}, "learner": optim}
    with ScriptedBuffer(num_steps=2, first_batch=2) as second:
        learner = make_learner(second, name="second", **begun)
        assert second.heard == ["register 0"]
        assert learner.run() == 0
    there = tmp_path / "second" / "checkpoints" / "version-00000002"
    for name in ("model", "exp_avg", "exp_avg_sq"):
        expected = tmp_path / "whole" / "checkpoints" / "version-00000004" / f"{name}.safetensors"
        assert (there / f"{name}.safetensors").read_bytes() == expected.read_bytes(), name

    shutil.rmtree(origin)
    with ScriptedBuffer(num_steps=2, committed=2) as again:
        assert make_learner(again, name="second", **begun).run() == 0
    assert again.heard[0] == "register 2", "its own checkpoint wins"


def test_a_run_whose_origin_is_damaged_is_refused_with_the_cause(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=1) as first:
        make_learner(first, name="first").run()
    origin = tmp_path / "first" / "checkpoints" / "version-00000001"
    (origin / "exp_avg.safetensors").write_bytes(b"")
    with (
        ScriptedBuffer(num_steps=1) as second,
        pytest.raises(ValueError, match=r"version-00000001, .*not whole: exp_avg\.safetensors"),
    ):
        make_learner(second, name="second", checkpoint={"resume": str(origin)})


def test_a_checkpoint_that_the_buffer_cannot_go_on_from_is_the_users_to_mend(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.refuse_register = "the batches before step 4 are deleted"
        with pytest.raises(ValueError, match="before step 4 are deleted"):
            make_learner(buffer)


def test_weights_that_cannot_be_written_are_said_in_signs_of_life_and_end_the_run(
    make_learner: Callable[..., Learner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedBuffer(num_steps=2) as buffer:
        buffer.waiting[1] = 10_000
        learner = make_learner(buffer, weights={"timeout_s": 0.2})
        [root] = (tmp_path / "weights").iterdir()
        shutil.rmtree(root)
        root.touch()  # in the way: as on a full or broken disk, every try fails
        assert learner.run() == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("the run failed at version 1: no weights could be published in")
    assert buffer.heard[-1] == f"leave: {error}", "the buffer does not know it otherwise"
    assert "for 0.6 s (3 times weights.timeout_s): FileExistsError: " in error
    assert any("; weights are not published since 0 s: FileExists" in b.state for b in buffer.beats)
    assert (tmp_path / "run" / "checkpoints" / "version-00000001").is_dir()
    assert not (tmp_path / "run" / "final").exists()


def test_a_version_passed_over_is_published_while_there_is_nothing_to_train(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=2) as busy:
        make_learner(busy, weights={"publish_every": 3}).run()
    assert not [said for said in busy.heard if said.startswith("published")]
    with ScriptedBuffer(num_steps=2) as idle:
        idle.waiting_for[1] = "published 1.1"
        make_learner(idle, name="idle", weights={"publish_every": 3}).run()
    assert [said for said in idle.heard if said.startswith("published")] == ["published 1.1"]


def test_a_checkpoint_asked_for_at_a_commit_is_written_once_and_told(
    make_learner: Callable[..., Learner], tmp_path: Path
) -> None:
    with ScriptedBuffer(num_steps=4) as buffer:
        buffer.asks_at = {2, 4}
        assert make_learner(buffer, checkpoint={"every": 2, "keep_last": 3}).run() == 0
    assert buffer.said("checkpointed") == ["checkpointed [2]", "checkpointed [2, 4]"]
    with ScriptedBuffer(num_steps=3) as rare:
        rare.asks_at = {1}
        assert make_learner(rare, name="rare", checkpoint={"every": 0}).run() == 0
    assert rare.said("checkpointed") == ["checkpointed [1]", "checkpointed [1, 3]"]


def test_a_learner_that_waits_for_room_in_the_journal_writes_a_checkpoint_then_drops_older_ones(
    make_learner: Callable[..., Learner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.waiting_for[2] = "checkpointed [2]"  # there is no batch before there is room
        buffer.on_waiting = lambda step: buffer.asks_at.add(2)
        assert make_learner(buffer, checkpoint={"every": 1, "keep_last": 2}).run() == 0
    assert buffer.said("checkpointed") == [
        "checkpointed [1]",
        "checkpointed [1, 2]",
        "checkpointed [2]",
        "checkpointed [2, 3]",
    ]
    assert "older checkpoints go: the journal is near buffer.max_journal_gb" in caplog.text
    with ScriptedBuffer(num_steps=2) as idle:
        idle.waiting_for[1] = "checkpointed [1]"
        idle.on_waiting = lambda step: idle.asks_at.add(1)
        assert make_learner(idle, name="idle", checkpoint={"every": 0}).run() == 0
    assert idle.said("checkpointed") == ["checkpointed [1]", "checkpointed [1, 2]"]


def test_a_learner_that_comes_back_tells_a_buffer_without_room_of_the_checkpoint_that_it_has(
    make_learner: Callable[..., Learner],
) -> None:
    with ScriptedBuffer(num_steps=1) as first:
        assert make_learner(first).run() == 0
    with ScriptedBuffer(num_steps=2, committed=1) as buffer:  # it was killed before it could tell
        buffer.asks_at, buffer.waiting_for[1] = {1}, "checkpointed [1]"
        assert make_learner(buffer).run() == 0
    assert buffer.said("checkpointed") == ["checkpointed [1]", "checkpointed [1, 2]"]


def test_a_fenced_learner_stops(make_learner: Callable[..., Learner]) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        buffer.fence_at = 2
        learner = make_learner(buffer)
        with pytest.raises(RefusedError, match="learner 3 has registered") as caught:
            learner.run()
        assert caught.value.code == "fenced"


def test_a_failed_run_keeps_its_checkpoint_and_says_why(
    make_learner: Callable[..., Learner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedBuffer(num_steps=1) as buffer:
        buffer.failed = True
        assert make_learner(buffer).run() == 1
    assert "the run failed at version 1: all steps are trained" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "version-00000001").is_dir()
    assert not (tmp_path / "run" / "final").exists()


def test_a_failed_run_says_why_even_where_no_checkpoint_can_be_written(
    make_learner: Callable[..., Learner],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: Any) -> None:
        raise SafetensorError("No space left on device")  # as safetensors says it

    with ScriptedBuffer(num_steps=1) as buffer:
        buffer.failed = True
        learner = make_learner(buffer)
        monkeypatch.setattr("learner.checkpoint.save_file", full)
        assert learner.run() == 1
    assert "the run failed at version 1: all steps are trained" in capsys.readouterr().err


def test_tokens_over_the_bound_stop_the_learner_before_they_are_trained(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedBuffer(num_steps=3) as buffer:
        honest = buffer._fetch

        async def lies(step: int) -> Reply:
            reply = await honest(step)
            if isinstance(reply, tuple) and isinstance(reply[0], Batch):
                return reply[0].model_copy(update={"max_staleness": 1}), reply[1]
            return reply

        monkeypatch.setattr(buffer, "_fetch", lies)
        learner = make_learner(buffer)
        with pytest.raises(RuntimeError, match="step 2 got tokens aged 2 to 2"):
            learner.run()
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
