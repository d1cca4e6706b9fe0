"""docs/paper_map.md has every numbered item of the five documents once, and all names in it
exist."""

from __future__ import annotations

import re
import shlex
import warnings
from collections import Counter
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import pytest

from cape_plugins.settings.config import option_fields
from cape_plugins.settings.registry import PRESETS, TYPES
from tests.support.programs import parsers_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/paper_map.md"
CODE = ("cape_plugins", "fairseq_user_dir", "hf_models", "recipes", "benchmarks")


def numbers(first: int, last: int, chapter: str = "") -> list[str]:
    return [f"{chapter}{number}" for number in range(first, last + 1)]


# What has a number, by document: the CAPE paper, its appendix, its slides, SHAPE, the thesis.
NUMBERED = {
    "P": {"Eq.": numbers(1, 7), "Fig.": numbers(1, 8), "Table": numbers(1, 2)},
    "A": {"Fig.": numbers(9, 23), "Table": numbers(3, 9)},
    "SL": {},
    "SH": {"Eq.": numbers(1, 3), "Fig.": numbers(1, 9), "Table": numbers(1, 7)},
    "T": {
        "Eq.": [*numbers(1, 5, "2."), "3.1", *numbers(1, 6, "4.")],
        "Fig.": [*numbers(1, 2, "2."), *numbers(1, 24, "5.")],
        "Table": [*numbers(1, 2, "4."), *numbers(1, 14, "5.")],
    },
}
EXPECTED = [
    f"{document} {label} {number}"
    for document, labels in NUMBERED.items()
    for label, label_numbers in labels.items()
    for number in label_numbers
]
NUMBER = re.compile(r"(P|A|SL|SH|T) (Eq\.|Fig\.|Table) \d[\d.]*")
RESULTS = ("docs/results/", "docs/pictures/", "benchmarks/results/")


class Row(NamedTuple):
    where: str
    what: str
    status: str
    how: str


def rows_of() -> list[Row]:
    lines = re.findall(r"^\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [re.split(r" \| ", line) for line in lines]
    return [Row(*row) for row in cells if len(row) == 4 and row[0] != "where"]


ROWS = rows_of()
NAMED = [row.where for row in ROWS]


def not_once(named: list[str]) -> list[str]:
    """What is missing, what no document has, and what is there twice."""
    numbered = [name for name in named if NUMBER.fullmatch(name)]
    twice = [name for name, count in Counter(named).items() if count > 1]
    return sorted({*EXPECTED} ^ {*numbered}) + twice


def test_every_numbered_thing_has_one_row() -> None:
    """A missing, a second and an unknown row are seen."""
    assert len(EXPECTED) == 17 + 22 + 19 + 54
    assert not_once(NAMED) == []
    assert not_once([other for other in NAMED if other != "A Table 4"]) == ["A Table 4"]
    assert not_once([*NAMED, "A Table 4"]) == ["A Table 4"]
    assert not_once([*NAMED, "SH Fig. 10"]) == ["SH Fig. 10"]


def wrong_status(row: Row) -> str:
    """What is wrong with the status of a row, empty if nothing is."""
    measured = re.fullmatch(r"\[(?:measured here|in small)\]\((\S+)\)", row.status)
    commands = [text for text in quoted(row.how) if is_command(text)]
    if measured:
        target = (PAGE.parent / measured[1].partition("#")[0]).resolve()
        if not target.is_file():
            return f"{target} is not there"
        if target.relative_to(ROOT).as_posix().startswith(RESULTS):
            return "" if commands else "no command"
        tests = [name for name in quoted(row.how) if name.startswith("test_")]
        defined = re.findall(r"^def (test_\w+)", target.read_text(encoding="utf-8"), re.MULTILINE)
        return "" if {*tests} & {*defined} else f"{target} has none of the tests that are named"
    if row.status == "recipe only":
        return "" if commands else "no command"
    if row.status == "absent":
        reason = re.sub(r"`[^`]*`", "", row.how)
        return "" if len(reason.split()) >= 2 else "no reason"
    return "allowed: [measured here](PAGE), [in small](PAGE), recipe only, absent"


def test_status_is_one_of_four_and_shown() -> None:
    wrong = {row.where: reason for row in ROWS if (reason := wrong_status(row))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("status", "how", "message"),
    [
        ("measured here", "", "allowed"),
        ("[measured here](results/gone.md)", "", "is not there"),
        ("[measured here](../tests/test_readme.py)", "`test_rows`", "none of the tests"),
        ("[measured here](results/demo/scores.md)", "part of `demo.TASKS`", "no command"),
        ("recipe only", "`run.py`", "no command"),
        ("absent", "`run.py`", "no reason"),
    ],
)
def test_a_wrong_status_is_seen(status: str, how: str, message: str) -> None:
    assert message in wrong_status(Row("P Fig. 1", "", status, how))


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_command(text: str) -> bool:
    return bool(re.match(r"(\w+=\S* )*(python|cape-plugins) ", text))


@cache
def source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def defines(path: Path, name: str) -> bool:
    return bool(re.search(rf"^(?:def |class )?{name}\b", source(path), re.MULTILINE))


@cache
def files() -> dict[str, list[Path]]:
    """Files of the code and of the tests, by folder."""
    return {
        "code": [path for folder in CODE for path in (ROOT / folder).rglob("*.py")],
        "tests": list((ROOT / "tests").rglob("test_*.py")),
    }


@cache
def rows_of_recipes() -> set[str]:
    """Names of the recipes of translation."""
    catalog = source(ROOT / "recipes/mt/catalog.py").partition("\nRECIPES")[2]
    return set(re.findall(r'^    "(\w+)":', catalog, re.MULTILINE))


def exists(name: str) -> bool:
    """Whether a test, file, function of a file, row or option of this name is there."""
    if name.startswith("test_"):
        return any(f"def {name}(" in source(path) for path in files()["tests"])
    if name.endswith(".py"):
        return any(path.name == name for path in files()["code"])
    if "." in name:
        module, _, last = name.rpartition(".")
        ending = f"/{module.replace('.', '/')}.py"
        paths = [path for path in files()["code"] if path.as_posix().endswith(ending)]
        return any(defines(path, last) for path in paths)
    if name.startswith("--"):
        option = shlex.split(name)[0]
        return any(f'"{option}"' in source(path) for path in files()["code"])
    names = {*TYPES, *PRESETS, *rows_of_recipes(), *(option.name for option in option_fields())}
    return name in names


def test_names_on_the_page_exist() -> None:
    names = {name for row in ROWS for name in quoted(row.how) if not is_command(name)}
    assert len(names) > 100
    assert [name for name in sorted(names) if not exists(name)] == []
    nothing = ["test_no_such_test", "gone.py", "augmentation.gone", "--no-such-option", "nowhere"]
    assert not any(map(exists, nothing))


def program_and_words(command: str) -> tuple[str, list[str]]:
    """The file of a program, and the words that it is given; those behind ``--`` go elsewhere, and
    variables of the environment stand before."""
    words = shlex.split(command)
    first, *words = dropwhile(lambda word: re.match(r"\w+=", word), words)
    if first == "cape-plugins":
        return "cape_plugins/__main__.py", words
    if words[0] == "-m":
        words = [f"{words[1].replace('.', '/')}.py", *words[2:]]
    return words[0], words[1 : [*words, "--"].index("--")]


@cache
def parser_of(path: str):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return next(iter(parsers_of(path, patch).values()))


def understand(command: str) -> None:
    """Exits where a program does not have an option, or refuses its value."""
    path, words = program_and_words(command)
    parser = parser_of(path)
    _, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unknown: {unknown}")


def test_commands_of_the_page_are_understood() -> None:
    pytest.importorskip("fairseq")
    pytest.importorskip("transformers")
    commands = [text for row in ROWS for text in quoted(row.how) if is_command(text)]
    assert len(commands) > 50
    for command in commands:
        understand(command)
    with pytest.raises(SystemExit):
        understand("cape-plugins plot augmentation --drawn 1")
