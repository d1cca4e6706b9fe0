"""Proves that an evaluation sees each sentence of a set exactly once, while a training keeps the
batches that fairseq makes; and that sentences which are too long for it are named."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from fairseq.data import data_utils
from fairseq.trainer import Trainer

from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.host.whole_sets import with_batches_of_training
from tests.support.fairseq_models import USER_DIR, lines, run_here, train_words

COUNT = 60  # no multiple of 8
LIMITS = [(None, None), (400, None), (None, 7), (150, 12)]


def batches_of(lengths, max_tokens, max_sentences, multiple=8, batch=data_utils.batch_by_size):
    order = np.argsort(lengths, kind="stable")
    return batch(
        order,
        num_tokens_fn=lambda index: int(lengths[index]),
        num_tokens_vec=lengths[order],
        max_tokens=max_tokens,
        max_sentences=max_sentences,
        required_batch_size_multiple=multiple,
    )


@pytest.mark.parametrize("count", [1, 8, 60])
@pytest.mark.parametrize("limits", LIMITS)
def test_batches_hold_each_sentence_once(limits, count):
    lengths = np.random.default_rng(count).integers(2, 60, count)
    batches = batches_of(lengths, *limits)
    assert sorted(np.concatenate(batches)) == list(range(count))
    max_tokens, max_sentences = limits
    for batch in batches:
        assert not max_tokens or len(batch) * lengths[batch].max() <= max_tokens
        assert not max_sentences or len(batch) <= max_sentences


def test_what_stock_fairseq_loses_is_the_longest():
    """If stock fairseq loses no sentence any more, the repair can be removed."""
    lengths = np.random.default_rng(0).permutation(COUNT) + 2
    whole = batches_of(lengths, 4000, None)
    stock = batches_of(lengths, 4000, None, batch=data_utils.batch_by_size.__wrapped__)
    assert [batch.tolist() for batch in whole[:-1]] == [batch.tolist() for batch in stock]
    assert sorted(lengths[whole[-1]]) == sorted(lengths)[-4:]


@pytest.mark.parametrize("later", [False, True], ids=["at once", "each epoch"])
def test_batches_of_a_training_stay(later):
    """Also if batches are made again for each epoch, after the iterator has been built."""
    lengths = np.full(COUNT, 5)

    def sampler(*_):
        return batches_of(lengths, None, 8)

    def stock(self, epoch):
        return SimpleNamespace(batch_sampler=sampler if later else sampler())

    batches = with_batches_of_training(stock)(None, 1).batch_sampler
    batches = batches(None, 1) if later else batches
    assert sum(map(len, batches)) == 56
    assert sum(map(len, sampler())) == COUNT


def test_the_sentence_that_fits_into_no_batch_is_named():
    lengths = np.array([5, 90, 7])
    with pytest.raises(SettingsError, match="--max-tokens 80 .* 90 tokens of sample 1;"):
        batches_of(lengths, 80, None)


@pytest.fixture(scope="module")
def sets(corpus, tmp_path_factory):
    """Raw data whose sets have COUNT sentences, each of another length than most."""
    folder = tmp_path_factory.mktemp("sets")
    for name in ("dict.en.txt", "dict.de.txt"):
        shutil.copy(corpus.binary / name, folder)
    for language, word in (("en", "one"), ("de", "eins")):
        text = "".join(f"{word} " * (3 + number % 40) + "\n" for number in range(COUNT))
        for split in ("train", "valid", "test"):
            (folder / f"{split}.en-de.{language}").write_text(text)
    return folder


def generate(sets, checkpoint, *extra):
    return run_here(
        "fairseq-generate", sets, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu",
        "--dataset-impl", "raw", "--beam", 1, "--max-len-b", 5, "--num-workers", 0, *extra,
    )  # fmt: skip


@pytest.mark.slow
def test_generation_translates_each_sentence_once(trained, sets):
    """Also with a stock model; in batches of few tokens; and by several programs."""
    few = ["--max-tokens", 100, "--required-batch-size-multiple", 4]
    for output in generate(sets, trained("stock")), generate(sets, trained("cape"), *few):
        hypotheses = lines(output, "H")
        assert sorted(hypotheses) == list(range(COUNT))
        assert all(len(texts) == 1 for texts in hypotheses.values())
    two = ["--batch-size", 7, "--num-shards", 2, "--shard-id"]
    shards = [list(lines(generate(sets, trained("cape"), *two, n), "H")) for n in range(2)]
    assert all(shards)
    assert sorted(np.concatenate(shards)) == list(range(COUNT))


@pytest.mark.slow
def test_sentences_that_are_too_long_are_skipped_if_that_is_asked_for(trained, sets):
    """Otherwise test_errors.py tests what they end with."""
    words = ["--max-source-positions", 40, "--skip-invalid-size-inputs-valid-test"]
    output = generate(sets, trained("cape"), *words)
    skipped = re.search(r"(\d+) samples have invalid sizes", output)[1]
    assert len(lines(output, "H")) == COUNT - int(skipped) < COUNT


@pytest.mark.slow
def test_language_model_is_evaluated_on_each_word(run_cli, trained, corpus):
    text = (corpus.text / "test.de").read_text().split()
    words = [
        "fairseq-eval-lm", corpus.lm, "--user-dir", USER_DIR, "--path", trained("lm"), "--cpu",
        "--tokens-per-sample", 32, "--num-workers", 0,
    ]  # fmt: skip
    sentences = run_cli(*words, "--max-tokens", 64, "--sample-break-mode", "eos")
    for output in (sentences.stdout + sentences.stderr, run_here(*words, "--batch-size", 7)):
        counted = re.search(r"Evaluated ([\d,]+) tokens", output)[1]
        assert int(counted.replace(",", "")) == len(text) + 24


def steps(monkeypatch, step):
    """The sentences of each batch that ``Trainer.train_step`` or ``valid_step`` gets."""
    seen, stock = [], getattr(Trainer, step)

    def noted(self, samples, *args, **kwargs):
        micro_batches = samples if isinstance(samples, list) else [samples]
        seen.extend(sample["id"].tolist() for sample in micro_batches)
        return stock(self, samples, *args, **kwargs)

    monkeypatch.setattr(Trainer, step, noted)
    return seen


@pytest.mark.slow
def test_validation_of_the_training_set_is_whole_and_changes_no_training(
    sets, tmp_path, monkeypatch
):
    """fairseq gives training and validation the same iterator: without the repair, the set is not
    whole, and epochs are left out."""
    trained_on, validated = steps(monkeypatch, "train_step"), steps(monkeypatch, "valid_step")
    words = ["--dataset-impl", "raw", "--position-source-scale", 1, "--max-epoch", 2]
    words += ["--validate-interval-updates", 3]
    batches, counts = {}, {}
    for name in ("valid", "valid,train"):
        del trained_on[:], validated[:]
        run_here(*train_words(sets, tmp_path / name, *words, "--valid-subset", name))
        batches[name] = list(trained_on)
        counts[name] = np.bincount(np.concatenate(validated), minlength=COUNT).tolist()
    assert batches["valid,train"] == batches["valid"]
    assert sum(map(len, trained_on)) == 2 * (COUNT - COUNT % 8)
    assert len(set(counts["valid"])) == 1
    assert counts["valid,train"] == [2 * count for count in counts["valid"]]
