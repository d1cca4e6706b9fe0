"""Comparisons of speech models: bins of durations, reports, and the commands."""

import csv
import re
import shlex

import jiwer
import pytest

pytest.importorskip("soundfile")
from recipes.asr import evaluate, run
from recipes.asr.catalog import BATCHES, RECIPES, STUDIES
from recipes.asr.report import ALL, Text, by_duration, rates, write_plot
from recipes.lab.runs import Result
from recipes.lab.steps import CommandError
from tests.support.fairseq_speech import durations, write_manifest
from tests.support.plots import COLOURS, assert_lines

SMALL = (
    *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16, "--encoder-layers", 1),
    *("--encoder-attention-heads", 2, "--max-tokens", 500, "--lr", 0.01),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    for seed, (split, count) in enumerate((("train", 16), ("valid", 3), ("test", 9))):
        write_manifest(path, split, durations(count, seed), seed)
    return path


# ---- rates ---------------------------------------------------------------------------------------

TEXTS = [
    Text(0.5, "a b c", "a b c"),
    Text(1.0, "a b", "a x"),
    Text(1.5, "one two", ""),
    Text(9.0, "x", "x y"),
]


def test_rates_are_jiwers():
    found = rates(TEXTS)
    references, hypotheses = [t.reference for t in TEXTS], [t.hypothesis for t in TEXTS]
    assert found.wer == pytest.approx(100 * jiwer.wer(references, hypotheses))
    assert found.ler == pytest.approx(100 * jiwer.cer(references, hypotheses))
    assert (found.words, found.count) == (8, 4)


def test_bins_include_their_upper_end():
    found = by_duration(TEXTS, (1, 2, 4))
    assert {name: (one.count, one.wer) for name, one in found.items()} == {
        "0-1 s": (2, 20.0),
        "1-2 s": (1, 100.0),
        "over 4 s": (1, 100.0),
        ALL: (4, 50.0),
    }


# ---- what is compared ----------------------------------------------------------------------------


def test_every_study_has_its_models_and_flags():
    from cape_plugins.registry import TYPES

    assert list(STUDIES["types"]) == list(TYPES)
    assert len(STUDIES["augmentation"]) == 4
    for models in STUDIES.values():
        flags = list(models.values())
        assert len(flags) == len(set(flags)) >= 2
    assert list(BATCHES) == ["padded", "padding-free"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("study", STUDIES)
def test_flags_of_recipes_are_known(folder, recipe, study):
    """Parsed as fairseq-train parses them."""
    from fairseq import options

    import fairseq_user_dir  # noqa: F401

    words = shlex.split(f"{RECIPES[recipe].train} {next(reversed(STUDIES[study].values()))}")
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(
        parser, [str(folder), "--task", "cape_asr", "--criterion", "cape_ctc", *words]
    )
    assert args.task == "cape_asr"
    if recipe not in ("small", "digits"):
        assert (args.encoder_layers, args.encoder_embed_dim) == (36, 768)


# ---- commands ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_comparison_from_training_to_plot(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["--data", str(folder), "--models", "cape", "--updates", "3", "--bins", "1"]
    command += [
        "--batches",
        *BATCHES,
        "--seeds",
        "1",
        "2",
        "--hops",
        "10",
        "16",
        "--",
        *map(str, SMALL),
    ]
    run.main(command)
    out = tmp_path / "results/asr/types"
    with open(out / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = {"cape", "cape (padding-free)"}
    assert {(row["model"], row["seed"]) for row in rows} == {(n, s) for n in names for s in "12"}
    assert {row["duration"] for row in rows} == {"0-1 s", "over 1 s", "all"}
    assert all(float(row["wer"]) > 0 for row in rows)
    text = (out / "scores.md").read_text()
    assert "Mean of seeds 1, 2" in text
    assert "--padding-free" in text
    assert str(tmp_path) not in text
    with open(out / "hops.csv", newline="") as file:
        hops = list(csv.DictReader(file))
    assert [(row["model"], row["hop_ms"]) for row in hops] == [
        (name, hop) for name in sorted(names) for hop in ("10", "16")
    ]
    assert all(float(row["audio_seconds_per_second"]) > 0 for row in hops)
    # in one colour, and the second over the first: neither model has learned anything
    assert_lines(out / "scores.png", COLOURS[:1])
    assert_lines(out / "hops.png", COLOURS[1:])
    # the same decoding, of a checkpoint alone
    checkpoint = tmp_path / "build/asr/types/runs/cape-seed1/checkpoint_last.pt"
    evaluate.main([str(checkpoint), "--data", str(folder), "--bins", "1", "--output", "again"])
    with open("again/test/scores.csv", newline="") as file:
        found = list(csv.DictReader(file))
    again = [(row["duration"], row["wer"]) for row in found]
    assert {(row["seed"], row["train_seconds"]) for row in found} == {("", "")}, "not known"
    first = [(r["duration"], r["wer"]) for r in rows if (r["model"], r["seed"]) == ("cape", "1")]
    assert again == first
    capsys.readouterr()
    run.main(command)  # all is reused
    assert "4 trainings" in capsys.readouterr().out


def test_what_is_grey_is_in_the_legend(tmp_path, monkeypatch):
    """And nothing is said of grey where nothing is."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    results = [Result("cape", None, None, by_duration(TEXTS, (1,)))]
    for trained in (1, 0):
        write_plot(tmp_path / "scores.png", results, ["0-1 s", "over 1 s"], trained)
    labels = [
        ([text.get_text() for text in axes.get_legend().get_texts()], axes.get_xlabel())
        for figure in figures
        for axes in figure.axes
    ]
    assert labels == [(["cape", "occurs in training"], "duration"), (["cape"], "duration")]


def test_sets_without_text(folder, tmp_path, monkeypatch):
    """Recordings without text are decoded, and not counted; a set without any is refused."""
    output = {"H-0": "a b", "H-1": "x", "H-2": "c", "T-0": "a b"}
    monkeypatch.setattr(evaluate, "run_module", lambda *_, log, **__: log.write_text(
        "".join(f"{name}\t{text}\n" for name, text in output.items())
        + "Translated 3 sentences (3 tokens) in 0.5s (1 sentences/s, 1 tokens/s)\n"
    ))  # fmt: skip
    rows = ["audio\tseconds\ttext", "test/000.wav\t1.5\ta b"]
    rows += [f"test/00{n}.wav\t1.0\t" for n in (1, 2)]
    (folder / "mixed.tsv").write_text("\n".join(rows) + "\n")
    checkpoint = tmp_path / "one.pt"
    checkpoint.touch()
    texts, speed = evaluate.decode(folder, "mixed", checkpoint, tmp_path / "mixed")
    assert texts == [Text(1.5, "a b", "a b")]
    assert speed == pytest.approx(7.0)
    (folder / "bare.tsv").write_text("audio\ntest/000.wav\n")
    with pytest.raises(CommandError, match="no recording of bare.tsv has a text to compare with"):
        evaluate.decode(folder, "bare", checkpoint, tmp_path / "bare")


BAD_RUN = [
    (["--models", "foo"], "--models foo: study types has nopos"),
    (["--data", "gone"], "there is no train.tsv"),
    (["--bins", "3", "2"], "--bins 3 2: allowed: increasing"),
    (["--test", "gone"], "there is no gone.tsv"),
]


@pytest.mark.parametrize(("words", "message"), BAD_RUN, ids=[message for _, message in BAD_RUN])
def test_bad_comparisons(folder, words, message):
    data = [] if "--data" in words else ["--data", str(folder)]
    with pytest.raises(CommandError, match=message):
        run.main([*data, *words])


BAD_EVALUATION = [
    (["gone.pt"], CommandError, "gone.pt: no such checkpoint"),
    ([__file__, "--sets", "gone"], CommandError, "there is no .*gone.tsv"),
    ([__file__, "--hop-seconds", "0.02"], CommandError, "--hop-seconds is set by this command"),
    ([__file__, "--bins", "-1"], CommandError, "--bins -1: allowed: increasing"),
    ([__file__, "--hops", "500"], SystemExit, "is not a hop of 1 to 100 ms"),
]


@pytest.mark.parametrize(("words", "kind", "message"), BAD_EVALUATION, ids=list("abcde"))
def test_bad_evaluations(folder, words, kind, message, capsys):
    with pytest.raises(kind) as error:
        evaluate.main([*words, "--data", str(folder)])
    assert re.search(message, f"{error.value} {capsys.readouterr().err}")


def test_results_are_those_of_the_translation_reports():
    """The shared table: mean and range over seeds."""
    from recipes.mt.report import markdown_table

    results = [
        Result("cape", seed, 1.0, by_duration(TEXTS[:n], (1,))) for seed, n in ((1, 1), (2, 2))
    ]
    assert markdown_table(results, "wer", ["0-1 s"])[-1] == "| cape | 10.00 (0.00-20.00) |"
