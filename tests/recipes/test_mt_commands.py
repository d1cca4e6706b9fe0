"""Commands of docs/paper_map.md and recipes/mt/README.md that translate, as a reader types them.
The numbers are copied from the papers: CAPE: figure 8 (section 5.3), table 9 and appendix D.2.
SHAPE: section 3.2 (table 1), table 4; its figure 2 names no offset that could be read.
"""

import re
import shlex
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from benchmarks import hosts, measure, relative
from benchmarks import run as benchmark
from recipes.mt import analyze, experiment
from recipes.mt import run as recipe
from recipes.mt.experiment import Experiment


class Reached(Exception):
    """The work of a command would begin, with what the exception holds."""


def stop(*args, **more):
    raise Reached(*args)


@pytest.fixture
def words_of(repo_root):
    """Words after ``python -m PROGRAM`` of the commands in a row of the map, by its first cell."""
    page = (repo_root / "docs/paper_map.md").read_text("utf-8")

    def words_of(row, program):
        (line,) = re.findall(rf"^\| {re.escape(row)} \|.*", page, re.MULTILINE)
        return [shlex.split(rest) for rest in re.findall(f"`python -m {program} ([^`]*)`", line)]

    return words_of


def reached(words, folder):
    """What the work of a translation recipe would begin with."""
    with pytest.raises(Reached) as caught:
        recipe.main([*words, "--work", str(folder), "--device", "cpu"])
    return caught.value.args


def write_lines(folder, split, count, text):
    folder.mkdir()
    for language in ("en", "de"):
        (folder / f"{split}.{language}").write_text(f"{text}\n" * count, encoding="utf-8")


def test_figure_8_is_stacked_to_300_tokens(words_of, tmp_path, monkeypatch):
    write_lines(tmp_path / "tokenised", "test", 700, "x")
    monkeypatch.setattr(Experiment, "subwords", SimpleNamespace(encode=str))
    model = SimpleNamespace(log_probabilities=stop)
    monkeypatch.setattr(Experiment, "open_selected", lambda self: model)
    (words,) = words_of("P Fig. 8", "recipes.mt.run")
    (stacked,) = reached(words, tmp_path)
    assert [len(target.split()) for _, target in stacked] == [300, 300]
    texts = ["--model", "m", "--test", "a.en", "a.de"]
    assert analyze.make_parser().parse_args(["stack", *texts]).target_tokens == 300


@pytest.fixture
def swap(words_of, tmp_path, monkeypatch):
    """What SHAPE's swap test gives to the function that translates and scores."""
    write_lines(tmp_path / "subwords", "train", 10_001, "x <sep> y")
    monkeypatch.setattr(Experiment, "open_selected", lambda self: SimpleNamespace(plain=str))
    monkeypatch.setattr(Experiment, "detokenise", lambda self, lines: lines)
    monkeypatch.setattr(experiment, "swap_bleu", stop)
    (words,) = words_of("SH Table 1", "recipes.mt.run")
    return reached(words, tmp_path)


def test_table_1_swaps_ten_thousand_training_lines(swap):
    assert [len(lines) for lines in swap[1:3]] == [10_000, 10_000]  # sources, references


def test_beam_search_of_shapes_rows_has_its_length_penalty(words_of, swap):
    """Four hypotheses (table 4), and no penalty: the paper names none, OpenNMT-py has none."""
    decoding = swap[0].args[1]
    assert (decoding.beam, decoding.length_penalty) == (4, 0)
    for row in ("SH Fig. 3", "SH Fig. 7"):
        (words,) = words_of(row, "recipes.mt.analyze")
        args = analyze.make_parser().parse_args(words)
        assert (args.command, args.beam, args.length_penalty) == ("length", 4, 0)


def test_page_of_the_swap_has_the_loss_of_bleu(words_of, tmp_path, monkeypatch):
    """By a translator that writes training lines again, in their own order."""
    write_lines(tmp_path / "subwords", "train", 20, "a b c d <sep> e f g h")
    monkeypatch.setattr(Experiment, "open_selected", lambda self: SimpleNamespace(plain=str))
    monkeypatch.setattr(experiment, "translations", lambda *args: list(args[-2]))
    (words,) = words_of("SH Table 1", "recipes.mt.run")
    recipe.main([*words, "--work", str(tmp_path), "--device", "cpu"])
    page = (tmp_path / "runs/shape/swap.md").read_text("utf-8")
    numbers = map(float, re.findall(r"-?\d+\.\d+", page)[:4])
    assert [*numbers] == pytest.approx([100, 100, 0, 100])
    assert "20 of training" in page


@pytest.mark.parametrize("row", ["SH Fig. 2", "SH Fig. 6"])
def test_figure_2_goes_from_no_offset_to_the_largest_of_training(words_of, row):
    """500 (table 4); offsets between are in no paper."""
    (words,) = words_of(row, "recipes.mt.analyze")
    assert [*analyze.make_parser().parse_args(words).offsets] == [0, 100, 250, 500]
    args, _ = recipe.parse_arguments(["wmt16_en_de_interpolate", "train", "--device", "cpu"])
    assert args.compared["shape"]["max_offset"] == 500


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_table_9_has_the_sizes_and_rounds_of_the_paper(words_of, monkeypatch, dtype):
    """Batches of 50, 768 in 8 heads, 6 layers; 100 updates after 10 of warm-up."""
    run, calls, shapes, precisions = relative.run, Counter(), {}, set()

    def make_model(task, context, shape, setup):
        shapes[context] = shape
        precisions.add(setup.dtype)
        return context

    def make_step(context, part, batch, length, setup):
        return lambda: calls.update([(context, part, batch, length)])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure.Setup, "synchronize", lambda setup: None)
    monkeypatch.setattr(measure.gc, "collect", lambda: None)
    monkeypatch.setattr(hosts, "share_parameters", list)
    monkeypatch.setattr(relative, "make_model", make_model)
    monkeypatch.setattr(relative, "make_step", make_step)
    monkeypatch.setattr(relative, "peak_memory", lambda *_: 1.0)
    monkeypatch.setattr(relative, "run", lambda setup: stop(run(setup)))
    _, single, half = words_of("A Table 9", "benchmarks.run")
    with pytest.raises(Reached):
        benchmark.main({"float32": single, "float16": half}[dtype])
    assert precisions == {getattr(torch, dtype)}
    assert shapes == dict.fromkeys((0, 100, 1000), (768, 8, 6))
    sizes = [(p, 50, t) for p in ("layer", "encoder", "decoder") for t in (10, 100, 1000)]
    expected = {(context, *size): 10 + 100 for context in (100, 1000) for size in sizes}
    twice = {(0, *size): 2 * (10 + 100) for size in sizes}  # the reference takes part twice
    assert calls == expected | twice


def test_studies_compare_their_types_and_train_and_select_as_the_section_says(repo_root):
    """4800 updates; the last five checkpoints, one every 200 updates, are averaged."""
    page = (repo_root / "recipes/mt/README.md").read_text("utf-8").replace("\\\n", " ")
    section = page.partition("\n## Multi30k\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^ {4}python -m recipes\.mt\.run (.*)", section, re.MULTILINE)
    parsed = [recipe.parse_arguments(shlex.split(command)) for command in commands]
    assert [args.recipe for args, _ in parsed] == ["multi30k_study", "multi30k_study_interpolate"]
    for args, extra in parsed:
        assert extra == []  # nothing goes to fairseq-train
        types = {settings["type"] for settings in args.compared.values()}
        # a type that is added later has no trainings in the finished studies
        assert types == {"nopos", "sinpos", "abspos", "relpos", "shape", "cape", "randpos", "rfs"}
        shifts = {settings.get("max_global_shift") for settings in args.compared.values()}
        assert shifts == {None, 5, 10, 20, 50}
        assert args.seeds == [1, 2, 3]
        assert (args.settled.updates, args.settled.save_every) == (4800, 200)
        assert (args.settled.select, args.settled.average) == ("average", 5)
