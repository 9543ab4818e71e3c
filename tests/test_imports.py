"""The two floors: asyncrl below, the three programs above, and nothing heavy where none belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PROGRAMS = {"buffer", "generators", "learner"}
MAY_IMPORT = {
    "asyncrl": {"asyncrl"},
    **{program: {"asyncrl", program} for program in PROGRAMS},
}
WITHOUT_TORCH = [
    "asyncrl/address.py",
    "asyncrl/client.py",
    "asyncrl/config",
    "asyncrl/journal/journal.py",
    "asyncrl/journal/claim.py",
    "asyncrl/journal/database.py",
    "asyncrl/journal/memory.py",
    "asyncrl/messages.py",
    "asyncrl/tasks",
    "asyncrl/transport.py",
    "asyncrl/types.py",
    "asyncrl/versions.py",
    "asyncrl/wire.py",
    "buffer",
]
HEAVY = {"torch", "vllm", "transformers"}
EXECUTES_WHAT_IT_READS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def files(*places: str) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = REPOSITORY / place
        found += [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    assert found
    return found


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, `package.module` in full."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield node.module or ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_import_goes_up_or_across(package: str) -> None:
    wrong = {
        f"{file.relative_to(REPOSITORY)} imports {module}"
        for file in files(package)
        for module in imports(file)
        if module.split(".")[0] in (PROGRAMS | {"asyncrl"}) - MAY_IMPORT[package]
    }
    assert not wrong


def test_nothing_that_executes_what_it_reads_is_imported_or_called() -> None:
    wrong = set()
    for file in files("asyncrl", *PROGRAMS):
        where = str(file.relative_to(REPOSITORY))
        wrong |= {f"{where}: {m}" for m in imports(file) if m in EXECUTES_WHAT_IT_READS}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.endswith(("_pyobj", "torch.load", "yaml.load")) or called in (
                    "eval",
                    "exec",
                ):
                    wrong.add(f"{where}:{node.lineno}: {called}")
    assert not wrong


def test_config_wire_tasks_and_buffer_load_neither_torch_nor_vllm() -> None:
    modules = [
        str(file.relative_to(REPOSITORY).with_suffix(""))
        .replace("/", ".")
        .removesuffix(".__init__")
        for file in files(*WITHOUT_TORCH)
    ]
    program = (
        f"import sys, importlib\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        f"for name in {modules!r}:\n    importlib.import_module(name)\n"
        f"    assert not {HEAVY!r} & set(sys.modules), (name, {HEAVY!r} & set(sys.modules))\n"
        "print(len(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_users_module_of_the_same_name_does_not_shadow_a_program(
    program: str, tmp_path: Path
) -> None:
    (tmp_path / f"{program}.py").write_text("raise SystemExit('the user\\'s own file ran')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", program, "no-such-config.yaml"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "the user's own file ran" not in done.stderr
    assert done.returncode == 2, done.stderr
    assert "no-such-config.yaml" in done.stderr
    assert "Traceback" not in done.stderr
