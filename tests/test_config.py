"""Configuration: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.address import Address
from asyncrl.config import Config
from asyncrl.config.load import (
    ConfigError,
    config_digest,
    load_config,
    load_resolved,
    save_resolved,
)
from asyncrl.config.presets import PRESETS
from asyncrl.config.reference import reference
from asyncrl.config.yaml_text import YamlError, dump, parse

REPOSITORY = Path(__file__).parent.parent
MINIMAL = """\
model: {path: some/model}
data:
  train_files:
    - {reasoning_gym: chain_sum, size: 10}
reward: {path: "asyncrl.tasks.reasoning_gym:exact"}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refusal(file: Path, *overrides: str, text: str | None = None) -> str:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file, overrides)
    return str(refused.value)


# ---- layers ----


def test_the_file_wins_over_the_preset_and_the_command_line_over_both(file: Path) -> None:
    file.write_text(MINIMAL + "algorithm: grpo\nlearner: {optim: {warmup_steps: 7}}\n")
    config = load_config(file, ["learner.optim.lr=3e-4"])
    assert config.learner.optim.lr == 3e-4
    assert config.learner.optim.warmup_steps == 7
    assert config.learner.loss.mask == "ppo_clip"
    assert config.learner.loss.clip_high == 0.28


def test_an_override_of_the_algorithm_changes_the_whole_preset(file: Path) -> None:
    assert load_config(file, ["algorithm=grpo"]).learner.advantage.std == "group"
    assert load_config(file).learner.advantage.std == "batch"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_names_every_part_that_its_algorithm_uses(name: str) -> None:
    loss = PRESETS[name]["learner"]["loss"]
    unused = {"ppo_clip": {"mask_threshold", "ratio_cap"}, "dppo_tv": {"clip_low", "clip_high"}}
    fields = set(type(Config.model_fields["learner"].default.loss).model_fields)
    assert set(loss) == fields - unused[loss["mask"]]
    assert set(PRESETS[name]["learner"]) == {"optim", "advantage", "loss"}


def test_an_override_reaches_into_lists_and_free_mappings(file: Path) -> None:
    config = load_config(
        file, ["data.train_files.0.size=99", "data.train_files.0.params.max_terms=2"]
    )
    source = config.data.train_files[0]
    assert not isinstance(source, str)
    assert (source.size, source.params) == (99, {"max_terms": 2})


def test_a_section_with_nothing_in_it_has_its_defaults(file: Path) -> None:
    file.write_text(MINIMAL + "learner:\n  optim:\nbuffer:\n")
    assert load_config(file).learner.optim.lr == 1e-6


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").iterdir()), ids=lambda f: f.name)
def test_the_shipped_configurations_are_valid(file: Path) -> None:
    assert load_config(file).max_staleness == 2


def test_paths_are_found_in_the_working_directory_then_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside, working):
        folder.mkdir()
        (folder / "both.jsonl").touch()
    (beside / "mine.py").touch()
    (beside / "model").mkdir()
    (beside / "run.yaml").write_text(
        "model: {path: model}\nreward: {path: 'mine.py:f'}\n"
        "data: {train_files: [both.jsonl, none.jsonl]}\n"
    )
    monkeypatch.chdir(working)
    config = load_config(beside / "run.yaml")
    assert config.data.train_files == [str(working / "both.jsonl"), "none.jsonl"]
    assert config.reward.path == f"{beside / 'mine.py'}:f"
    assert config.model.path == str(beside / "model")


# ---- refusals ----


def test_an_unknown_key_names_the_nearest_and_its_line(file: Path) -> None:
    message = refusal(file, text=MINIMAL + "learner:\n  optim:\n    warm_up_steps: 3\n")
    assert message.startswith(f"{file}:8: learner.optim.warm_up_steps: unknown key")
    assert "did you mean 'warmup_steps'?" in message
    assert "\n" not in message


def test_a_key_of_another_section_is_found_there(file: Path) -> None:
    assert "did you mean 'learner.optim.lr'?" in refusal(file, "lr=1e-5")


def test_an_unknown_key_on_the_command_line_names_the_override(file: Path) -> None:
    message = refusal(file, "max_stalenes=0")
    assert "override 'max_stalenes=0'" in message
    assert "did you mean 'max_staleness'?" in message


@pytest.mark.parametrize(
    ("override", "expected", "got"),
    [
        ("max_steps=ten", "a whole number >= 1 or null", '"ten"'),
        ("max_steps=0", "a whole number >= 1 or null", "0"),
        ("max_steps=true", "a whole number >= 1 or null", "true"),
        ("seed=1.0", "a whole number >= 0", "1.0"),
        (f"seed={1 << 63}", "< 2^63", str(1 << 63)),
        ("seed=-1", ">= 0", "-1"),
        ("seed=", "a whole number", "null"),
        ("learner.optim.lr=.inf", "a number > 0", "Infinity"),
        ("learner.optim.lr=.nan", "a number > 0", "NaN"),
        ("learner.optim.lr=[1]", "a number > 0", "[1]"),
        ("learner.optim.betas=[0.9]", "a list of 2", "[0.9]"),
        ("learner.optim.betas=[0.9,1.0]", ">= 0, < 1", "1.0"),
        ("learner.gradient_checkpointing=on", "true or false", '"on"'),
        ("generator.max_concurrent_rollouts=autp", "did you mean 'auto'?", '"autp"'),
        ("generator.engine=vlm", "did you mean 'vllm'?", '"vlm"'),
        ("algorithm=[grpo]", "'grpo' or 'async_grpo'", '["grpo"]'),
        ("run_name=7", "put it in quotes", "7"),
        ("eval=3", "a section", "3"),
        ("data.train_files=[]", "at least 1", "[]"),
        ("data.train_files=x.jsonl", "a list", '"x.jsonl"'),
        ("sampling.stop=['']", "text", '""'),
    ],
)
def test_a_wrong_value_tells_what_belongs_there(
    file: Path, override: str, expected: str, got: str
) -> None:
    message = refusal(file, override)
    assert expected in message
    assert got in message
    assert f"override {override!r}" in message
    assert "\n" not in message


def test_all_problems_are_told_at_once(file: Path) -> None:
    message = refusal(file, "max_steps=x", "nonsense", "lerner.x=1", "run_name.x=3", "seed=-1")
    lines = message.splitlines()
    assert lines[0] == "5 problems in the configuration:"
    assert len(lines) == 6


def test_a_wrong_source_is_told_once_and_not_for_each_kind_of_source(file: Path) -> None:
    message = refusal(file, "data.train_files=[{reasoning_gym: chain_sum, sise: 3}]")
    assert message.count("data.train_files.0") == 2
    assert "data.train_files.0.size: is required" in message
    assert "did you mean 'size'?" in message


def test_missing_sections_say_what_they_need(file: Path) -> None:
    message = refusal(file, text="model:\n")
    assert "model.path: is required and not set" in message
    assert "data: is required and not set: expected a section with at least train_files" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("[1, 2]", "a list"),
        ("just words", "a str"),
        ("a: 1\nb: {", ":2: not usable as YAML"),
        ("seed: 1\nmodel: {}\nseed: 2", ":3: not usable as YAML: the key 'seed' stands here a"),
        ("1: x", "put it in quotes"),
        ("a: !!python/name:os.system x", "tag"),
        ("a: &a [*a]", "nested"),
        ("a: \x00", "not usable as YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_by_its_name(
    file: Path, text: str, says: str
) -> None:
    message = refusal(file, text=text)
    assert message.startswith(str(file))
    assert says in message


def test_a_file_that_is_not_there_names_its_neighbour(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs\.yaml: no such file, did you mean 'run\.yaml'"):
        load_config(file.with_name("runs.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(file.parent)
    file.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(file)


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["group_size=1"], ["1", "2 or more"]),
        (["max_staleness=1", "weights.publish_every=3"], ["3", "max_staleness + 1 = 2"]),
        (["weights.transport=collective", "weights.dir=/x"], ["weights.dir", "disk"]),
        (["network.buffer=tcp://10.0.0.1:5570"], ["10.0.0.1", "loopback"]),
        (["network.buffer=127.0.0.1:5570"], ["tcp://HOST:PORT"]),
        (["run_name=../elsewhere"], ["../elsewhere"]),
    ],
)
def test_settings_that_cannot_go_together_are_refused_with_their_numbers(
    file: Path, overrides: list[str], numbers: list[str]
) -> None:
    message = refusal(file, *overrides)
    assert all(number in message for number in numbers)
    assert "pydantic" not in message


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [("async_grpo", "learner.loss.clip_low=0.1"), ("grpo", "learner.loss.ratio_cap=8")],
)
def test_a_setting_that_would_do_nothing_is_refused(
    file: Path, algorithm: str, setting: str
) -> None:
    assert "does nothing" in refusal(file, f"algorithm={algorithm}", setting)


# ---- YAML ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E6", 1e6),
        ("-.5", -0.5),
        ("1_000", 1000),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("on", "on"),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("0x10", "0x10"),
        ("123456789012345678901234567890", 123456789012345678901234567890),
    ],
)
def test_yaml_words_and_numbers_mean_what_they_look_like(text: str, value: Any) -> None:
    found = parse(f"key: {text}").value["key"]
    assert found == value
    assert type(found) is type(value)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co", "Zl", "Zp"]))
    | st.sampled_from(["1e-6", "on", "null", "", "010", "a: b", "- x", "\n", "~", "1_0", "=", "é"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abcé19 ", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(plain)
def test_what_is_written_is_read_back(value: Any) -> None:
    found = parse(dump({"value": value})).value["value"]
    assert found == value
    assert json.dumps(found) == json.dumps(value)  # 1 and 1.0 and True are different things


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with suppress(YamlError):
        parse(text)


# ---- resolved configuration ----


def test_a_resolved_configuration_comes_back_equal(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["algorithm=grpo", "sampling.stop=['1e-6', \"\\n\"]"])
    save_resolved(config, tmp_path / "config.yaml")
    assert load_resolved(tmp_path / "config.yaml") == config


def test_a_resolved_configuration_prints_every_value(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    save_resolved(config, tmp_path / "config.yaml")
    assert parse((tmp_path / "config.yaml").read_text()).value == config.model_dump(mode="json")


def test_a_users_file_is_not_taken_for_a_resolved_one(file: Path) -> None:
    with pytest.raises(ConfigError, match="not a resolved configuration"):
        load_resolved(file)


def test_the_digest_sees_the_named_sections_only(file: Path) -> None:
    one = load_config(file)
    other_seed = load_config(file, ["seed=1"])
    other_rate = load_config(file, ["learner.optim.lr=2e-6"])
    assert config_digest(one, ["learner"]) == config_digest(other_seed, ["learner"])
    assert config_digest(one, ["learner"]) != config_digest(other_rate, ["learner"])
    assert config_digest(one, ["seed", "data"]) == config_digest(other_rate, ["data", "seed"])


def test_the_reference_page_is_current() -> None:
    page = REPOSITORY / "docs" / "configuration.md"
    assert page.read_text() == reference(), "run: make docs"


# ---- addresses ----


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("tcp://127.0.0.1:5570", "127.0.0.1", 5570, True),
        ("tcp://127.1.2.3:0", "127.1.2.3", 0, True),
        ("tcp://[::1]:80", "::1", 80, True),
        ("tcp://localhost:80", "localhost", 80, True),
        ("tcp://[fe80::1]:80", "fe80::1", 80, False),
        ("tcp://node-7.cluster:80", "node-7.cluster", 80, False),
        ("tcp://0.0.0.0:80", "0.0.0.0", 80, False),
    ],
)
def test_addresses_of_all_kinds_go_through_one_parser(
    text: str, host: str, port: int, loopback: bool
) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:80",
        "tcp://127.0.0.1",
        "tcp://::1:80",
        "tcp://h:65536",
        "tcp://[x]:1",
        "tcp://h:1/x",
        "ipc:///tmp/x",
        "tcp://*:1x",
        "tcp://a b:1",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://|IPv6"):
        Address.parse(text)


def test_a_key_that_stands_elsewhere_and_one_of_verl_are_told_as_such(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key, did you mean 'checkpoint\.resume'"):
        load_config(file, ["resume=auto"])
    with pytest.raises(ConfigError, match=r"is a key of verl: docs/verl\.md"):
        load_config(file, ["actor_rollout_ref.rollout.n=8"])
