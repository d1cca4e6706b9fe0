"""The analysis of translation models, on tiny untrained models."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from PIL import Image, ImageOps
from sacrebleu.metrics import BLEU
from transformers import LlamaConfig

from recipes.lab.steps import CommandError
from recipes.lab.subwords import SentencePiece
from recipes.mt import analyze
from recipes.mt.analysis import scores, swap
from recipes.mt.analysis.arguments import open_translator, translations
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.corpus import SEPARATOR
from recipes.mt.scoring import groups_by_length, score_groups
from tests.support.plots import assert_lines
from tests.support.tables import read_csv
from tests.support.translation_models import (
    TinyModels,
    save_fairseq,
    save_language_model,
    write_corpus,
)

RUNNING = Running(torch.device("cpu"), max_tokens=200)
GREEDY = Decoding(beam=1, max_len_a=1.0, max_len_b=2)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models") / "lists")


def test_translator_that_ignores_order_loses_in_the_swap_test():
    sources = [f" {SEPARATOR} ".join(f"{word} {number} x y" for word in "abc") for number in "123"]

    def bleu_of(translate):
        return swap.swap_bleu(lambda lines, order: translate(lines), sources, sources, BLEU())

    assert bleu_of(lambda lines: lines)["drop"] == 0
    bleu = bleu_of(lambda lines: sources)  # writes what stands in the places it learned
    assert (bleu["original"], bleu["separated"]) == (pytest.approx(100), 100)
    assert 5 < bleu["drop"] < 95
    bleu = bleu_of(lambda lines: [lines[0], *(line.replace(SEPARATOR, "") for line in lines[1:])])
    assert bleu["separated"] == pytest.approx(100 / 3)  # of one line in three


def test_scores_are_counted_by_length():
    references = ["das ist gut", "so ist es", "ein Satz der lang ist"]
    groups = groups_by_length(["a b", "a b c", "a " * 8], (2, 5, 7))
    rows = score_groups(["das ist gut", "so ist", "ein Satz der lang ist"], references, *groups)
    assert list(rows) == ["0-2", "3-5", "over 7", "all"]
    assert [row["count"] for row in rows.values()] == [1, 1, 1, 3]
    assert [row["exact_match"] for row in rows.values()] == pytest.approx([1, 0, 1, 2 / 3])
    assert rows["0-2"]["bleu"] == pytest.approx(100)
    assert 0 < rows["3-5"]["bleu"] < 90


def test_share_of_tokens_scored_higher():
    """Positions 0 to 1 and beyond, frequencies to 3 and beyond; the end of sentence is left out."""
    better = [np.array([-1.0, -2, -3, -4]), np.array([-1.0, -1])]
    worse = [np.array([-2.0, -1, -3, -9]), np.array([-5.0, -9])]
    wins, counts = scores.compare(better, worse, [[1, 7, 2], [3]], [1], [3])
    assert counts.tolist() == [[2, 1], [1, 0]]
    assert wins.tolist() == [[2, 0], [0, 0]]


def test_translations_are_kept(work, tmp_path, monkeypatch):
    model = open_translator(work.fairseq("sinpos"), RUNNING)
    sources = work.sources()[:4]
    lines = translations(model, GREEDY, tmp_path, sources)
    model.translate = None
    assert translations(model, GREEDY, tmp_path, sources) == lines
    with pytest.raises(TypeError):  # other settings are not taken for the same
        translations(model, replace(GREEDY, max_len_b=3), tmp_path, sources)
    for what in ("source_ids", "target_ids"):  # another subword model
        with monkeypatch.context() as patch:
            patch.setattr(model, what, lambda text: [5, 2])
            with pytest.raises(TypeError):
                translations(model, GREEDY, tmp_path, sources)


def test_extrapolate_and_interpolate_on_a_written_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.en").write_text("one\ntwo words\nthree words here\nfour\n")
    Path("a.de").write_text("eins\nzwei\ndrei\nvier mehr oder weniger\n")
    files = ["--text", "a.en", "a.de", "--output", "b.en", "b.de"]
    analyze.main(["extrapolate", *files, "--max-length", "2"])
    assert "2 of 4 pairs kept" in capsys.readouterr().out
    assert Path("b.en").read_text() == "one\ntwo words\n"
    assert Path("b.de").read_text() == "eins\nzwei\n"
    analyze.main(["interpolate", *files, "--count", "3"])
    assert Path("b.en").read_text() == "one <sep> two words <sep> three words here\nfour\n"
    assert Path("b.de").read_text() == "eins <sep> zwei <sep> drei\nvier mehr oder weniger\n"


def test_extrapolate_counts_subwords(work, tmp_path):
    files = ["--text", work.corpus / "train.en", work.corpus / "train.de"]
    output = ["--output", tmp_path / "en", tmp_path / "de"]
    model = work.corpus / "sentencepiece.model"
    analyze.main(["extrapolate", *files, *output, "--max-length", "12", "--spm", model])
    subwords = SentencePiece(model)
    lines = (tmp_path / "de").read_text("utf-8").splitlines()
    assert 0 < len(lines) < 80
    assert max(len(subwords.encode(line).split()) for line in lines) == 12


MORE = {
    "stack": ["--target-tokens", "30"],
    "length": ["--bins", "3", "6", "--beam", "2", "--max-length", "1", "2"],
    "swap": ["--join", "3", "--beam", "1", "--max-length", "1", "2"],
    "similarity": ["--offsets", "0", "20"],
    "scores": ["--bins", "5", "10"],
}


def test_ends_of_texts_are_not_taken_for_better_translation(work, tmp_path, capsys):
    """All positions of the table are reached by all sentences; the CSV marks the others."""
    words = ["stack", "--model", f"a={work.fairseq('nopos')}", *work.test_options]
    analyze.main([*words, "--target-tokens", "70", "--output", str(tmp_path)])
    header, _, row = capsys.readouterr().out.splitlines()[:3]
    assert header == "| model (mean ± standard error over sentences) | 0-49 | 50-69 |"
    rows = read_csv(tmp_path / "stack.csv")
    assert len(rows) > 71
    assert [row["tail"] for row in rows] == ["0"] * 70 + ["1"] * (len(rows) - 70)
    assert len({row["count"] for row in rows[:70]}) == 1
    last = np.mean([float(row["mean_nll"]) for row in rows[50:70]])
    assert f"| {last:.2f} ± " in row
    assert "positions from 70 on" in (tmp_path / "stack.md").read_text()


@pytest.mark.parametrize("command", MORE)
def test_commands_write_tables_and_a_plot(work, tmp_path, command, capsys, monkeypatch):
    if command == "swap":  # BLEU of models that nobody has trained is 0, and its plot blank
        monkeypatch.setattr(Translator, "translate", lambda model, sources, *_: list(sources))
    models = [f"a={work.fairseq('sinpos')},{work.fairseq('sinpos', 2)}"]
    models.append(f"b={work.hf('nopos')},{work.hf('nopos', 2)}")
    words = [command, "--model", *models, *work.test_options, "--output", str(tmp_path)]
    words += ["--inference-offset", "3", *MORE[command]]
    analyze.main(words)
    assert f"{command}.png" in capsys.readouterr().out
    report = (tmp_path / f"{command}.md").read_text("utf-8")
    for fact in ("cores", "torch 2", "test.en", "cape_transformer", "--inference-offset 3"):
        assert fact in report
    (shown,) = re.findall("`python -m recipes.mt.analyze (.*)`", report)
    assert shlex.split(shown) == words
    assert "nan" not in report
    rows = read_csv(tmp_path / f"{command}.csv")
    if command == "scores":  # of one model against the other, of the same tokens
        ids = open_translator(work.fairseq("sinpos"), RUNNING).target_ids
        total = sum(len(ids(target)) - 1 for _, target in work.pairs())
        counts, higher = (
            [sum(int(row[column]) for row in rows if row["seed"] == seed) for seed in "12"]
            for column in ("count", "higher")
        )
        assert counts == [total, total]
        assert f"of all {total} tokens {np.mean(higher) / total:.4f} ± " in report
    else:
        assert {(row["model"], row["seed"]) for row in rows} == {(m, s) for m in "ab" for s in "12"}
    if command == "similarity":
        last = max(row["layer"] for row in rows)
        where = {"model": "a", "layer": last, "offset_a": "0", "offset_b": "20"}
        mean = np.mean([float(r["cosine_similarity"]) for r in rows if where.items() <= r.items()])
        assert f"| 0 and 20 |\n|---|---|\n| a | {mean:.3f} ± " in report
    if command == "swap":  # what was moved comes back to where it was
        assert all(float(row["bleu_original"]) > 1 for row in rows)
        assert {(row["bleu_drop"], row["separated"]) for row in rows} == {("0.0000", "100.0000")}
    if command in ("similarity", "scores"):  # pictures without the colours of models
        picture = Image.open(tmp_path / f"{command}.png").convert("RGB")
        middle = np.asarray(ImageOps.crop(picture, min(picture.size) // 5))
        assert (middle.min(-1) < 230).mean() > 0.005, "blank"
    else:
        assert_lines(tmp_path / f"{command}.png")


def test_text_in_subwords_is_scored_as_text(work, tmp_path, monkeypatch):
    """Scores equal the scores of plain text, in which a word of several pieces counts once."""

    def translate(model, sources, *_):  # the source without its first tokens, and so on some BLEU
        return [model.text(model.source_ids(source)[2:-1]) for source in sources]

    monkeypatch.setattr(Translator, "translate", translate)
    subwords = SentencePiece(work.corpus / "sentencepiece.model")
    rows = {}
    for name, encode, more in (("plain", str, []), ("pieces", subwords.encode, ["--segmented"])):
        test, output = tmp_path / f"{name}.en", tmp_path / name
        lines = (f"{encode(source)}\n" for source in work.sources())
        test.write_text("".join(lines), encoding="utf-8")
        words = ["length", "--model", f"a={work.fairseq('nopos')}", "--test", test, test]
        analyze.main([*words, "--output", output, *MORE["length"], *more])
        rows[name] = read_csv(output / "length.csv")
        report = (output / "length.md").read_text("utf-8")
        assert ("Subwords of the test text are joined" in report) == bool(more)
    assert rows["plain"] == rows["pieces"]
    assert all(5 < float(row["bleu"]) < 99 for row in rows["plain"])


BAD = [
    ("stack --model gone.pt", "--model gone.pt: no such file or folder; give"),
    ("stack --model a=text", "cannot be read as a checkpoint of fairseq"),
    ("stack --model a=folder", "cannot be read as a Hugging Face model"),
    ("stack --model a=A --data folder", "--data FOLDER"),
    ("stack --model a=A --spm text", "--spm text"),
    ("stack --model h=folder --spm h=x", "--spm h=x has no"),
    ("length --model h=folder --segmented", "--segmented: h is a"),
    ("length --model a=A --segmented --spm x", "leave it or --segmented out"),
    ("stack --model a=A --target-tokens 99999", "--target-tokens 99999"),
    ("length --model a=A --bins 5 5", "--bins 5 5: the numbers must"),
    ("length --model a=A --max-length 0 0", "--max-length"),
    ("swap --model a=A", "give --join 10"),
    ("stack --model a=A,T", "all seeds of a name must be of one kind"),
    ("length --model t=T --inference-offset 5", "T: offset 5"),
    ("similarity --model a=A --offsets 1", "--offsets 1"),
    ("scores --model a=A", "scores compares two"),
    ("stack --model a=A --device cpu --fp16", "--fp16: needs a GPU"),
    ("extrapolate --output x ./x", "--output x x: both are the same"),
    ("extrapolate --max-length 1", "--max-length 1: no pair is that short"),
    ("extrapolate --output words.en x", "--output words.en"),
    ("extrapolate --output x.en.gz x.de.gz", "leave out .gz"),
    ("extrapolate --spm model --bpe codes", "--bpe: not allowed with argument --spm"),
    ("interpolate --count 1", "--count 1"),
    ("interpolate --text joined joined", "line 1 has the separator"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input_is_refused(work, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no model\n")
    Path("folder").mkdir()
    Path("joined").write_text(f"a {SEPARATOR} b\n")
    for code in ("en", "de"):
        Path(f"words.{code}").write_text("two words\n")
    for name, position in (("A", "sinpos"), ("T", "abspos")):
        Path(name).symlink_to(work.fairseq(position))
    command, *rest = words.split()
    if command in ("extrapolate", "interpolate"):
        rest = ["--text", "words.en", "words.de", "--output", "out.en", "out.de", *rest]
    else:
        rest += work.test_options
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((CommandError, SystemExit)) as error:
        analyze.main([command, *rest])
    assert message in f"{error.value} {capsys.readouterr().err}"
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written


def test_language_models_are_refused_before_any_work(work, tmp_path, monkeypatch):
    """Models of both hosts, also behind a model that translates."""
    shutil.copy(work.corpus / "binary/dict.en.txt", tmp_path / "dict.txt")
    save_language_model(tmp_path, tmp_path / "lm.pt")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    monkeypatch.setattr(Translator, "log_probabilities", None)
    for name, message in (("lm.pt", "task language_modeling"), ("llama", "type llama")):
        models = [f"a={work.fairseq('nopos')}", f"b={tmp_path / name}"]
        with pytest.raises(CommandError, match=f"{name}: is of the {message}.*; give a"):
            analyze.main(["stack", "--model", *models, *work.test_options])


def test_models_with_other_subwords_are_not_compared_by_token(work, tmp_path):
    other = write_corpus(tmp_path / "other")
    SentencePiece.train([other / "train.de"], other / "sentencepiece.model", 45)
    checkpoint = save_fairseq(other, tmp_path / "checkpoint.pt", "--position-embedding", "nopos")
    models = [f"a={work.fairseq('nopos')}", f"b={checkpoint}"]
    with pytest.raises(CommandError, match="different subwords"):
        analyze.main(["scores", "--model", *models, *work.test_options])
