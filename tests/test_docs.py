"""The documents: the map shows every file, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *(REPOSITORY / "docs").glob("*.md"),
]


@pytest.mark.parametrize("package", ["asyncrl", "buffer", "generators", "learner"])
def test_the_readmes_map_shows_every_file_and_folder(package: str) -> None:
    readme = (REPOSITORY / "README.md").read_text()
    section = readme.split("\n## The map", 1)[1].split("\n## ", 1)[0]
    files = {file.name for file in (REPOSITORY / package).glob("[!_]*.py")}
    folders = {f"{file.parent.name}/" for file in (REPOSITORY / package).glob("*/__init__.py")}
    assert {name for name in files | folders if name not in section} == set()


def test_every_file_that_the_map_names_is_there() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    section = readme.split("\n## The map", 1)[1].split("\n## ", 1)[0]
    packages = ("asyncrl", "buffer", "generators", "learner")
    there = {file.name for package in packages for file in (REPOSITORY / package).rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", section)) <= there


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(
        r"\b(?:docs|tests|asyncrl|buffer|generators|learner|benchmarks|configs)/[\w/-]+\.(?:py|md|yaml)",
        page.read_text(),
    )
    assert [name for name in named if not (REPOSITORY / name).exists()] == []
