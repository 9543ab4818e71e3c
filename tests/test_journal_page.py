"""docs/journal.md says what the tables and the export hold, no more and no less."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from asyncrl.journal.tables import SCHEMA, TABLES
from asyncrl.report.export import COLUMNS

PAGE = (Path(__file__).parent.parent / "docs" / "journal.md").read_text()
Columns = list[tuple[str, str]]


def columns_of_the_tables() -> dict[str, Columns]:
    """(name, type) of each column, by table."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(TABLES)
        names = database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()
        return {
            name: [(row[1], row[2]) for row in database.execute(f"PRAGMA table_info({name})")]
            for (name,) in names
        }


def columns_of_the_page() -> dict[str, Columns]:
    sections = re.findall(r"^### `(\w+)`:.*?\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {
        name: re.findall(r"^\| `(\w+)` \| ([A-Z]+) \| \S", text, re.MULTILINE)
        for name, text in sections
    }


def test_the_page_has_every_table_and_column_with_its_type() -> None:
    assert columns_of_the_page() == columns_of_the_tables()
    assert f"Schema {SCHEMA} " in PAGE


def test_the_page_has_every_column_of_the_export() -> None:
    section = PAGE.split("\n## Export\n", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    told = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(told) == sorted(COLUMNS.names)
