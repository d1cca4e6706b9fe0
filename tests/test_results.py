"""docs/results: few files, each used by a page, and each table with the command that made it."""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/results"
FILES = [path for path in RESULTS.rglob("*") if path.is_file()]
PAGES = [path for path in FILES if path.suffix == ".md"]


def says_how(page: Path) -> bool:
    """By which command, on which machine, with which versions."""
    text = page.read_text(encoding="utf-8")
    patterns = (r"`(python|cape-plugins) [^`]+`", r"AMD|Intel|x86_64|NVIDIA", r"Python 3\.\d+\.\d+")
    return all(re.search(pattern, text) for pattern in patterns)


TABLES = [path for path in FILES if path.suffix == ".csv"]


def test_every_row_has_a_page_with_its_command() -> None:
    """The page of the column `page`, or those beside the file."""
    for table in TABLES:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert rows, table
        named = {row["page"] for row in rows if "page" in row}
        assert bool(named) == (table.parent == RESULTS), table
        pages = [RESULTS / name for name in named] or list(table.parent.glob("*.md"))
        assert pages, table
        assert all(map(says_how, pages)), table


def test_every_picture_is_shown_or_linked() -> None:
    """By a page of results, a document or the README of a recipe."""
    readers = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/*.md"), *PAGES]
    shown = {
        (page.parent / target).resolve()
        for page in readers
        for target in re.findall(r"\]\(([^)#\s]+\.png)\)", page.read_text(encoding="utf-8"))
    }
    pictures = {path for path in FILES if path.suffix == ".png"}
    assert pictures
    assert pictures <= shown
