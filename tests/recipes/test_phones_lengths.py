"""Phone classification on short pieces, tested on long ones: the data and the command."""

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("soundfile")
from recipes.lab.steps import CommandError
from recipes.phones import run
from recipes.phones.data import BANDS, Corpus, Example, join_and_cut
from tests.support.tables import read_csv


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


def test_either_length_may_be_left_out():
    corpus = make_corpus((3, 2, 5))
    assert join_and_cut(corpus, None, ()) is corpus
    tested = join_and_cut(corpus, None, [0.1])
    assert tested.splits == corpus.splits
    assert [len(item.labels) for item in tested.lengths[0.1]] == [10, 10, 10]
    trained = join_and_cut(corpus, 0.1, ())
    assert [len(items) for items in trained.splits.values()] == [2, 1, 3]


@pytest.mark.parametrize(
    ("train", "tests", "message"),
    [
        (0.15, (), "--train-length 0.15: dev has 0.14 s of speech"),
        (0.05, (0.1, 0.4), "--test-lengths 0.4: test has 0.35 s of speech"),
    ],
)
def test_too_little_speech_is_named(train, tests, message):
    with pytest.raises(CommandError) as error:
        join_and_cut(make_corpus((3, 2, 5)), train, tests)
    assert message in str(error.value)


@pytest.mark.slow
def test_command_tests_by_length(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = "--train-size 6 --dev-size 2 --test-size 6 --epochs 1 --dim 24 --layers 1"
    command = f"{sizes} --optimizer adamw --batch-size 4 --train-length 0.3 --test-lengths 0.6 1.2"
    types = ["nopos", "sinpos", "cape:max_global_shift=1"]
    run.main([*command.split(), "--compare", *types, "--seeds", "1", "2"])
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--test-lengths 1 --conditions exc", "--conditions exc: sinpos is tested with positions"),
        ("--test-lengths 1 --attention-epochs 2", "--attention-epochs has no effect"),
        ("--train-length 2 --test-lengths 0.5 1", "shorter than --train-length 2"),
        ("--attention-epochs 3 13", "--attention-epochs 13: allowed: 1 to 12"),
        ("--paper --optimizer adamw", "--optimizer adamw with --paper has no learning rates"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError) as error:
        run.main(words.split())
    assert message in str(error.value)
    assert not any(tmp_path.iterdir())
