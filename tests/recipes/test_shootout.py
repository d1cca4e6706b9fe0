"""The shoot-out: ranks, cells of published tables, and runs that go on."""

import fcntl
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from cape_plugins import TYPES as REGISTRY
from cape_plugins import PositionConfig, cli
from cape_plugins.demo import tasks as demo
from cape_plugins.settings.registry import ROTARY
from cape_plugins.utils.machine import describe_processor
from recipes.asr import run as asr
from recipes.lab.steps import ChildError, CommandError
from recipes.lm import finetune_hf as llama
from recipes.lm import run as lm
from recipes.mt import quickstart
from recipes.mt import run as mt
from recipes.phones import run as phones
from recipes.shootout import __main__ as shootout
from recipes.shootout.cells import (
    Cell,
    command_of,
    make,
    published,
    read_trained,
    source_of,
    write_cells,
)
from recipes.shootout.page import all_answers, first_places, sections
from recipes.shootout.ranks import Answer, balance, is_ahead, ranks_of, values_of
from recipes.shootout.tasks import EIGHT, QUESTIONS, SAME, TASKS, TYPES
from recipes.vit import finetune_hf as vit
from tests.support.tables import read_csv

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
CONTROL = TASKS[0]


def test_types_that_differ_by_less_than_their_seeds_are_tied():
    values = {"a": [1.0, 1.1, 0.9], "b": [1.05, 0.95, 1.1], "c": [5.0, 5.1, 5.2], "d": [0.0]}
    ranks = ranks_of(values, lower_is_better=True)
    assert ranks == {"a": (1, 2, 3), "b": (1, 2, 3), "c": (3, 3, 3)}  # one seed has no rank
    assert ranks_of(values, lower_is_better=False)["c"] == (1, 1, 3)


def test_tasks_of_one_family_count_as_one():
    first = Answer(replace(CONTROL, family="x"), {}, {"a": (1, 1, 3)})
    found = [first, first, Answer(replace(CONTROL, family="y"), {}, {"a": (3, 3, 3)})]
    assert balance(found, "a") == (0.5, 0.5, 2)
    assert balance(found[:2], "a") == (1, 0, 1)
    assert balance(found, "b") is None


def test_a_type_whose_seeds_differ_much_is_first_only_perhaps():
    values = {"rope": [0.0, 0.1, 0.2], "fire": [0.1, 0.2, 0.3], "abspos": [0.1, 30.0, 50.0]}
    values |= {"nopos": [60.0, 60.1, 60.2]}
    ranks = ranks_of(values, lower_is_better=True)
    assert ranks["abspos"] == (1, 4, 4)  # tied with the best and with the worst
    answers = {SAME: [Answer(CONTROL, values, ranks)]}
    assert first_places(answers)[-1].endswith("| 0.10 ± 0.10 `rope`, `fire`; perhaps `abspos` |")


def test_values_without_deviation_are_compared():
    assert is_ahead([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], lower_is_better=True)
    assert not is_ahead([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], lower_is_better=True)
    assert not is_ahead([1.0, 1.0], [1.0, 1.0], lower_is_better=True)
    assert not is_ahead([0.0], [1.0, 1.0], lower_is_better=True)


def test_a_question_is_the_mean_of_its_groups():
    groups = CONTROL.tests[EIGHT]
    assert len(groups) > 1
    cells = [Cell(CONTROL.name, "cape", seed, group, seed + number, None, "")
             for seed in (1, 2) for number, group in enumerate(groups)]  # fmt: skip
    mean = (len(groups) - 1) / 2
    assert values_of(CONTROL, EIGHT, cells) == {"cape": [1 + mean, 2 + mean]}
    assert values_of(CONTROL, EIGHT, cells[:-1]) == {"cape": [1 + mean]}  # a group is missing


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_published_tables_have_all_seeds_and_types_of_a_task(task):
    """A page may have a variant of a type, such as `alibi` with or without direction."""
    cells = published(task, RESULTS)
    assert task.tests.keys() <= set(QUESTIONS)
    for question in task.tests:
        values = values_of(task, question, cells)
        assert len(values) >= 4
        assert {len(numbers) for numbers in values.values()} == {3}
    assert all(Path(cell.source).is_file() for cell in cells)
    bases = {name for name in task.types() if ":" not in name}
    rows = set()
    for table, page in task.pages:
        found = [row for row in read_csv(RESULTS / table) if not page or row["page"] == page]
        rows |= {row[task.type_column].removeprefix("decoder-").split(":")[0] for row in found}
    assert len(rows & bases) >= 4
    assert rows & bases <= {cell.type for cell in cells}


def test_types_in_attention_of_captions_are_read_beside_a_type_that_was_trained_with_them():
    (task,) = (task for task in TASKS if task.name == "captions")
    cells = published(task, RESULTS)
    rows = read_csv(RESULTS / "multi30k-length-stacked.csv")
    again = [row for row in rows if row["model"] == "relpos, again"]
    expected = [float(row["bleu"]) for row in again if row["sentences"] == "1"]
    assert values_of(task, SAME, cells)["relpos"] == expected
    made = [cell._replace(source=source_of(task, cell.type, cell.seed, [])) for cell in cells]
    for shown, word in ((cells, "`relpos` is `relpos, again`"), (made, "`alibi:directed=true`")):
        settings = sections(all_answers([task], shown), [task], shown, [])["Tasks"][-1]
        assert settings.endswith(f"{word} |")


def test_the_page_has_the_types_of_the_registry_and_the_axes_of_the_control():
    assert {name.partition(":")[0] for name in TYPES} == set(REGISTRY)
    assert {domain.axis for domain in demo.TASKS.values()} < set(CONTROL.group_column)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_word_of_a_type_has_the_augmentation_of_the_type(task):
    assert set(task.without) <= set(TYPES)
    assert set(task.words) <= set(TYPES)
    architecture = ROTARY if task.name in ("copies", "lm-rotary") else "encoder"
    for name in task.types():
        word = task.word(name).removeprefix("decoder-")
        config, expected = settings(word, architecture), settings(name, "encoder")
        for option in ("max_local_shift", "max_global_scale", "max_global_shift"):
            assert getattr(config, option) == getattr(expected, option), (name, word)


def settings(word, architecture):
    name, _, options = word.partition(":")
    values = dict(part.split("=") for part in options.split(",") if part)
    numbers = {key: value == "true" or float(value) for key, value in values.items()}
    return PositionConfig.from_dict({"type": name, **numbers}, "text", architecture)


def test_tables_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "demo-scores.csv").write_text("page,type,seed\ndemo-types/scores.md,cape,1\n")
    with pytest.raises(CommandError, match="demo-scores.csv is no table of results"):
        published(CONTROL, tmp_path)


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
FILES = {"texts": "--train-file a.txt --validation-file b.txt", "images": "--dataset images"}
FILES |= {"captions": "--train a.en a.de --valid b.en b.de --test c.en c.de", "": ""}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_recipe_has_the_options_of_the_task(task):
    module, *words = command_of(task, task.types(), 1, FILES[task.files].split())
    options = [word for name in task.shared for word in (f"--{name}", "1")]
    args = PARSERS[module]([*words, *options])
    assert list(args.compare) == [task.word(name) for name in task.types()]
    assert args.seeds == [1]


def test_choosing_shows_the_table_of_the_page():
    """Made anew from published tables and trained cells, the table on both pages is the same."""
    page = (RESULTS / "shootout/shootout.md").read_text(encoding="utf-8")
    trained = read_trained(RESULTS / "shootout/cells.csv")
    known = {(cell.task, cell.type, cell.seed) for cell in trained}
    tables = [cell for task in TASKS for cell in published(task, RESULTS)]
    cells = [*trained, *(cell for cell in tables if cell[:3] not in known)]
    table = "\n".join(first_places(all_answers(TASKS, cells)))
    assert f"## First places\n\n{table}\n\n" in page
    assert f"\n\n{table}\n\n" in (ROOT / "docs/choosing.md").read_text(encoding="utf-8")


def run(monkeypatch, folder: Path, *options: str, **changes) -> Path:
    monkeypatch.chdir(folder)
    command = f"{CONTROL.command} --updates 2"
    task = replace(CONTROL, **{"command": command, "seeds": {"1h": (1, 2)}, **changes})
    monkeypatch.setattr(shootout, "TASKS", (task,))
    shootout.main(["--compare", "nopos", "cape", "--output", "out", *options])
    return folder / "out"


def test_a_run_goes_on_and_its_cells_name_their_commands(tmp_path, monkeypatch, capsys):
    output = run(monkeypatch, tmp_path)
    cells = read_trained(output / "cells.csv")
    assert {(cell.type, cell.seed) for cell in cells} == {*product(("nopos", "cape"), (1, 2))}
    source = "python -m cape_plugins demo --domain audio --updates 2 --seeds 1 --compare nopos"
    assert cells[0].source == source
    rows = read_csv(tmp_path / "build/shootout/control-audio/seed1/scores.csv")
    table = {(row["type"], row["length (s)"]): row for row in rows}
    for cell in cells:
        if cell.seed == 1:
            expected = float(table[cell.type, cell.group]["error_percent"])
            assert cell.value == pytest.approx(expected, abs=1e-4)
    page = (output / "shootout.md").read_text(encoding="utf-8")
    assert f"## {SAME.capitalize()}" in page
    assert "| `cape` |" in page
    machines = {(cell.machine, "torch " in cell.versions) for cell in cells}
    assert machines == {(describe_processor(), True)}
    assert f"| control-audio | `nopos`, `cape` | {describe_processor()} | Python" in page
    assert (output / "shootout.png").stat().st_size > 5000

    write_cells(output / "cells.csv", [cell for cell in cells if cell.seed == 1])
    capsys.readouterr()
    run(monkeypatch, tmp_path, "--plan")
    assert "| control-audio | 2 | nopos cape |" in capsys.readouterr().out
    assert {cell.seed for cell in read_trained(output / "cells.csv")} == {1}  # nothing was trained


def test_published_values_are_read_anew_and_other_data_stay_apart(tmp_path, monkeypatch):
    tables = ("--tables", str(RESULTS), "--budget", "none")
    output = run(monkeypatch, tmp_path, *tables)
    path, text = output / "cells.csv", (output / "cells.csv").read_text()
    own = source_of(replace(CONTROL, command="tool {files}"), "cape", 1, ["--data", "mine"])
    other = Cell(CONTROL.name, "cape", 1, "4", 9.0, None, own)
    line = ",".join(map(str, [*other[:5], "", *other[6:]]))
    wrong = text.replace(",66.0900", ",1.0000") + line + "\n"
    path.write_text(wrong)
    run(monkeypatch, tmp_path, *tables)
    *again, last = path.read_text().splitlines()
    assert again == text.splitlines()  # the published value is back
    assert last.endswith("tool --data mine --seeds 1 --compare cape,,")  # not lost, and not shown
    assert "9.00" not in (output / "shootout.md").read_text()

    images = tmp_path / "images"
    images.mkdir()
    mine = ("--tables", str(RESULTS), "--images", str(images), "--plan")
    run(monkeypatch, tmp_path, *mine, files="images")
    with pytest.raises(CommandError, match="no value to show"):  # none of the published values
        run(monkeypatch, tmp_path, *mine[:-1], "--budget", "none", files="images")


def fake_recipe(module, *words, log):
    """Takes the place of :func:`recipes.lab.steps.run_module`: writes a table with each type that
    is compared, or fails for a domain that does not exist."""
    words = [*map(str, words)]
    if "smell" in words:
        raise ChildError(f"failed; full log in {log}")
    output = Path(words[words.index("--output") + 1])
    types = words[words.index("--compare") + 1 : words.index("--jobs")]
    output.mkdir(parents=True)
    with (output / "scores.csv").open("w") as file:
        print("type,seed,length (s),error_percent", file=file)
        for name, size in product(types, (4, 8, 16, 32, 64)):
            print(name, 1, size, 50, sep=",", file=file)


def test_a_failing_command_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    bad = replace(CONTROL, name="control-text", command="cape_plugins demo --domain smell")
    tasks = tuple(replace(task, seeds={"1h": (1,)}) for task in (bad, CONTROL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shootout, "TASKS", tasks)
    monkeypatch.setattr("recipes.shootout.cells.run_module", fake_recipe)
    with pytest.raises(ChildError, match="1 of 2 commands failed; their logs are in build"):
        shootout.main(["--compare", "nopos", "--output", "out"])
    page = (tmp_path / "out/shootout.md").read_text(encoding="utf-8")
    assert "- control-text, `nopos`: seed 1 failed" in page
    assert "- control-audio, `nopos`: one seed, so no rank" in page
    assert "\n\nNo seconds are in the tables of control-audio (trained here).\n\n" in page
    # a table that lacks a group
    with pytest.raises(ChildError, match=r"scores.csv has no row of nopos at 5; see"):
        make(replace(CONTROL, tests={SAME: ("4", "5")}), ("nopos",), 1, [], tmp_path, 1)


def test_all_that_a_task_needs_to_be_trained_is_named(tmp_path, capsys):
    options = ["--tasks", "lm-rotary", "--compare", "rope", "--plan", "--output", str(tmp_path)]
    for budget, words in (("1h", "with --budget 1h, not trained without"), ("full", "without")):
        shootout.main([*options, "--budget", budget])
        assert f"`rope`: not trained {words} --texts\n" in capsys.readouterr().out


def test_mistakes_are_explained(tmp_path, monkeypatch):
    for words, message in (
        ("--budget none", "--budget"),
        ("--tables missing", "--tables missing: no such folder"),
        ("--texts a.txt b.txt", "--texts a.txt: no such file"),
    ):
        with pytest.raises(CommandError, match=message):
            run(monkeypatch, tmp_path, *words.split())
    (tmp_path / "out").mkdir()
    begin = f"{','.join(Cell._fields)}\ncontrol-audio,cape,1,4"
    for rows in ("a,b\n1,2", f"{begin},nan,,python -m x", f"{begin},python -m x"):
        (tmp_path / "out" / "cells.csv").write_text(f"{rows}\n")
        with pytest.raises(CommandError, match="delete it or give another --output"):
            run(monkeypatch, tmp_path)
    (tmp_path / "out" / "cells.csv").unlink()
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(CommandError, match="out: another run works here"):
        run(monkeypatch, tmp_path)
    os.close(descriptor)


def test_the_readme_has_the_budgets():
    text = (ROOT / "recipes/shootout/README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    budgets = ("1h", "6h", "full")
    shown = {}
    for names, *counts in (row for row in rows if len(row) == 1 + len(budgets)):
        for name in names.split("`")[1::2]:
            shown[name] = [int(count.strip() or 0) for count in counts]
    expected = {task.name: [len(task.seeds.get(b, ())) for b in budgets] for task in TASKS}
    assert {name: shown[name] for name in expected} == expected
