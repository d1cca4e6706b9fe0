"""The command of phone classification: its options, its files, what it refuses."""

import re
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("soundfile")
import torch

from recipes.lab.steps import CommandError
from recipes.phones import measure, pictures, run
from recipes.phones.data import BANDS, Corpus, Example, join_and_cut
from recipes.phones.model import Sizes
from recipes.phones.report import COUNTS, TABLES, Result, write_results
from tests.support.tables import read_csv

TINY = "--train-size 6 --dev-size 2 --epochs 1 --dim 24 --layers 1"


@pytest.mark.slow
def test_command_compares_types_and_writes_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"{TINY} --test-size 3 --similarity-length 40".split()
    command += ["--compare", "sinpos", "--conditions", "inc", "exc"]
    run.main(command)
    first = capsys.readouterr().out
    output = tmp_path / "results" / "phones"
    tables = {f"{name}.csv" for name in ("measurements", "confusions", *TABLES)}
    assert {path.name for path in output.iterdir()} == {*tables, *("results.md", "nopos", "sinpos")}
    assert len(read_csv(output / "measurements.csv")) == 2 * 5
    page = (output / "results.md").read_text("utf-8")
    for words in ("Machine", "torch", "| sinpos M-inc |", "| sinpos M-exc |", "type3"):
        assert words in page
    for link in page.split("](")[1:]:
        assert (output / link.partition(")")[0]).read_bytes().startswith(b"\x89PNG")
    table = np.loadtxt(output / "confusions.csv", delimiter=",", skiprows=1, dtype=str)
    assert set(table[:, 6:].astype(float).sum(1).round(1)) <= {0.0, 100.0}
    models = Counter(map(tuple, table[:, :5]))
    assert set(models.values()) == {len(table[0]) - 6}  # a row a class; a shared model once
    assert {name for name, *_ in models} == {"nopos", "sinpos"}
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("build/phones/*/model.pt")}
    assert len(stamps) == 2
    monkeypatch.setattr(pictures, "save", lambda figure, path: path.touch())
    run.main(command)
    assert capsys.readouterr().out == first
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    with pytest.raises(CommandError, match="ffn 256, now 128"):
        run.main([*command, "--seeds", "1", "--ffn", "128"])


def result_of(seeds):
    """What a training with each of these seeds measured, of 7 and 8."""
    counts = {7: (20.0, 100, 1, 2, 3, 4), 8: (30.0, 110, 1, 4, 3, 4)}
    matrices = {7: np.array([[75.0, 25.0], [2.0, 98.0]]), 8: np.array([[95, 5], [60, 40]])}
    head = {"layer": 1, "head": 1, "distance": 2, "weight": 0.25}
    relations = {"layer": 1, **dict.fromkeys(["all to z", "z to z"], 0.5)}
    relations |= dict.fromkeys(["all to s", "z to s", "s to z", "s to s"])  # no /s/ in the test
    result = Result("sinpos", 50)
    result.confusions["inc"] = {seed: matrices[seed] for seed in seeds}
    result.fitted["inc", "inc"] = {seed: matrices[seed].T for seed in seeds}
    for seed in seeds:
        names = {"trained": "inc", "seed": seed}
        measured = dict(zip(COUNTS, counts[seed], strict=True))
        result.rows.append({"type": "sinpos", **names, "tested": "exc", **measured})
        result.trainings.append({**names, "loss": seed - 6, "PER of dev": 9.0, "epoch": 3})
        result.histories.append({**names, "epoch": 1, "train_loss": 1.0})
        result.fitted_rates.append({**names, "tested": "inc", "utterances": 4, "per": seed / 2})
        result.heads.append({**names, **head, "near": seed / 10})
        result.epochs.append({**names, "epoch": 5, **head, "near": seed / 20})
        result.layer_relations.append({**names, **relations, "same class": seed})
    return result


def test_page_has_means_over_seeds_and_says_what_is_of_one(tmp_path):
    write_results(tmp_path, {}, ["z", "t"], [result_of([7])])
    alone = (tmp_path / "results.md").read_text("utf-8")
    assert "| M-inc, exc | 20.00 | 100 | 1 | 2 | 3 | 4 |" in alone
    assert "are of seed" not in alone
    write_results(tmp_path, {}, ["z", "t"], [result_of([7, 8])])
    both = (tmp_path / "results.md").read_text("utf-8")
    for line in (
        "| M-inc, exc | 25.00 ± 7.07 | 105.00 ± 7.07 | 1 | 3.00 ± 1.41 | 3 | 4 |",
        "| M-inc | 1.50 ± 0.71 | 9.00 ± 0.00 | 3 |",
        "| M-inc | 1 | 1 | 2 | 0.25 | 0.70 |",  # the heads of one seed
        "| t as z 31.0 ± 41.0 |\n| z as t 15.0 ± 14.1 |",
        "| M-inc, inc | 3.75 ± 0.35 |",
        "| M-inc, 1 | 0.38 ± 0.04 |",
        "| M-inc, 1 | 7.50 ± 0.71 | 0.50 ± 0.",
        "Pictures of attention, and printed errors, are of seed 7.",
    ):
        assert line in both


LITTLE = "--train-size 3 --dev-size 1 --test-size 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"--dim 90 {LITTLE}", "--dim 90: 40 features and 90 position channels make 130"),
        (f"--dim 3 --heads 43 {LITTLE}", "--dim 3: allowed: even numbers"),
        (f"--paper --position-embedding rope {LITTLE}", "--dim 768 --heads 8: rope: a head of 101"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--data nowhere --train-size 3", "--train-size is for the built-in speech"),
        ("--tier phones", "--tier needs --data"),
        ("--position-max-offset 3", "has no effect on position embedding 'sinpos'"),
        ("--position-embedding nopos --conditions inc", "nopos has no positions; give exc"),
        ("--device abacus", "--device abacus: not available here"),
        ("--test-lengths 1 --conditions exc", "--conditions exc: sinpos is tested with positions"),
        ("--test-lengths 1 --attention-epochs 2", "--attention-epochs has no effect"),
        ("--train-length 2 --test-lengths 0.5 1", "shorter than --train-length 2"),
        ("--attention-epochs 3 13", "--attention-epochs 13: allowed: 1 to 12"),
        ("--paper --optimizer adamw", "--optimizer adamw with --paper has no learning rates"),
    ],
)
def test_mistakes_of_the_caller_are_named_and_write_nothing(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=re.escape(message)):
        run.main(words.split())
    assert not any(tmp_path.iterdir())


def test_paper_option_has_the_sizes_of_the_thesis():
    """Sizes that are given win, as for Table 5.1."""
    for words, layers, dim in (("--layers 2", 2, 768), ("--dim 512", 6, 512)):
        args = run.parse_arguments(["--paper", *words.split()])
        sizes = (args.dim, args.layers, args.heads, args.ffn, args.dropout)
        assert sizes == (dim, layers, 8, 2048, 0.1)


class Started(Exception):
    """The first model would be built now."""


def test_settings_equal_the_thesis(tmp_path, monkeypatch):
    """Its sections 4.1 to 4.5 and 5.1, and the figures of chapter 5, by the command line."""
    monkeypatch.chdir(tmp_path)
    started = {}

    def keep(experiment, name, config, args):
        started.update(experiment=experiment, config=config, args=args)
        raise Started

    monkeypatch.setattr(run, "run_type", keep)
    with pytest.raises(Started):
        run.main(["--paper", "--train-size", "3", "--dev-size", "1", "--test-size", "1"])
    experiment, args = started["experiment"], started["args"]
    assert experiment.sizes == Sizes(768, 6, 8, 2048, 0.1)  # Tables 4.2 and 5.2
    training = experiment.training
    assert (training.optimizer, training.batch_size, training.epochs) == ("sgd", 1, 80)
    assert [training.rate(epoch - 1) for epoch in (1, 70, 71, 80)] == [0.05, 0.05, 0.001, 0.001]
    assert training.kept_epochs == (10, 30, 50, 79)  # Figures 5.15 and 5.23
    assert args.similarity_length == 3000  # Figure 5.21
    assert args.conditions == ["inc", "exc", "inc-scram", "exc-scram"]
    assert measure.FITTED_UTTERANCES == 1000  # Figures 5.4 to 5.6
    assert {*measure.FITTED} == {("inc", "inc"), ("exc", "exc"), ("inc", "exc")}
    assert started["config"].type == "sinpos"
    model = experiment.build(started["config"], 1)
    assert model.project.weight.shape == (808, 808)  # section 4.2
    assert len(model.layers) == 6
    assert experiment.corpus.splits["train"][0].features.shape[1] == 40


def test_learning_rates_follow_the_optimizer():
    sgd, adamw = (run.parse_arguments(["--optimizer", name]) for name in ("sgd", "adamw"))
    assert (sgd.learning_rate, sgd.final_learning_rate) == (0.1, 0.001)
    assert adamw.learning_rate == 10 * adamw.final_learning_rate < 0.01
    args = run.parse_arguments(["--optimizer", "adamw", "--learning-rate", "0.5"])
    rates = (args.learning_rate, args.final_learning_rate)
    assert rates == (0.5, adamw.final_learning_rate)


def make_corpus(counts, length=7):
    """Utterances in which frame i of a split has features i and label i."""
    splits = {}
    for split, count in zip(("train", "dev", "test"), counts, strict=True):
        numbers = torch.arange(count * length).split(length)
        splits[split] = [
            Example(f"{split}{i}", labels[:, None].expand(-1, BANDS).float(), labels)
            for i, labels in enumerate(numbers)
        ]
    return Corpus(["a"], splits, "made up")


def test_speech_is_joined_and_cut():
    corpus = make_corpus((3, 2, 5))
    pieces = join_and_cut(corpus, 0.04, [0.12, 0.08])
    assert [len(pieces.splits[split]) for split in ("train", "dev", "test")] == [5, 3, 6]
    assert [*pieces.lengths] == [0.04, 0.08, 0.12]
    for seconds, items in pieces.lengths.items():
        # 35 frames are two pieces of 12, and what is left over is in no test
        assert torch.cat([item.labels for item in items]).tolist() == [*range(24)]
        assert {len(item.labels) for item in items} == {round(100 * seconds)}
    for item in (*pieces.splits["train"], *pieces.lengths[0.12]):
        assert torch.equal(item.features[:, 3], item.labels.float())
    assert [item.name for item in pieces.splits["dev"]] == ["dev0", "dev0", "dev1"]
    assert pieces.splits["test"] is pieces.lengths[0.04]
    assert pieces.fingerprint() != corpus.fingerprint()


@pytest.mark.parametrize(
    ("train", "tests", "message"),
    [
        (0.15, (), "--train-length 0.15: dev has 0.14 s of speech"),
        (0.05, (0.1, 0.4), "--test-lengths 0.4: test has 0.35 s of speech"),
    ],
)
def test_too_little_speech_is_named(train, tests, message):
    with pytest.raises(CommandError, match=re.escape(message)):
        join_and_cut(make_corpus((3, 2, 5)), train, tests)


@pytest.mark.slow
def test_command_tests_by_length(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = f"{TINY} --test-size 6 --optimizer adamw --batch-size 4 --train-length 0.3".split()
    types = ["nopos", "sinpos", "cape:max_global_shift=1"]
    command += ["--test-lengths", "0.6", "1.2", "--compare", *types, "--seeds", "1", "2"]
    run.main(command)
    output = tmp_path / "results" / "phones"
    rows = read_csv(output / "lengths.csv")
    trained = {(row["type"], row["trained"], row["seed"], row["seconds"]) for row in rows}
    models = [("nopos", "exc"), *((name, "inc") for name in types[1:])]
    lengths = ("0.3000", "0.6000", "1.2000")
    assert trained == {(*model, seed, n) for model in models for seed in "12" for n in lengths}
    assert len(read_csv(output / "training.csv")) == 6
    page = (output / "results.md").read_text("utf-8")
    head = "(mean ± sample standard deviation of 2 seeds) | 0.3 s | 0.6 s | 1.2 s |"
    for words in (head, "cape:max_global_shift=1 M-inc |", "AdamW, utterances per step: 4"):
        assert words in page
    assert head in capsys.readouterr().out
    assert (output / "lengths.png").read_bytes().startswith(b"\x89PNG")
