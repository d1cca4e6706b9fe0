"""Each recipe from text to score at a tiny scale, through its real command line."""

import csv
import json
import re
from dataclasses import field, fields, make_dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from recipes.lab import runs
from recipes.lab.runs import last_update
from recipes.lab.steps import CommandError, recorded
from recipes.mt import prepare
from recipes.mt.catalog import RECIPES, Text, sampled
from recipes.mt.run import main, train_flags

SCORE_ROW = re.compile(r"\| (test\d*) \| (\d+) \| (\d+\.\d+) \| (\d+\.\d+) \|")


def recipe(run_cli, folder, *args, warm_children=True, **options):
    command = ("python", "-m", "recipes.mt.run", *args, "--threads", 1)
    options |= {"cwd": folder, "timeout": 1200}  # a minute on a free machine
    return run_cli(*command, warm_children=warm_children, **options)


# ---- whole recipes -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_sample_runs_from_text_to_score(run_cli, tmp_path, name):
    probes = ["stack", "swap"] if "interpolate" in name else []
    cold = name in ("wmt14_en_de", "multi30k_small")  # one of each choice of a checkpoint
    words = (name, "all", *probes, "--sample")
    out = recipe(run_cli, tmp_path, *words, warm_children=not cold).stdout
    row, work = RECIPES[name], tmp_path / "build" / f"{name}-sample"
    run = work / "runs" / row.position
    assert SCORE_ROW.search(out)
    assert "nrefs:1" in (run / "scores.md").read_text()
    assert (run / "checkpoint_selected.pt").exists()
    log = (run / "train.log").read_text()
    assert "max_global_shift" in log or row.position != "cape"
    if row.select == "best":
        with open(run / "selection.csv") as file:
            epochs = list(csv.DictReader(file))
        assert [int(line["epoch"]) for line in epochs] == [1, 2]
    source = (work / "subwords" / f"train.{row.languages[0]}").read_text().splitlines()
    if row.join > 1:
        assert source[0].split().count("<sep>") == row.join - 1
        test = (work / "subwords/test.reference").read_text()
        assert test.count("<sep>") == 12 - len(test.splitlines())
        assert "nats" in out
        positions = (run / "stacked.csv").read_text().splitlines()
        assert positions[0] == "position,mean_nll,count,tail"
        assert len(positions) > 40
        original, swapped, drop = re.findall(r"-?\d+\.\d+", (run / "swap.md").read_text())[:3]
        assert float(drop) == pytest.approx(float(original) - float(swapped), abs=0.011)
    if row.max_subwords:
        assert max(len(line.split()) for line in source) <= row.max_subwords


@pytest.fixture(scope="module")
def prepared(run_cli, tmp_path_factory):
    """Own files, two test sets, one of them long: 40 training pairs, some of them unfit."""
    folder = tmp_path_factory.mktemp("recipe")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    for split, count in (("train", 400), ("valid", 12), ("test", 8), ("test1", 6)):
        lines = [" ".join(words[(n + k) % 7] for k in range(1 + n % 40)) for n in range(count)]
        if split == "train":
            lines[5] = "one " * 300  # longer than any recipe keeps
        for language in ("en", "de"):
            (folder / f"{split}.{language}").write_text("".join(f"{line}.\n" for line in lines))
    files = {s: (f"{s}.en", f"{s}.de") for s in ("train", "valid", "test", "test1")}
    args = ["--train", *files["train"], "--valid", *files["valid"]]
    args += ["--test", *files["test"], "--test", *files["test1"]]
    recipe(run_cli, folder, "wmt16_en_de", "prepare", "--sample", *args, "--work", "work")
    return folder, args


@pytest.mark.slow
def test_own_files_are_cleaned_only_in_training(prepared):
    work = prepared[0] / "work"
    assert len((work / "text/train.en").read_text().splitlines()) == 400
    assert len((work / "subwords/train.en").read_text().splitlines()) == 399
    assert len((work / "subwords/valid.en").read_text().splitlines()) == 12
    for split, count in (("test", 8), ("test1", 6)):
        reference = (work / f"subwords/{split}.reference").read_text()
        assert reference == (prepared[0] / f"{split}.de").read_text()
        assert len(reference.splitlines()) == count


@pytest.mark.slow
def test_variant_is_a_flag_and_extra_flags_reach_fairseq(prepared, run_cli):
    folder, _ = prepared
    common = ("--sample", "--work", "work", "--position-embedding", "cape")
    extra = ("--position-max-global-shift", "7", "--dropout", "0.25")
    stages = ("train", "select", "decode", "score")
    out = recipe(run_cli, folder, "wmt16_en_de", *stages, *common, *extra).stdout
    assert [row[:2] for row in SCORE_ROW.findall(out)] == [("test", "8"), ("test1", "6")]
    assert "| mean | 14 |" in out
    log = (folder / "work/runs/cape/train.log").read_text()
    assert "max_global_shift=7.0" in log
    assert "'dropout': 0.25" in log or "dropout=0.25" in log

    changed = recipe(run_cli, folder, "wmt16_en_de", "train", *common, check=False)
    assert changed.returncode == 2
    assert "made with other settings" in changed.stderr
    assert "--name" in changed.stderr


@pytest.mark.slow
def test_other_files_are_not_mixed_with_prepared_ones(prepared, run_cli):
    folder, args = prepared
    (folder / "other.en").write_text("a b\n" * 50)
    other = [word.replace("train.en", "other.en").replace("train.de", "other.en") for word in args]
    command = ("wmt16_en_de", "prepare", "--sample", "--work", "work")
    result = recipe(run_cli, folder, *command, *other, check=False)
    assert result.returncode == 2
    assert "other.en" in result.stderr
    assert "--work" in result.stderr


# ---- what is reused ------------------------------------------------------------------------------

STEPS = ("text", "tokenised", "subwords", "binary")
OTHER = {"languages": ("en", "fr"), "segmentation": "sentencepiece", "clean": (2, 9)}
OTHER |= {"max_subwords": 99}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The four steps of number lists, the last without its command; prepares with a recipe."""
    work = tmp_path_factory.mktemp("steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "binarise", lambda *_: None)
        files = {"train": [], "valid": [], "test": []}
        yield lambda row: prepare.prepare(row, files, work, sample=True, workers=1) or work


@pytest.mark.parametrize("name", [option.name for option in fields(Text)])
def test_steps_with_another_option_are_not_reused(steps, name):
    row = sampled(RECIPES["wmt14_en_de"])
    before = {path: path.stat().st_mtime_ns for path in steps(row).rglob("*")}
    value = getattr(row, name)
    other = OTHER[name] if name in OTHER else not value if isinstance(value, bool) else value + 1
    with pytest.raises(CommandError, match=rf"made with other settings .*{name} .*--work"):
        steps(replace(row, **{name: other}))
    assert before == {path: path.stat().st_mtime_ns for path in steps(row).rglob("*")}


def test_options_of_training_are_no_matter_of_the_text(steps):
    row = sampled(RECIPES["wmt14_en_de"])
    steps(row)
    other = {"title": "x", "train": "y", "epochs": 7, "positions": {}, "length_factor": 3}
    steps(replace(row, **other, keep="update"))


def test_new_options_of_the_text_are_recorded_without_being_named(steps, monkeypatch):
    row = sampled(RECIPES["wmt14_en_de"])
    work = steps(row)
    accents = [("accents", str, field(default="kept"))]
    monkeypatch.setattr(
        prepare, "Text", make_dataclass("Text", accents, bases=(Text,), frozen=True, kw_only=True)
    )
    for name in STEPS:
        with pytest.raises(CommandError, match=rf"{name} was made .*accents None, now 'gone'"):
            steps(SimpleNamespace(**vars(row), accents="gone"))
        path = work / name / "settings.json"
        path.write_text(json.dumps({**recorded(work / name), "accents": "gone"}))
    steps(SimpleNamespace(**vars(row), accents="gone"))
    monkeypatch.undo()
    for name in STEPS:
        made_with = recorded(work / name)
        del made_with["accents"]
        (work / name / "settings.json").write_text(json.dumps(made_with))
    steps(row)


BAD_INPUTS = [
    (("wmt99", "all"), ("RECIPE", "wmt99", "iwslt14_de_en")),
    (("iwslt14_de_en", "tune"), ("STAGE", "tune", "select")),
    (("iwslt14_de_en", "all"), ("--train", "--sample")),
    (("iwslt14_de_en", "all", "--train", "gone", "gone"), ("--train", "gone", "no such file")),
    (("iwslt14_de_en", "all", "--train", "a", "longer"), ("--train", "a ends after 2 lines")),
    (
        ("iwslt14_de_en", "all", "--train", "many", "many", "--valid", "latin1", "a"),
        ("latin1", "UTF-8"),
    ),
    (("iwslt14_de_en", "all", "--train", "a", "a"), ("--train", "hold out", "give --test")),
    (("iwslt14_de_en", "train"), ("--work", "run the stage prepare")),
    (("iwslt14_de_en", "train", "--position-embedding", "rope"), ("'rope'", "cape")),
    (("iwslt14_de_en", "select", "--select", "worst"), ("--select", "'worst'")),
    (("iwslt14_de_en", "swap"), ("swap", "wmt16_en_de_interpolate")),
    (("iwslt14_de_en", "decode", "--beam", "0"), ("--beam", "'0'", "at least 1")),
    (("iwslt14_de_en", "train", "--compare", "rope"), ("--compare rope is unknown", "cape")),
    (("iwslt14_de_en", "train", "--device", "abacus"), ("--device abacus", "give cpu")),
    (("iwslt14_de_en", "train", "--seeds", "1", "2", "--name", "x"), ("--name x", "one training")),
    (("wmt14_en_de", "train", "--first-epoch", "900"), ("--first-epoch 900", "at most 150")),
    (("wmt14_en_de", "train", "--max-epoch", "20"), ("--first-epoch 50", "at most 20")),
    (
        ("multi30k_study", "train", "--dry-run", "--lr", "x"),
        ("fairseq-train: argument --lr", "'x'"),
    ),
]


@pytest.mark.parametrize(("args", "messages"), BAD_INPUTS, ids=lambda value: " ".join(value[:4]))
def test_bad_input_names_option_value_and_remedy(tmp_path, monkeypatch, capsys, args, messages):
    (tmp_path / "a").write_text("a\nb\n")
    (tmp_path / "longer").write_text("a\nb\nc\n")
    (tmp_path / "many").write_text("a b\n" * 100)
    (tmp_path / "latin1").write_bytes(b"gut\nsch\xf6n\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CommandError, SystemExit)) as error:
        main(args)
    text = f"{error.value} {capsys.readouterr().err}"
    for message in messages:
        assert message in text


def test_flags_that_fairseq_lacks_are_refused_before_text_is_prepared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("a b\n" * 100)
    words = ["multi30k_study", "prepare", "train", "--train", "a", "a", "--max-updates", "3"]
    with pytest.raises(CommandError, match="unrecognized arguments: --max-updates 3; correct it"):
        main(words)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_training_that_left_no_checkpoint_begins_anew_with_other_settings(tmp_path, monkeypatch):
    def fail(*args, log, **more):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("a line\n", "utf-8")
        raise CommandError("stopped")

    def start(**settings):
        with pytest.raises(CommandError) as error:
            runs.train(tmp_path, tmp_path / "run", [], settings, threads=1, title="a training")
        return str(error.value)

    monkeypatch.setattr(runs.steps, "run_module", fail)
    assert start(rate=1) == start(rate=2) == "stopped"
    assert recorded(tmp_path / "run")["rate"] == 2
    (tmp_path / "run/checkpoint_last.pt").touch()
    assert start(rate=2) == "stopped"
    assert "made with other settings (rate 2, now 3)" in start(rate=3)


@pytest.mark.slow
def test_errors_have_no_traceback(run_cli, tmp_path):
    args = ("iwslt14_de_en", "all", "--train", "gone", "gone")
    result = recipe(run_cli, tmp_path, *args, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --train gone: no such file")
    assert "Traceback" not in result.stderr


# ---- rows --------------------------------------------------------------------------------------


def flags_of(row, position=None, devices=1):
    position = position or row.position
    return train_flags(row, {"type": position, **row.positions.get(position, {})}, devices)


def flag_values(flags, name):
    return [value for flag, value in pairwise(flags) if flag == name]


@pytest.mark.parametrize(
    ("name", "devices", "update_freq"),
    [
        ("wmt14_en_de", 4, "1"),
        ("wmt14_en_de", 1, "4"),
        ("wmt14_en_fr", 8, "10"),
        ("wmt16_en_de", 8, "2"),
        ("wmt16_en_de", 16, "1"),
        ("iwslt14_de_en", 8, "1"),
    ],
)
def test_tokens_per_update_do_not_depend_on_the_number_of_devices(name, devices, update_freq):
    flags = flags_of(RECIPES[name], devices=devices)
    assert flag_values(flags, "--update-freq") == [update_freq]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ([], 1200),
        (["--max-update", 30], 30),
        (["--max-update=30", "--lr", "1e-3"], 30),
        (["--max-update", "0"], None),  # fairseq's word for no limit
    ],
)
def test_progress_follows_the_number_of_updates_given_last(extra, expected):
    row = RECIPES["multi30k_small"]
    assert last_update([*flags_of(row), *extra]) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_every_row_is_complete(name):
    row = RECIPES[name]
    flags = flags_of(row)
    assert flag_values(flags, "--position-embedding") == [row.position]
    assert flag_values(flags, "--arch")[0].startswith("cape_")
    assert row.epochs or row.updates
    assert json.dumps(row.positions)
    assert sampled(row).train.startswith(row.train)


def test_admin_is_part_of_the_wmt14_recipes_only():
    with_admin = {name for name, row in RECIPES.items() if "--admin-init" in row.train}
    assert with_admin == {"wmt14_en_de", "wmt14_en_de_18l", "wmt14_en_fr"}
