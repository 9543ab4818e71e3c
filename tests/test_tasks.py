"""Rows and rewards: every mistake in the data is found at start, by file, row and field."""

from __future__ import annotations

import asyncio
import datetime
import json
import multiprocessing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config import Config
from asyncrl.config.schema import Model
from asyncrl.tasks import exact_match
from asyncrl.tasks.prompts import check_prompts
from asyncrl.tasks.reasoning_gym import exact, score
from asyncrl.tasks.rewards import call_reward, check_reward, resolve
from asyncrl.tasks.rows import Rows, load_rows
from asyncrl.types import Row

GOOD: dict[str, Any] = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7, "tags": ["a", None]},
}
ROW: Row = {"prompt": "2 + 2 =", "source": "sums", "answer": "4", "extra": {"index": 7}}


def config(train: Any, val: Any = (), **settings: Any) -> Config:
    data = settings.pop("data", {})
    return Config(
        model={"path": "m"},  # type: ignore[arg-type]
        reward={"path": "a:b"},  # type: ignore[arg-type]
        data={"train_files": train, "val_files": list(val), **data},  # type: ignore[arg-type]
        **settings,
    )


def load(*sources: Any, **settings: Any) -> Rows:
    return load_rows(config([str(s) if isinstance(s, Path) else s for s in sources], **settings))


def refusal(*sources: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as refused:
        load(*sources, **settings)
    return str(refused.value)


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


# ---- files ----


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_verls_columns_become_rows_of_plain_python(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        jsonl(file, GOOD)
    else:
        pq.write_table(pa.Table.from_pylist([GOOD]), file)
    [row] = load(file).train
    assert row == {
        "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
        "source": "sums",
        "answer": "4",
        "extra": {"split": "train", "index": 7, "tags": ["a", None]},
    }
    assert type(row["extra"]["index"]) is int


def test_columns_with_other_names_are_found_by_the_keys(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "x.jsonl", {"q": "1 + 1 =", "a": {"b.c": 2}, "from": "x"})
    keys = {"prompt": "q", "answer": "a.b.c", "source": "from"}
    assert load(file, data={"keys": keys}).train == [
        {"prompt": "1 + 1 =", "source": "x", "answer": 2, "extra": {}}
    ]


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"{name}.jsonl", GOOD | {"data_source": name}) for name in ("b", "a")]
    assert [row["source"] for row in load(*files).train] == ["b", "a"]


def test_a_missing_column_names_the_columns_there_are(tmp_path: Path) -> None:
    bad = {k: v for k, v in GOOD.items() if k != "reward_model"} | {
        "reward_modle": {"ground_truth": 1}
    }
    message = refusal(jsonl(tmp_path / "x.jsonl", bad, bad))
    assert "there is no column 'reward_model.ground_truth' for the answer" in message
    assert "did you mean 'reward_modle.ground_truth'?" in message
    assert "ability, data_source, extra_info.index" in message
    assert "data.keys.answer" in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": ""}, "row 2: prompt: is empty"),
        ({"prompt": "  \n"}, "row 2: prompt: is empty"),
        ({"prompt": []}, "row 2: prompt: is an empty list"),
        ({"prompt": 7}, "row 2: prompt: expected text or a list of messages, got 7"),
        ({"prompt": None}, "row 2: prompt: is null"),
        ({"prompt": [{"role": "user"}]}, "row 2: prompt.0: expected a message"),
        ({"prompt": [GOOD["prompt"][0], "hi"]}, "row 2: prompt.1: expected a message"),
        ({"prompt": [{"role": "user", "content": " "}]}, "row 2: prompt: all messages are empty"),
        ({"data_source": None}, "row 2: data_source: is null"),
        ({"data_source": 3}, "row 2: data_source: expected text, got 3"),
        ({"reward_model": {}}, "row 2: reward_model.ground_truth: is missing"),
        ({"reward_model": None}, "row 2: reward_model.ground_truth: is missing"),
        ({"reward_model": {"ground_truth": None}}, "row 2: reward_model.ground_truth: is null"),
        ({"extra_info": [1]}, "row 2: extra_info: expected an object, got [1]"),
        ({"extra_info": {"n": 1 << 64}}, "row 2: extra_info.n: 18446744073709551616 does not fit"),
        ({"extra_info": {"n": [1.0, float("nan")]}}, "row 2: extra_info.n.1: nan is not a number"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_field(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    file = jsonl(tmp_path / "train.jsonl", GOOD, GOOD | change, GOOD)
    message = refusal(file)
    assert f"{file}: {says}" in message
    assert "bad rows (1)" in message


def test_all_bad_rows_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    bad = GOOD | {"prompt": ""}
    one = jsonl(tmp_path / "one.jsonl", bad, GOOD)
    two = jsonl(tmp_path / "two.jsonl", GOOD, *[bad] * 30)
    message = refusal(one, two)
    assert "bad rows (31)" in message
    assert f"{one}: row 1" in message
    assert f"{two}: row 2" in message
    assert "and 11 more" in message


def test_parquet_values_that_cannot_travel_are_named(tmp_path: Path) -> None:
    for value in (datetime.datetime(2026, 1, 1), Decimal("1.5"), b"bytes"):
        file = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist([GOOD | {"extra_info": {"when": value}}]), file)
        assert "row 1: extra_info.when: a " in refusal(file)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "row 2: not JSON"),
        ("[1]", "row 2: expected an object with columns, got list"),
        ("[" * 100_000, "row 2: not JSON"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(tmp_path: Path, line: str, says: str) -> None:
    assert says in refusal(jsonl(tmp_path / "x.jsonl", GOOD, line))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", GOOD)
    assert "did you mean 'train.jsonl'?" in refusal(tmp_path / "trian.jsonl")
    assert "is a directory" in refusal(tmp_path)
    (tmp_path / "x.csv").write_text("a,b")
    assert ".parquet or .jsonl" in refusal(tmp_path / "x.csv")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "there is no row" in refusal(tmp_path / "empty.jsonl")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    assert "not readable as Parquet" in refusal(tmp_path / "x.parquet")
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xe9\n")
    assert "not UTF-8" in refusal(tmp_path / "latin.jsonl")


def test_the_data_stays_usable_when_its_file_is_deleted(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD] * 100), file)
    rows = load(file)
    file.unlink()
    assert len(rows.train) == 100
    assert json.dumps(rows.train)


def test_too_few_rows_for_a_step_are_refused_only_where_they_would_train_nothing(
    tmp_path: Path,
) -> None:
    file = jsonl(tmp_path / "x.jsonl", *[GOOD] * 3)
    for policy in ("train", "wrap"):
        assert len(load(file, prompts_per_step=4, data={"last_batch": policy}).train) == 3
    message = refusal(file, prompts_per_step=4, data={"last_batch": "drop"})
    assert "3 rows do not fill one step of prompts_per_step 4" in message


# ---- reasoning-gym ----

SUMS: dict[str, Any] = {
    "reasoning_gym": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "size": 300,
}


def test_the_same_source_gives_the_same_rows() -> None:
    assert load(SUMS).train == load(SUMS).train
    assert load(SUMS).train != load(SUMS | {"seed": 5_000}).train


def test_rows_can_travel_and_carry_no_object(tmp_path: Path) -> None:
    [row] = load(SUMS | {"size": 1}).train
    assert json.loads(json.dumps(row)) == row
    assert isinstance(row["prompt"], str)
    assert row["source"] == "reasoning_gym/chain_sum"


def test_no_validation_text_is_ever_trained_whatever_the_seeds() -> None:
    train = {row["prompt"] for seed in range(3) for row in load(SUMS | {"seed": seed}).train}
    val = [row["prompt"] for row in load(SUMS, val=[SUMS | {"seed": 1}]).val]
    assert len(val) == 300
    assert not train & set(val)


def test_training_and_validation_rows_are_equally_hard() -> None:
    rows = load(SUMS, val=[SUMS | {"seed": 1}])
    for side in (rows.train, rows.val):
        share = sum(len(row["prompt"].split()[-2]) == 1 for row in side) / len(side)
        assert 0.4 < share < 0.65


def test_a_task_with_too_few_texts_is_refused_with_the_numbers() -> None:
    one_text = {"min_value": 7, "max_value": 7}
    narrow = {"reasoning_gym": "prime_factorization", "params": one_text, "size": 9}
    message = refusal(narrow, val=[narrow])
    assert "prime_factorization" in message
    assert "9 are wanted" in message


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (SUMS | {"reasoning_gym": "chain_sums"}, "did you mean 'chain_sum'?"),
        (SUMS | {"params": {"max_term": 2}}, "did you mean 'max_terms'?"),
        (SUMS | {"params": {"min_terms": 0}}, "min_terms must be positive"),
        (SUMS | {"params": {"min_terms": "two"}}, "refuses"),
    ],
)
def test_a_source_that_cannot_be_made_says_why(source: dict[str, Any], says: str) -> None:
    assert says in refusal(source)


@pytest.mark.parametrize(
    ("task", "params"),
    [("chain_sum", SUMS["params"]), ("spell_backward", {}), ("letter_counting", {})],
)
def test_the_right_answer_scores_one_for_every_row(task: str, params: dict[str, Any]) -> None:
    source = {"reasoning_gym": task, "params": params, "size": 50}
    rows = load(source, val=[source | {"seed": 9}])
    for row in rows.train + rows.val:
        assert call_reward(exact, row, f" {row['answer']}\n") == (1.0, {})
        assert call_reward(exact, row, "no idea") == (0.0, {})


def test_part_marks_count_in_score_and_not_in_exact() -> None:
    [row] = load(SUMS | {"size": 1}).train
    text = f"{row['answer']} I think"
    assert 0 < call_reward(score, row, text)[0] < 1
    assert call_reward(exact, row, text)[0] == 0
    assert call_reward(score, row, "")[0] == 0


# ---- prompts over the limit ----


def prompts_config(tiny: Path, **data: Any) -> Config:
    return config(["unused.jsonl"], data={"max_prompt_length": 12, **data}).model_copy(
        update={"model": Model(path=str(tiny / "model"))}
    )


def prompts(*texts: str) -> list[Row]:
    return [{**ROW, "prompt": text} for text in texts]


def test_overlong_prompts_are_an_error_at_start_with_row_tokens_and_limit(
    random_tiny_task: Path,
) -> None:
    rows = Rows(prompts("_" * 12, "_" * 13, "abc", "_" * 20), [])
    with pytest.raises(ValueError) as refused:
        check_prompts(prompts_config(random_tiny_task), rows)
    assert str(refused.value) == (
        "data.train_files: 2 of 4 prompts are longer than data.max_prompt_length = 12 tokens. The "
        "first is row 2 (source sums) with 13 tokens, the longest has 20: raise the limit, or set "
        "data.overlong_prompts to drop"
    )
    with pytest.raises(ValueError, match=r"data\.val_files: 1 of 1 prompts"):
        check_prompts(prompts_config(random_tiny_task), Rows(rows.train[:1], rows.train[1:2]))


def test_overlong_prompts_that_are_dropped_are_counted(random_tiny_task: Path) -> None:
    drop = prompts_config(random_tiny_task, overlong_prompts="drop")
    rows = prompts("_" * 12, "_" * 13, "abc", "_" * 20)
    assert check_prompts(drop, Rows(rows, rows[:2])) == 3
    with pytest.raises(ValueError, match="all 2 prompts are longer"):
        check_prompts(drop, Rows(rows[1::2], []))


def test_a_prompt_that_the_chat_template_refuses_is_an_error_at_start(
    random_tiny_task: Path,
) -> None:
    rows = [{**ROW, "prompt": [{"role": "user", "content": "abc"}]}]  # the model has no template
    with pytest.raises(ValueError, match=r"data\.train_files, row 1 .*chat template refuses"):
        check_prompts(prompts_config(random_tiny_task), Rows(rows, []))


def test_texts_that_must_fit_need_no_tokenizer(tmp_path: Path) -> None:
    no_model = prompts_config(tmp_path, max_prompt_length=20)
    assert check_prompts(no_model, Rows(prompts("äöüäöü", "abc"), [])) == 0
    with pytest.raises(ValueError, match="no tokenizer"):
        check_prompts(no_model, Rows(prompts("äöüäöüä"), []))


# ---- reward functions ----


def test_a_function_is_found_in_a_package_and_in_a_file(tmp_path: Path) -> None:
    assert resolve("asyncrl.tasks.exact_match:compute_score") is exact_match.compute_score
    file = tmp_path / "json.py"  # a name of the standard library: nothing may be shadowed
    file.write_text("def compute_score(**row): return 0.25\n")
    assert call_reward(resolve(f"{file}:compute_score"), ROW, "x") == (0.25, {})
    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nothing", "expected file.py:function or package.module:function"),
        ("asyncrl.tasks:not a name", "expected file.py:function"),
        (":f", "expected file.py:function"),
        ("asyncrl.tasks.exact_match:compute_scores", "did you mean 'compute_score'?"),
        ("asyncrl.tasks.nowhere:f", "No module named 'asyncrl.tasks.nowhere'"),
        ("asyncrl.tasks.reasoning_gym:_EXACT", "is a float"),
        ("{dir}/rewards.py:f", "did you mean 'reward.py'?"),
        ("{dir}/reward.py:f", "functions: compute"),
        ("{dir}/raises.py:f", "ZeroDivisionError: division by zero ({dir}/raises.py, line 3)"),
        ("{dir}/exits.py:f", "SystemExit: 3"),
        ("{dir}/syntax.py:f", "SyntaxError"),
        ("{dir}/needs.py:f", "No module named 'not_installed'"),
    ],
)
def test_a_path_that_gives_no_function_says_why(tmp_path: Path, path: str, says: str) -> None:
    for name, text in {
        "reward": "def compute(): pass",
        "raises": "\n\n1 / 0",
        "exits": "import sys; sys.exit(3)",
        "syntax": "def f(:",
        "needs": "import not_installed",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ValueError) as refused:
        resolve(path.format(dir=tmp_path))
    assert says.format(dir=tmp_path) in str(refused.value)
    assert str(refused.value).startswith("reward.path")


def returning(value: Any) -> Any:
    return lambda **row: value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1.0, {})),
        (True, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        (np.array([2.0]), (2.0, {})),
        ({"score": 0.5, "format": 1, "note": "x"}, (0.5, {"format": 1.0})),
        ({"score": 1.0, "bad": float("nan")}, (1.0, {})),
    ],
)
def test_numbers_and_dicts_with_a_score_are_rewards(value: Any, expected: Any) -> None:
    assert call_reward(returning(value), ROW, "4") == expected


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", float("nan"), float("inf"), -1.7e308, 10**400),
        *({}, {"score": None}, [1.0], np.zeros(2)),
    ],
)
def test_anything_else_is_no_reward(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a finite number"):
        call_reward(returning(value), ROW, "4")


def test_an_async_function_is_awaited() -> None:
    async def compute_score(**row: Any) -> float:
        await asyncio.sleep(0)
        return float(row["solution_str"] == row["ground_truth"])

    assert call_reward(compute_score, ROW, "4") == (1.0, {})


def test_a_function_gets_what_verls_functions_get() -> None:
    seen: dict[str, Any] = {}

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        seen.update(s=data_source, text=solution_str, truth=ground_truth, extra=extra_info)
        return 0.0

    call_reward(compute_score, ROW, "five")
    assert seen == {"s": "sums", "text": "five", "truth": "4", "extra": {"index": 7}}


VERIFIERS = """
import os, signal, sys, time

def none(**row): return None
def raises(**row): raise KeyError("no such answer")
def wrong_signature(text): return 0.0
def leaves(**row): sys.exit(4)
def dies(**row): os._exit(7)
def hangs(**row): time.sleep(600)
async def waits(**row): return 1.0

def with_alarm(**row):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 1.0
"""


@pytest.fixture
def verifiers(tmp_path: Path) -> Path:
    file = tmp_path / "verifiers.py"
    file.write_text(VERIFIERS)
    return file


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("none", "failed: ValueError: it returned None: expected a finite number"),
        ("raises", "failed: KeyError: 'no such answer' ({file}, line 5)"),
        ("wrong_signature", "failed: TypeError: wrong_signature() got an unexpected keyword"),
        ("leaves", "failed: SystemExit: 4"),
        ("dies", "ended its process with code 7"),
        ("raise", "did you mean 'raises'?"),
    ],
)
def test_a_reward_that_fails_is_found_by_the_dry_call(
    verifiers: Path, function: str, says: str
) -> None:
    with pytest.raises(ValueError) as refused:
        check_reward(f"{verifiers}:{function}", ROW, timeout_s=20)
    assert says.format(file=verifiers) in str(refused.value)
    assert str(refused.value).startswith("reward.path: ")


@pytest.mark.parametrize("function", ["with_alarm", "waits"])
def test_the_dry_call_runs_on_a_main_thread_as_in_the_worker_pool(
    verifiers: Path, function: str
) -> None:
    check_reward(f"{verifiers}:{function}", ROW, timeout_s=20)


def test_a_dry_call_over_reward_timeout_s_is_killed(verifiers: Path) -> None:
    with pytest.raises(ValueError, match=r"did not return within 0\.1 s and was killed"):
        check_reward(f"{verifiers}:hangs", ROW, timeout_s=0.1)
    assert not multiprocessing.active_children()
