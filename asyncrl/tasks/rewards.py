"""Reward functions: from `file.py:function` or `package.module:function` to a score.

A reward function has verl's signature, is called by keyword, may be async, and returns a number or
a dict with `score` and named extras:

    def compute_score(data_source, solution_str, ground_truth, extra_info): ...
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import numbers
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pebble import ProcessExpired, ProcessPool

from asyncrl.config.fields import nearest
from asyncrl.parent import end_with_parent
from asyncrl.types import Row

RewardFunction = Callable[..., Any]

MAX_REWARD = 1e30
"""Either sign. Sums and squares of such rewards are finite."""
_DRY_CALL = "a dry call with the first training row and a response '0'"


def resolve(path: str) -> RewardFunction:
    """The function that `reward.path` names. Raises ValueError that says what is missing.

    A file is run once for each process, as a module of its own.
    """
    place, colon, name = path.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise ValueError(
            f"reward.path: {path!r} names no function: expected file.py:function or "
            "package.module:function"
        )
    module = _load_file(Path(place), path) if place.endswith(".py") else _import(place, path)
    function = getattr(module, name, None)
    if function is None:
        own = [
            attribute
            for attribute, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"reward.path: there is no function {name!r} in {place}{nearest(name, own)} "
            f"(functions: {', '.join(n for n in own if not n.startswith('_')) or 'none'})"
        )
    if not callable(function):
        raise ValueError(f"reward.path: {name!r} in {place} is a {type(function).__name__}")
    return function


def call_reward(function: RewardFunction, row: Row, text: str) -> tuple[float, dict[str, float]]:
    """Score and named extras of one response. Whatever the function raises goes through;
    ValueError when it returns something else than a finite number, MAX_REWARD at most, or a dict
    with one."""
    result = function(
        data_source=row["source"],
        solution_str=text,
        ground_truth=row["answer"],
        extra_info=row["extra"],
    )
    if inspect.isawaitable(result):
        result = asyncio.run(_finish(result))
    value = result.get("score") if isinstance(result, Mapping) else result
    score = _number(value)
    if score is None:
        raise ValueError(
            f"it returned {result!r}: expected a finite number (of at most {MAX_REWARD:g}) or a "
            "dict with `score`"
        )
    extras = result.items() if isinstance(result, Mapping) else ()
    parts = {str(name): _number(extra) for name, extra in extras if name != "score"}
    return score, {name: extra for name, extra in parts.items() if extra is not None}


def check_reward(path: str, row: Row, *, timeout_s: float) -> None:
    """Resolves `path` and calls the function once with a made-up response, before any engine loads.

    Both happen in a process of their own, on its main thread as in the worker pool, which is killed
    when the call takes longer than `timeout_s`. Raises ValueError that says what is wrong.
    """
    pool = ProcessPool(
        max_workers=1,
        initializer=end_with_parent,
        initargs=(signal.SIGKILL,),
        context=multiprocessing.get_context("spawn"),
    )
    try:
        problem = _in_pool(pool, f"importing {path}", _try_to_resolve, path)
        problem = problem or _in_pool(pool, _DRY_CALL, _try_to_call, path, row, timeout_s=timeout_s)
    finally:
        pool.stop()
        pool.join()
    if problem is not None:
        raise ValueError(
            problem if problem.startswith("reward.path") else f"reward.path: {problem}"
        )


def _in_pool(
    pool: ProcessPool,
    what: str,
    function: Callable[..., str | None],
    *arguments: Any,
    timeout_s: float | None = None,
) -> str | None:
    """What `function` says is wrong; also when its process ends or has to be killed."""
    try:
        problem: str | None = pool.schedule(function, args=arguments, timeout=timeout_s).result()
    except TimeoutError:
        return f"{what} did not return within {timeout_s:g} s and was killed"
    except ProcessExpired as error:
        return f"{what} ended its process with code {error.exitcode}"
    return problem


def _try_to_resolve(path: str) -> str | None:
    try:
        resolve(path)
    except ValueError as error:
        return str(error)
    return None


def _try_to_call(path: str, row: Row) -> str | None:
    function = resolve(path)
    try:
        call_reward(function, row, "0")
    except BaseException as error:  # SystemExit of a script is a failure like any other
        return f"{_DRY_CALL} failed: {type(error).__name__}: {error}{_place(error)}"
    return None


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        names = [entry.name for entry in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise ValueError(
            f"reward.path: there is no file {str(file)!r}{nearest(file.name, names)} (relative "
            "paths are looked up in the working directory, then beside the configuration file)"
        )
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    name = f"asyncrl_reward_{digest}"  # no name that shadows a module, the same in each process
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_failed(path, error) from None
    return module


def _import(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except BaseException as error:
        raise _import_failed(path, error) from None


def _import_failed(path: str, error: BaseException) -> BaseException:
    """A user's mistake as ValueError; Ctrl-C stays what it is."""
    if isinstance(error, KeyboardInterrupt):
        return error
    reason = f"{type(error).__name__}: {error}{_place(error)}"
    return ValueError(f"reward.path: {path!r} cannot be imported: {reason}")


def _place(error: BaseException) -> str:
    """` (file.py, line 3)`: where it was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, (ImportError, SyntaxError)):
        return ""
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"


async def _finish(result: Any) -> Any:
    return await result


def _number(value: Any) -> float | None:
    """A number of at most MAX_REWARD as float, also from an array of one; None for anything
    else."""
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        value = value.item()
    size: Any = abs(value) if isinstance(value, numbers.Real) else float("nan")
    return float(value) if size <= MAX_REWARD else None
