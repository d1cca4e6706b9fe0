"""README and documents agree with the package: links, examples, flags and names."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from cape_plugins.cli import main
from cape_plugins.settings.config import option_fields
from cape_plugins.settings.registry import TYPES

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/*.md", "recipes/*/README.md", "benchmarks/README.md")
FILES = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
TESTED_ELSEWHERE = {  # programs of these pages need files of models
    "serving.md": "tests/serving/test_serving_docs.py",
    "too_short.md": "tests/hf/test_too_short.py",
}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    """The text without code blocks, fenced or indented, and without inline code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$|`[^`\n]*`", "", text, flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to a file that is not there, or to a heading that its page lacks."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(read(page))):
        address, anchor = urldefrag(link)
        if "://" in address:
            continue
        target = page.parent / address if address else page
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            broken.append(link)
    return broken


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `two`, three\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    right = "[a](other.md) [b](other.md#one-two-three) [c](#here) ![d](other.md) [e](https://x.y/z)"
    page.write_text(f"## Here\n{right} `[f](in_code)`\n\n    [g](in_block)\n")
    assert broken_links(page) == []
    page.write_text("[a](gone.md) [b](other.md#no-heading) ![c](gone.png) [d](#one-two-three)")
    assert broken_links(page) == ["gone.md", "other.md#no-heading", "gone.png", "#one-two-three"]


def test_links_lead_to_files_and_headings() -> None:
    assert {name_of(page): broken for page in FILES if (broken := broken_links(page))} == {}


def test_every_document_is_reached_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([^)#\s]+)", read(ROOT / "README.md")))
    documents = {name_of(path) for path in (ROOT / "docs").glob("*.md")}
    assert documents <= links


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)


EXAMPLES = [
    pytest.param(code, id=f"{name_of(page)}-{number}")
    for page in FILES
    if page.name not in TESTED_ELSEWHERE
    for number, code in enumerate(python_blocks(page))
]


@pytest.mark.parametrize("code", EXAMPLES)
def test_python_example_runs_and_warns_of_nothing(code: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "hf_models" in code or "from_pretrained" in code:
        pytest.importorskip("transformers")
        from tests.support.stock_checkpoints import save_named

        save_named(code, tmp_path)  # tiny ones under the names of the hub that the example loads
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        exec(compile(code, "example", "exec"), {})
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == []


def test_torch_example_shares_one_draw_and_trains() -> None:
    blocks = python_blocks(ROOT / "docs/settings.md")
    (code,) = (block for block in blocks if "nn.Transformer" in block)
    names: dict = {}
    exec(compile(code, "example", "exec"), names)
    assert names["loss"].isfinite()
    assert names["draw"].shift.shape == (8, 1, 1)
    assert names["embed"].weight.grad.abs().sum() > 0


def test_readme_has_a_row_for_each_type() -> None:
    section = read(ROOT / "README.md").partition("\n## Types\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(TYPES)


def test_table_of_flags_is_generated(capsys) -> None:
    main(["flags"])
    table = capsys.readouterr().out.strip()
    _, _, rest = read(ROOT / "docs/flags.md").partition("<!-- flags:begin -->")
    shown = rest.partition("<!-- flags:end -->")[0].strip()
    assert shown == table, "paste the output of `cape-plugins flags` between the flags marks"


def test_positional_flags_that_a_page_names_exist() -> None:
    flags = {f"--position-{option.name}".replace("_", "-") for option in option_fields()}
    flags |= {"--position-table-size", "--position-table-extension"}  # of hf_models.convert
    for page in FILES:
        text = read(page).replace("--position-decoder-", "--position-")  # the same, of a decoder
        named = set(re.findall(r"--position-[a-z][a-z-]*[a-z]", text))
        assert named - {"--position-embedding"} <= flags, page


def named_files(page: str) -> set[str]:
    """Files in the first column of tables: ``| `a/b.py`, `c.py` | ...`` are a/b.py and a/c.py."""
    named = set()
    for row in re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            named.add(f"{folder}/{name.rpartition('/')[2]}")
    return named


def test_architecture_names_every_file_of_the_library() -> None:
    folders = ("cape_plugins", "fairseq_user_dir", "hf_models")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    file_names = {path.relative_to(ROOT).as_posix() for path in paths if path.name != "__init__.py"}
    named = named_files(read(ROOT / "docs/architecture.md"))
    assert len(file_names) > 60
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert file_names <= named


def says_how(page: Path) -> bool:
    """By which command, on which machine, with which versions."""
    patterns = (r"`(python|cape-plugins) [^`]+`", r"AMD|Intel|x86_64|NVIDIA", r"Python 3\.\d+\.\d+")
    return all(re.search(pattern, read(page)) for pattern in patterns)


def test_every_row_of_the_results_has_a_page_with_its_command() -> None:
    """The page, or the section of a page, of the column `page`, or the pages beside the file."""
    results = ROOT / "docs/results"
    tables = list(results.rglob("*.csv"))
    assert tables
    for table in tables:
        with open(table, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert rows, table
        assert not any(None in row for row in rows), f"{table}: more values than columns"
        named = {row["page"] for row in rows if "page" in row}
        assert bool(named) == (table.parent == results), table
        sections = [urldefrag(name) for name in named]
        pages = [results / page for page, _ in sections] or list(table.parent.glob("*.md"))
        assert pages, table
        assert all(map(says_how, pages)), table
        for page, anchor in sections:
            assert not anchor or anchor in anchors(read(results / page)), f"{page}#{anchor}"
