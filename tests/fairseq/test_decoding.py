"""Proves that a model trained and used by the real commands decodes step by step, with beams, what
one pass over the hypothesis gives, with no positional flag and no training data at inference; and
that a sentence longer than the tables of the stock models is translated."""

import pytest
import torch

from cape_plugins import PositionConfig
from tests.fairseq.conftest import LONG
from tests.support.fairseq_models import (
    VARIANTS,
    forced_scores,
    generate_words,
    lines,
    load,
)

pytestmark = pytest.mark.slow

BEAM = 4
SHOWN = 1e-4  # the command prints four decimals, and base 2


@pytest.fixture(scope="module")
def hypotheses(run_cli, trained, test_data):
    """Function: (source, hypothesis, scores printed) of each hypothesis, and the loaded model."""

    def decode(name):
        words = generate_words(test_data, trained(name), "--beam", BEAM, "--nbest", BEAM)
        output = run_cli(*words).stdout
        sources, hypos, scores = (lines(output, letter) for letter in "SHP")
        assert sorted(sources) == sorted(hypos) == sorted(scores) == list(range(24))
        decoded = [
            (sources[i][0][0], hypo[1], torch.tensor([float(x) for x in score[0].split()]))
            for i in hypos
            for hypo, score in zip(hypos[i], scores[i], strict=True)
        ]
        return decoded, *load(trained(name), test_data)

    return decode


@pytest.mark.parametrize("name", VARIANTS)
def test_beam_search_equals_teacher_forcing(name, hypotheses):
    decoded, model, task = hypotheses(name)
    assert len(decoded) == 24 * BEAM
    assert len({hypothesis for _, hypothesis, _ in decoded}) > 24
    for source, hypothesis, scores in decoded:
        forced = forced_scores(model, task, source, hypothesis)
        torch.testing.assert_close(forced, scores, atol=1.5 * SHOWN, rtol=0)
    # the comparison notices positions, wherever the model has any
    worst = max(
        (forced_scores(model, task, " ".join(reversed(source.split())), hypo) - scores).abs().max()
        for source, hypo, scores in decoded[::BEAM]
    )
    assert (worst > 100 * SHOWN) != (name == "nopos")


@pytest.mark.parametrize("name", VARIANTS)
def test_settings_come_from_the_checkpoint(name, trained, corpus, test_data):
    expected = {
        key.removeprefix("position_"): value
        for key, value in VARIANTS[name].items()
        if key != "position_embedding"
    }
    type_name = VARIANTS[name]["position_embedding"]
    config = PositionConfig(type_name, "text", "seq2seq", **expected)
    if config.source_scale == "auto":
        sides = (corpus.text / "train.de", corpus.text / "train.en")
        counts = [len(p.read_text().split()) + len(p.read_text().splitlines()) for p in sides]
        assert counts[0] > counts[1]
        config = config.replace(source_scale="{}/{}".format(*counts))
    model, _ = load(trained(name), test_data)
    assert model.position_config == config
    if config.encoding.adds and not config.encoding.counts:
        assert model.encoder.embed_positions.encoder.alpha == config.alpha
        assert model.decoder.embed_positions.encoder.alpha == 1.0


@pytest.mark.parametrize("name", ["cape", "abspos"])
def test_sentence_beyond_the_stock_tables_is_translated(name, run_cli, trained, test_data):
    words = generate_words(test_data, trained(name), "--gen-subset", "test1")
    words += ["--max-source-positions", 4000, "--min-len", 5, "--max-len-b", 20, "--beam", 2]
    output = run_cli(*words).stdout
    source, hypothesis = lines(output, "S")[0][0][0], lines(output, "H")[0][0][1]
    assert len(source.split()) == LONG - 1
    model, task = load(trained(name), test_data)
    scores = torch.tensor([float(x) for x in lines(output, "P")[0][0][0].split()])
    forced = forced_scores(model, task, source, hypothesis)
    torch.testing.assert_close(forced, scores, atol=1.5 * SHOWN, rtol=0)
