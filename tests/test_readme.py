"""What README and documents show is what the package does: links, examples, flags and names."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import warnings
from pathlib import Path
from urllib.parse import urldefrag

import pytest

from cape_plugins.cli import main
from cape_plugins.settings.config import option_fields

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


# ---- links -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("page", FILES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page) == []


def test_every_document_is_reached_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([^)#\s]+)", read(ROOT / "README.md")))
    documents = {name_of(path) for path in (ROOT / "docs").glob("*.md")}
    assert documents <= links


# ---- README ------------------------------------------------------------------------------------


def test_readme_is_short_and_documents_are_twelve_pages() -> None:
    assert read(ROOT / "README.md").count("\n") <= 130
    assert len(list((ROOT / "docs").glob("*.md"))) <= 12


def test_tables_of_the_readme_have_no_blank_cell() -> None:
    rows = re.findall(r"^\|.*\|$", read(ROOT / "README.md"), re.MULTILINE)
    assert len(rows) > 20
    assert [row for row in rows if re.search(r"\|\s*\|", row)] == []


def test_the_control_comes_first() -> None:
    """Its picture in the README, and `make quickstart` where nothing else is asked for."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", read(ROOT / "README.md"))
    assert pictures[0] == "docs/results/demo/scores.png"
    # `make test ARGS=...` hands its variables on to every make that it starts
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "DATA")
    clean = {name: value for name, value in os.environ.items() if name not in inherited}
    command, how = ["make", "--dry-run", "quickstart"], {"cwd": ROOT, "env": clean, "text": True}
    plain, given = (
        subprocess.run([*command, *words], **how, capture_output=True, check=True)
        for words in ((), ("ARGS=--sample",))
    )
    places = [plain.stdout.find(name) for name in ("cape-plugins demo", "recipes.mt.quickstart")]
    assert -1 not in places
    assert places == sorted(places)
    assert "cape-plugins demo" not in given.stdout


PAGES_OF_RESULTS = sorted((ROOT / "docs/results").glob("*/*.md"))


@pytest.mark.parametrize("page", PAGES_OF_RESULTS, ids=name_of)
def test_pages_of_results_say_how_they_were_made(page: Path) -> None:
    """By which command, on which machine, with which versions."""
    assert re.search(r"`(python|cape-plugins) [^`]+`", read(page))
    assert re.search(r"AMD|Intel|x86_64|NVIDIA", read(page))
    assert re.search(r"Python 3\.\d+\.\d+", read(page))


SOURCE = re.compile(r"\]\((\.\./benchmarks/)?results/|(CAPE|SHAPE)( A)? (Table|Figure) \d")
NUMBER = re.compile(r"(?<![\w.-])\d+(\.\d+)?( (to|or) \d+(\.\d+)?)?(?![\w.]*\d)")


def wrong_rows(page: str) -> list[str]:
    """Rows of tables whose last cell names no table of results or of a paper, and cells before it
    with more than 20 words or more than one number or range."""
    wrong = []
    for table in re.findall(r"^\|[-|]+\|\n((?:\|.*\n)*)", page, re.MULTILINE):
        for row in table.splitlines():
            *cells, source = row.strip("| ").split(" | ")
            wrong += [] if SOURCE.search(source) else [row]
            texts = [re.sub(r"\]\([^)]*\)", "]", cell) for cell in cells]
            wrong += [text for text in texts if len(text.split()) > 20]
            wrong += [text for text in texts if len(NUMBER.findall(text)) > 1]
    return wrong


def test_rows_on_choosing_are_short_and_name_what_carries_them() -> None:
    page = read(ROOT / "docs/choosing.md")
    assert page.count("\n| ") > 50
    assert wrong_rows(page) == []


@pytest.mark.parametrize(
    "cells",
    [
        ("a", "good", "everyone knows"),
        ("a", "0.5 ahead after 1200 updates", "CAPE Table 2"),
        ("a", "word " * 21, "[x](results/demo/scores.md)"),
    ],
)
def test_a_row_without_source_or_with_much_in_a_cell_is_seen(cells: tuple[str, ...]) -> None:
    good = "| a | 0.2 to 0.5 ahead on WMT14 | CAPE A Table 3 |"
    assert len(wrong_rows(f"| x | y | z |\n|---|---|---|\n{good}\n| {' | '.join(cells)} |\n")) == 1


# ---- examples ----------------------------------------------------------------------------------


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)


EXAMPLES = [
    pytest.param(code, id=f"{name_of(page)}-{number}")
    for page in FILES
    if page.name not in TESTED_ELSEWHERE
    for number, code in enumerate(python_blocks(page))
]


def run_example(code: str) -> dict:
    if "hf_models" in code and not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    names: dict = {}
    exec(compile(code, "example", "exec"), names)
    return names


@pytest.mark.parametrize("code", EXAMPLES)
def test_python_example_runs_and_warns_of_nothing(code: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "from_pretrained" in code:
        save_stock_checkpoints(code, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run_example(code)
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == []


def save_stock_checkpoints(code: str, folder: Path) -> None:
    """Tiny ones under the names of the hub that the example loads."""
    pytest.importorskip("transformers")
    from tests.support.stock_checkpoints import save_named

    save_named(code, folder)


def example_with(word: str, page: str) -> str:
    (code,) = [code for code in python_blocks(ROOT / page) if word in code]
    return code


def test_pages_whose_examples_are_tested_elsewhere_exist() -> None:
    assert all((ROOT / "docs" / page).is_file() for page in TESTED_ELSEWHERE)
    assert all((ROOT / test).is_file() for test in TESTED_ELSEWHERE.values())


def test_torch_example_shares_one_draw_and_trains() -> None:
    names = run_example(example_with("nn.Transformer", "docs/torch.md"))
    assert names["loss"].isfinite()
    assert names["draw"].shift.shape == (8, 1, 1)
    assert names["embed"].weight.grad.abs().sum() > 0


def test_hugging_face_example_loads_the_settings_it_saved(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = example_with("hf_models", "README.md")
    save_stock_checkpoints(code, tmp_path)
    names = run_example(code)
    assert type(names["translator"]).__name__ == "CapeMarianMTModel"
    assert float(names["translator"].config.position_config.source_scale) == 1.05
    assert type(names["classifier"]).__name__ == "CapeViTForImageClassification"
    assert names["classifier"].config.position_config.max_global_shift == 0.5


# ---- flags and names ---------------------------------------------------------------------------


def test_table_of_flags_is_generated(capsys) -> None:
    main(["flags"])
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 10
    rows = re.findall(r"^\| `--position-([\w-]+)`", table, re.MULTILINE)
    assert {name.replace("-", "_") for name in rows} == {o.name for o in option_fields()} | {
        "embedding"
    }
    _, _, rest = read(ROOT / "docs/flags.md").partition("<!-- flags:begin -->")
    shown = rest.partition("<!-- flags:end -->")[0].strip()
    assert shown == table, "paste the output of `cape-plugins flags` between the flags marks"


@pytest.mark.parametrize("page", FILES, ids=name_of)
def test_positional_flags_that_a_page_names_exist(page: Path) -> None:
    known = {f"--position-{option.name}".replace("_", "-") for option in option_fields()}
    text = read(page).replace("--position-decoder-", "--position-")  # the same, of a decoder
    named = set(re.findall(r"--position-[a-z][a-z-]*[a-z]", text))
    assert named - {"--position-embedding"} <= known


def test_files_that_the_contribution_guide_names_exist() -> None:
    """One path for each cell; a bare file name after a path is in the folder of that path."""
    missing, count = [], 0
    for line in read(ROOT / "CONTRIBUTING.md").splitlines():
        folder = ROOT
        for name in re.findall(r"`([\w/]+(?:\.py|\.md|/))`", line):
            path = ROOT / name if "/" in name else folder / name
            folder, count = path.parent, count + 1
            missing += [] if path.exists() else [name]
    assert count > 20, "the pattern that finds the names no longer fits the guide"
    assert missing == []


# ---- the table of files --------------------------------------------------------------------------


def named_files(page: str) -> set[str]:
    """Files in the first column of tables: ``| `a/b.py`, `c.py` | ...`` are a/b.py and a/c.py."""
    named = set()
    for row in re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            named.add(f"{folder}/{name.rpartition('/')[2]}")
    return named


def test_files_of_a_table_are_read() -> None:
    page = "| file | purpose |\n| `a/b/c.py`, `d.py` | x `e.py` |\n| `f/` | g |\n"
    assert named_files(page) == {"a/b/c.py", "a/b/d.py"}


def test_architecture_names_every_file_of_the_library() -> None:
    folders = ("cape_plugins", "fairseq_user_dir", "hf_models")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = {path.relative_to(ROOT).as_posix() for path in paths if path.name != "__init__.py"}
    named = named_files(read(ROOT / "docs/architecture.md"))
    assert len(own) > 60
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert own <= named
