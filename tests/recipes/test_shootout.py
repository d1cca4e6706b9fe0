"""The shoot-out: ranks, cells of published tables, and a run that goes on."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from cape_plugins import cli
from cape_plugins.demo import tasks as demo
from recipes.asr import run as asr
from recipes.lab.steps import CommandError
from recipes.lm import finetune_hf as llama
from recipes.lm import run as lm
from recipes.mt import quickstart
from recipes.mt import run as mt
from recipes.phones import run as phones
from recipes.shootout import __main__ as shootout
from recipes.shootout.cells import Cell, command_of, published, read_cells, write_cells
from recipes.shootout.page import balance, first_places
from recipes.shootout.ranks import is_ahead, ranks_of, values_of
from recipes.shootout.tasks import BEYOND, QUESTIONS, SAME, TASKS, TYPES
from recipes.vit import finetune_hf as vit

ROOT = Path(__file__).resolve().parents[2]
CONTROL = TASKS[0]


def test_types_that_differ_by_less_than_their_seeds_are_tied() -> None:
    values = {"a": [1.0, 1.1, 0.9], "b": [1.05, 0.95, 1.1], "c": [5.0, 5.1, 5.2], "d": [0.0]}
    ranks = ranks_of(values, lower_is_better=True)
    assert ranks == {"a": (1, 2, 3), "b": (1, 2, 3), "c": (3, 3, 3)}  # one seed has no rank
    assert ranks_of(values, lower_is_better=False)["c"] == (1, 1, 3)
    assert balance([ranks], "a") == (0.5, 0, 1)
    assert balance([ranks, ranks], "c") == (0, 1, 2)
    assert balance([ranks], "d") is None


def test_values_without_deviation_are_compared() -> None:
    assert is_ahead([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], lower_is_better=True)
    assert not is_ahead([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], lower_is_better=True)
    assert not is_ahead([1.0, 1.0], [1.0, 1.0], lower_is_better=True)
    assert not is_ahead([0.0], [1.0, 1.0], lower_is_better=True)


def test_a_question_is_the_mean_of_its_groups() -> None:
    groups = CONTROL.tests[BEYOND]
    cells = [
        Cell(CONTROL.name, "cape", seed, group, seed + number, None, "")
        for seed in (1, 2)
        for number, group in enumerate(groups)
    ]
    mean = (len(groups) - 1) / 2
    assert values_of(CONTROL, BEYOND, cells) == {"cape": [1 + mean, 2 + mean]}
    assert values_of(CONTROL, BEYOND, cells[:-1]) == {"cape": [1 + mean]}  # a group is missing


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_published_tables_have_all_seeds_of_a_task(task) -> None:
    cells = published(task, ROOT / "docs" / "results")
    assert task.tests.keys() <= set(QUESTIONS)
    assert set(task.without) <= set(TYPES)
    assert set(task.words) <= set(TYPES)
    for question in task.tests:
        values = values_of(task, question, cells)
        assert len(values) >= 4
        assert {len(numbers) for numbers in values.values()} == {3}


# what reads the options of each recipe
PARSERS = {
    "cape_plugins": cli._parser().parse_args,
    "recipes.asr.run": lambda words: asr.make_parser().parse_args(words),
    "recipes.lm.finetune_hf": lambda words: llama.read_options(words)[0],
    "recipes.lm.run": lambda words: lm.make_parser().parse_args(words),
    "recipes.mt.run": lambda words: mt.parse_arguments(words)[0],
    "recipes.mt.quickstart": quickstart.parse_arguments,
    "recipes.phones.run": lambda words: phones.make_parser().parse_args(words),
    "recipes.vit.finetune_hf": lambda words: vit.read_options(words)[0],
}
PAIR = ("a.en", "a.de")
FILES = {
    "texts": ["--train-file", "a.txt", "--validation-file", "b.txt"],
    "images": ["--dataset", "images"],
    "captions": ["--train", *PAIR, "--valid", *PAIR, "--test", *PAIR],
    "": [],
}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_recipe_has_the_options_of_the_task(task) -> None:
    module, *words = command_of(task, task.types(), 1, FILES[task.files])
    options = [word for name in task.shared for word in (f"--{name}", "1")]
    args = PARSERS[module]([*words, *options])
    assert list(args.compare) == [task.word(name) for name in task.types()]
    assert args.seeds == [1]


def test_columns_of_the_control_have_the_names_of_its_axes() -> None:
    assert {domain.axis for domain in demo.TASKS.values()} < set(CONTROL.columns[1])


def test_choosing_shows_the_table_of_the_page() -> None:
    """Made anew from the cells, the table on both pages is the same."""
    page = (ROOT / "docs/results/shootout/shootout.md").read_text(encoding="utf-8")
    cells = read_cells(ROOT / "docs/results/shootout/cells.csv")
    table = "\n".join(first_places(TASKS, cells))
    assert f"## First places\n\n{table}\n\n" in page
    assert f"\n\n{table}\n\n" in (ROOT / "docs/choosing.md").read_text(encoding="utf-8")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> Path:
    monkeypatch.chdir(folder)
    small = replace(CONTROL, command=f"{CONTROL.command} --updates 2", seeds={"1h": (1, 2)})
    monkeypatch.setattr(shootout, "TASKS", (small,))
    shootout.main(["--compare", "nopos", "cape", "--output", "out", *options])
    return folder / "out"


def test_a_run_goes_on_and_its_cells_name_their_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    output = run(monkeypatch, tmp_path)
    cells = read_cells(output / "cells.csv")
    assert {(cell.type, cell.seed) for cell in cells} == {
        (name, seed) for name in ("nopos", "cape") for seed in (1, 2)
    }
    assert cells[0].source == (
        "python -m cape_plugins demo --domain audio --updates 2 --seeds 1 --compare nopos"
    )
    with (tmp_path / "build/shootout/control--audio/seed1/scores.csv").open() as file:
        table = {
            (row["type"], row["length (s)"]): row["error_percent"] for row in csv.DictReader(file)
        }
    for cell in cells:
        if cell.seed == 1:
            assert cell.value == pytest.approx(float(table[cell.type, cell.group]), abs=1e-4)
    page = (output / "shootout.md").read_text(encoding="utf-8")
    assert SAME.capitalize() in page
    assert "`cape`" in page
    assert "`rope`" not in page
    assert (output / "shootout.png").stat().st_size > 5000

    write_cells(output / "cells.csv", [cell for cell in cells if cell.seed == 1])
    capsys.readouterr()
    run(monkeypatch, tmp_path, "--plan")
    assert "| control, audio | 2 | nopos cape |" in capsys.readouterr().out
    assert {cell.seed for cell in read_cells(output / "cells.csv")} == {1}  # nothing was trained


def test_mistakes_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError, match="--budget"):
        run(monkeypatch, tmp_path, "--budget", "none")
    with pytest.raises(CommandError, match="--tables missing: no such folder"):
        run(monkeypatch, tmp_path, "--tables", "missing")
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "cells.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CommandError, match="delete it or give another --output"):
        run(monkeypatch, tmp_path)
