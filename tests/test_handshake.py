"""Members must agree with the buffer: each setting by itself, in functions and over sockets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio
from scripted_peers import Peer, make_config
from serving_buffer import Serving, play, serving

from asyncrl.client import RefusedError
from asyncrl.config import Config
from asyncrl.handshake import buffer_settings, member_settings, mismatches
from asyncrl.messages import PROTOCOL, Hello, Leave, Role, Settings
from buffer.status import status_values

COMMON: dict[str, Any] = {
    "run_name": "other",
    "seed": 7,
    "group_size": 4,
    "model.dtype": "float32",
    "data.max_prompt_length": 7,
    "data.max_response_length": 7,
    "sampling.temperature": 0.5,
}
CHANGED: dict[Role, dict[str, Any]] = {
    "generator": COMMON
    | {
        "data.chat_template_kwargs": {"enable_thinking": False},
        "data.overlong_prompts": "drop",
        "sampling.stop": ["\n"],
        "sampling.stop_token_ids": [3],
        "generator.engine": "vllm",
    },
    "learner": COMMON | {"prompts_per_step": 8, "max_staleness": 3, "weights.publish_every": 2},
}
FILES = {
    "config.json": "model (config.json)",
    "model.safetensors": "model weights",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "chat template and end tokens",
    "chat_template.jinja": "chat template and end tokens",
    "generation_config.json": "chat template and end tokens",
}
EVERY_SETTING = [(role, key) for role, keys in CHANGED.items() for key in keys]


def make(tmp_path: Path, **settings: Any) -> Config:
    """A configuration whose model and reward are files."""
    for name in FILES:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text(f"contents of {name}")
    (tmp_path / "reward.py").write_text("def compute_score(*args): return 1.0\n")
    settings = {"generator__engine": "scripted", **settings}
    return make_config(
        run_name="mine",
        model__path=str(tmp_path / "model"),
        reward__path=f"{tmp_path / 'reward.py'}:compute_score",
        max_staleness=1,
        **settings,
    )


def changed(tmp_path: Path, key: str, value: Any) -> Config:
    if key == "weights.publish_every":
        return make(tmp_path, weights__publish_every=value)
    if key in ("run_name", "max_staleness"):
        return make(tmp_path).model_copy(update={key: value})
    return make(tmp_path, **{key.replace(".", "__"): value})


def hello(role: Role, settings: Settings, name: str = "stranger") -> Hello:
    return Hello(role=role, member=name, run_id=None, host="h", pid=1, settings=settings)


async def join(here: Serving, hello: Hello) -> None:
    """Raises RefusedError."""
    peer = Peer(here.server.address, hello.role, hello.member)
    here.peers.append(peer)
    await peer.ask(hello)


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_the_same_configuration_and_files_agree(tmp_path: Path, role: Role) -> None:
    config = make(tmp_path)
    assert mismatches(role, member_settings(config, role), buffer_settings(config)) == []


def test_every_setting_that_is_compared_is_tried_below(tmp_path: Path) -> None:
    config = make(tmp_path)
    for role, keys in CHANGED.items():
        compared = set(member_settings(config, role)) & set(buffer_settings(config))
        assert compared == {*keys, *FILES.values()} | ({"reward"} if role == "generator" else set())


@pytest.mark.parametrize(("role", "key"), EVERY_SETTING)
def test_each_setting_that_differs_is_named_with_both_values(
    tmp_path: Path, role: Role, key: str
) -> None:
    mine = member_settings(changed(tmp_path, key, CHANGED[role][key]), role)
    buffer = buffer_settings(make(tmp_path))
    assert mismatches(role, mine, buffer) == [
        f"{key} is {mine[key]} there, the buffer has {buffer[key]}"
    ]


@pytest.mark.parametrize(("file", "setting"), FILES.items())
def test_one_byte_in_a_model_file_makes_another_model(
    tmp_path: Path, file: str, setting: str
) -> None:
    buffer = buffer_settings(make(tmp_path))
    config = make(tmp_path)
    (tmp_path / "model" / file).write_text(f"Contents of {file}")
    [line] = mismatches("generator", member_settings(config, "generator"), buffer)
    assert line.startswith(f"{setting} is ")


def test_a_large_file_is_told_apart_by_its_size_and_its_ends(tmp_path: Path) -> None:
    config = make(tmp_path)
    weights = tmp_path / "model" / "model.safetensors"

    def settings_with(first: bytes, size: int) -> str:
        with weights.open("wb") as file:
            file.write(first)
            file.truncate(size)
        return buffer_settings(config)["model weights"]

    whole = 200 << 20
    same, again = settings_with(b"a", whole), settings_with(b"a", whole)
    assert same == again
    assert len({same, settings_with(b"b", whole), settings_with(b"a", whole + 1)}) == 3


def test_another_text_of_the_reward_file_is_another_reward(tmp_path: Path) -> None:
    buffer = buffer_settings(make(tmp_path))
    config = make(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(*args): return 2.0\n")
    [line] = mismatches("generator", member_settings(config, "generator"), buffer)
    assert line.startswith("reward is reward.py:compute_score (")


def test_every_mismatch_is_refused_over_the_wire_with_both_values(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = buffer_settings(make(tmp_path))
        async with serving(tmp_path, make_config(), settings=settings) as here:
            for number, (role, key) in enumerate(EVERY_SETTING):
                own = member_settings(changed(tmp_path, key, CHANGED[role][key]), role)
                with pytest.raises(RefusedError) as refused:
                    await join(here, hello(role, own, f"{role}-{number}"))
                assert refused.value.code == "mismatch"
                assert f"{key} is {own[key]} there" in str(refused.value)
                assert f"the buffer has {settings[key]}" in str(refused.value)
                assert f"{role}-{number}" in str(refused.value)
            values = await here.monitor().status()
            assert values["num_refused_members"] == len(EVERY_SETTING)
            assert {m["code"] for m in values["refused_members"]} == {"mismatch"}
            assert values["members"] == []

    play(scenario())


@pytest.mark.parametrize("role", ["generator", "learner"])
def test_a_member_that_leaves_a_setting_out_is_refused_with_its_name(
    tmp_path: Path, role: Role
) -> None:
    config = make(tmp_path)
    own, buffer = member_settings(config, role), buffer_settings(config)

    async def scenario() -> None:
        async with serving(tmp_path, config, settings=buffer) as here:
            for number, name in enumerate(own.keys() & buffer.keys()):
                rest = {key: value for key, value in own.items() if key != name}
                with pytest.raises(RefusedError) as refused:
                    await join(here, hello(role, rest, f"{role}-{number}"))
                assert f"{name} is not said there, the buffer has" in str(refused.value)
            with pytest.raises(RefusedError) as refused:
                await join(here, hello(role, {}, "silent"))
            assert all(name in str(refused.value) for name in own.keys() & buffer.keys())
            assert (await here.monitor().status())["members"] == []

    play(scenario())


def test_all_that_differs_is_named_at_once(tmp_path: Path) -> None:
    config, other = make(tmp_path), make(tmp_path, seed=9, group_size=3)
    lines = mismatches("learner", member_settings(other, "learner"), buffer_settings(config))
    assert [line.split(" is ")[0] for line in lines] == ["group_size", "seed"]


def test_who_agrees_joins_and_a_monitor_needs_no_settings(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = make(tmp_path)
        async with serving(tmp_path, config, settings=buffer_settings(config)) as here:
            for role in ("generator", "learner"):
                await join(here, hello(role, member_settings(config, role), f"{role}-1"))
            values = await here.monitor().status()
            assert {m["name"] for m in values["members"]} == {"generator-1", "learner-1"}
            assert values["num_refused_members"] == 0

    play(scenario())


def test_generators_that_are_there_together_run_one_release_of_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            await join(here, hello("generator", {"engine": "vllm 0.31"}, "generator-0"))
            await join(here, hello("generator", {"engine": "vllm 0.31"}, "generator-1"))
            with pytest.raises(RefusedError, match=r"engine is vllm 0.32 .* has vllm 0.31"):
                await join(here, hello("generator", {"engine": "vllm 0.32"}, "generator-2"))
            assert status_values(here.run, now=0.0)["engine"] == "vllm 0.31"

    play(scenario())


def test_with_the_last_generator_of_a_release_gone_another_release_may_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            await join(here, hello("generator", {"engine": "vllm 0.31"}, "generator-0"))
            await here.peers[-1].ask(Leave(reason="a slip"))
            await join(here, hello("generator", {"engine": "vllm 0.32"}, "generator-1"))
            assert status_values(here.run, now=0.0)["engine"] == "vllm 0.32"

    play(scenario())


def test_a_member_that_is_refused_again_and_again_is_told_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), settings={"seed": "1"}) as here:
            for _ in range(5):
                with pytest.raises(RefusedError):
                    await join(here, hello("generator", {"seed": "2"}))
            values = await here.monitor().status()
            assert values["num_refused_members"] == 1

    with caplog.at_level(logging.WARNING):
        play(scenario())
    told = [r for r in caplog.records if "stranger (pid 1 on h) is refused" in r.getMessage()]
    assert len(told) == 1


def test_a_crowd_of_strangers_fills_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config(), settings={"seed": "1"}) as here:
            for number in range(60):
                with pytest.raises(RefusedError):
                    await join(here, hello("generator", {"seed": "2"}, f"x{number}"))
            assert (await here.monitor().status())["num_refused_members"] == 60

    with caplog.at_level(logging.WARNING):
        play(scenario())
    assert sum("is refused" in text for text in caplog.messages) == 21


def test_another_protocol_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            other = hello("learner", {}).model_copy(update={"protocol": PROTOCOL + 1})
            with pytest.raises(RefusedError) as refused:
                await join(here, other)
            assert refused.value.code == "protocol"
            assert f"protocol {PROTOCOL + 1}, the buffer {PROTOCOL}" in str(refused.value)

    play(scenario())


def test_a_program_of_another_protocol_hears_so_in_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, make_config()) as here:
            socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            socket.connect(here.server.address)
            packet = {"p": PROTOCOL + 1, "id": 7, "m": {"type": "a message of tomorrow"}}
            await socket.send(msgpack.packb(packet))
            [header] = await socket.recv_multipart()
            answer = msgpack.unpackb(header)
            socket.close(linger=0)
            assert (answer["p"], answer["id"]) == (PROTOCOL + 1, 7)
            assert answer["m"]["code"] == "protocol"
            assert f"protocol {PROTOCOL + 1}, the buffer {PROTOCOL}" in answer["m"]["reason"]

    play(scenario())
