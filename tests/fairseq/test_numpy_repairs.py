"""Proves that options of fairseq that fail with current numpy, or never worked, work as documented
with stock and cape models."""

import pytest
import torch
from fairseq.search import DiverseBeamSearch

import fairseq_user_dir  # noqa: F401 repairs fairseq
from tests.support.fairseq_models import (
    differences,
    generate_words,
    lines,
    make_dictionary,
    parameters,
    run_here,
    train_words,
)


@pytest.mark.parametrize("numbers", [[0, 1, 2], [40, 7, 12]], ids=["places", "others"])
def test_diverse_beams_of_a_sentence_do_not_depend_on_the_others(numbers):
    """Nor on the number of the sentence in the set. The second sentence ends after two steps."""
    dictionary = make_dictionary()
    logits = torch.randn(4, 3, 4, len(dictionary))  # step, sentence, beam, word
    scores = torch.randn(3, 4, 5)

    def beams(sentences):
        search = DiverseBeamSearch(dictionary, num_groups=2, diversity_strength=2.0)
        for step, lprobs in enumerate(logits.log_softmax(-1)):
            left = [sentence for sentence in sentences if sentence != 1 or step < 2]
            ids = torch.tensor(numbers)[left]
            _, words, _ = search.step(step, lprobs[left], scores[left], None, ids)
            yield words[-1]

    assert all(map(torch.equal, beams([0, 1, 2]), beams([2])))


@pytest.mark.slow
def test_buckets_train_and_validate(corpus, tmp_path):
    words = ["--num-batch-buckets", 3, "--max-tokens", 300]
    log = run_here(*train_words(corpus.binary, tmp_path, *words, updates=3))
    assert "valid on 'valid' subset" in log
    assert "loss nan" not in log


@pytest.mark.slow
@pytest.mark.usefixtures("ended_loaders")
def test_cached_data_train_as_mapped_ones(corpus, tmp_path):
    text, words = corpus.text, corpus.binary / "dict.en.txt"
    run_here(
        "fairseq-preprocess", "-s", "en", "-t", "de", "--trainpref", text / "train",
        "--validpref", text / "valid", "--srcdict", words, "--tgtdict", words,
        "--dataset-impl", "cached", "--destdir", tmp_path / "cached",
    )  # fmt: skip
    common = ["--position-source-scale", 1, "--batch-size", 96]
    run_here(*train_words(corpus.binary, tmp_path / "a", *common, updates=6))
    cached = ["--dataset-impl", "cached", "--num-workers", 1]
    run_here(*train_words(tmp_path / "cached", tmp_path / "b", *common, *cached, updates=6))
    trained = [parameters(tmp_path / run / "checkpoint_last.pt") for run in "ab"]
    assert not differences(*trained)


@pytest.mark.slow
def test_a_translation_model_learns_from_bart(corpus, tmp_path):
    task = ["--task", "translation_from_pretrained_bart", "--langs", "en,de"]
    words = train_words(corpus.binary, tmp_path, *task, arch="cape_bart_base", updates=2)
    words += ["--position-source-scale", 1]
    run_here(*words, "--max-source-positions", 64, "--max-target-positions", 64)
    words = generate_words(corpus.binary, tmp_path / "checkpoint_last.pt", *task)
    output = run_here(*words, "-s", "en", "-t", "de", "--max-len-b", 9)
    assert sorted(lines(output, "H")) == list(range(24))
