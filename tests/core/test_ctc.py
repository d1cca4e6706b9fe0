"""CTC decoding: best path and beams, against searches by hand."""

import itertools

import pytest
import torch

from cape_plugins.speech.ctc import best_path, collapse, ctc_loss, outputs_needed
from cape_plugins.speech.ctc_decoder import BeamDecoder, build_decoder, read_lexicon

TOKENS = ["<b>", "|", "o", "n", "e", "t", "w"]
# "two" is likelier than "one" after "<s>", and never after "one"
ARPA = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.0\t<unk>\t0
0\t<s>\t-0.3
-1.0\t</s>\t0
-0.7\tone\t-3.0
-0.7\ttwo\t-0.3

\\2-grams:
-1.5\t<s> one\t0
-0.1\t<s> two\t0
-0.1\ttwo one\t0

\\end\\
"""


def emissions(text, strength=4.0, seed=0):
    """Log probabilities that favour a path, with noise."""
    scores = torch.randn(len(text), len(TOKENS), generator=torch.Generator().manual_seed(seed))
    for frame, name in enumerate(text):
        scores[frame, TOKENS.index("<b>" if name == "_" else name)] += strength
    return scores.log_softmax(-1)[None]


def spell(hypothesis):
    return "".join(TOKENS[token] for token in hypothesis.tokens)


def test_loss_equals_the_sample_alone():
    """Enumerates all paths that collapse to the labels; padding counts for nothing."""
    log_probs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    targets, lengths = torch.tensor([[1, 1], [2, 9]]), torch.tensor([5, 3])
    losses = ctc_loss(log_probs, lengths, targets, targets != 9)
    for row, (labels, length) in enumerate((([1, 1], 5), ([2], 3))):
        paths = itertools.product(range(3), repeat=length)
        scores = [
            sum(log_probs[row, time, label] for time, label in enumerate(path))
            for path in paths
            if collapse(path, 0) == labels
        ]
        assert losses[row] == pytest.approx(float(-torch.stack(scores).logsumexp(0)), abs=1e-4)


def test_equal_labels_need_a_blank_between_them():
    targets = torch.tensor([[1, 1, 2], [1, 2, 9]])
    assert outputs_needed(targets, targets != 9).tolist() == [4, 2]
    log_probs = torch.zeros(1, 3, 3).log_softmax(-1)
    loss = ctc_loss(log_probs, torch.tensor([3]), targets[:1], targets[:1] != 9)
    assert loss.tolist() == [0.0], "cannot be aligned"


def test_a_beam_of_one_is_the_best_path():
    log_probs = torch.cat([emissions("oonn_e"), emissions("t_twoo")])
    lengths = torch.tensor([6, 3])
    first, second = build_decoder(TOKENS, blank=0)(log_probs, lengths)
    assert [first, second] == best_path(log_probs, lengths, 0)
    assert (spell(first), spell(second)) == ("one", "tt")
    assert second.score == pytest.approx(float(log_probs[1, :3].max(-1).values.sum()), abs=1e-5)
    assert collapse([0, 2, 2, 0, 2, 3, 3, 0, 0], blank=0) == [2, 2, 3]


def test_beam_finds_the_most_probable_text():
    """Sum over all alignments of each text, by enumeration."""
    log_probs = (1.5 * torch.randn(1, 5, 3)).log_softmax(-1)
    totals = {}
    for path in itertools.product(range(3), repeat=5):
        score = log_probs[0, range(5), path].sum()
        text = tuple(collapse(path, 0))
        totals[text] = torch.logaddexp(totals.get(text, torch.tensor(-1e9)), score)
    best = max(totals, key=totals.get)
    (hypothesis,) = BeamDecoder(["<b>", "a", "c"], beam=200)(log_probs, torch.tensor([5]))
    assert tuple(hypothesis.tokens) == best
    assert hypothesis.score == pytest.approx(float(totals[best]), abs=1e-4)


def test_language_model_of_words_decides(tmp_path):
    (tmp_path / "lm.arpa").write_text(ARPA)
    (tmp_path / "lexicon.txt").write_text("one o n e |\n\ntwo t w o |\n")
    lexicon = read_lexicon(tmp_path / "lexicon.txt")
    assert lexicon == {"one": [["o", "n", "e", "|"]], "two": [["t", "w", "o", "|"]]}
    # both words fit alike
    log_probs = torch.full((1, 4, len(TOKENS)), -20.0)
    for frame, names in enumerate(("ot", "nw", "eo", "|")):
        for name in names:
            log_probs[0, frame, TOKENS.index(name)] = -0.7 + (0.01 if name == names[0] else 0)
    beam = BeamDecoder(TOKENS, lm=tmp_path / "lm.arpa", lexicon=lexicon, separator="|")
    assert spell(beam(log_probs, torch.tensor([4]))[0]) == "two"
    free = BeamDecoder(TOKENS, separator="|")
    assert spell(free(log_probs, torch.tensor([4]))[0]) == "one|"


@pytest.mark.parametrize("end", ["", "|"], ids=["without separator", "with separator"])
def test_last_word_needs_no_separator(tmp_path, end):
    """Models are trained without a separator at the end, where it has almost no probability."""
    (tmp_path / "lm.arpa").write_text(ARPA.replace("-3.0", "-0.3"))
    lexicon = {"one": [list("o" + end)], "two": [list("t" + end)]}
    log_probs = torch.full((1, 5, len(TOKENS)), -12.0)
    for frame, name in enumerate(("t", "|", "o", "<b>", "<b>")):
        log_probs[0, frame, TOKENS.index(name)] = -0.01
    log_probs[0, 2, TOKENS.index("o")] = -0.1
    log_probs[0, 2, TOKENS.index("<b>")] = -2.3  # the last word may also be left out
    beam = BeamDecoder(TOKENS, lm=tmp_path / "lm.arpa", lexicon=lexicon, separator="|")
    assert spell(beam(log_probs, torch.tensor([5]))[0]) == "t|o"


def test_language_model_of_tokens_decides(tmp_path):
    (tmp_path / "lm.arpa").write_text(ARPA.replace("one", "o").replace("two", "t"))
    log_probs = torch.full((1, 1, len(TOKENS)), -20.0)
    log_probs[0, 0, TOKENS.index("o")], log_probs[0, 0, TOKENS.index("t")] = -0.6, -0.8
    beam = BeamDecoder(TOKENS, lm=tmp_path / "lm.arpa")
    assert spell(beam(log_probs, torch.tensor([1]))[0]) == "t"


SYMBOLS = ["<s>", "</s>", "<unk>", "[UNK]", "|", "o"]


def test_language_model_that_lacks_some_units_is_reported(tmp_path, caplog):
    """All letters, but nothing between words."""
    (tmp_path / "lm.arpa").write_text(ARPA.replace("one", "o"))
    BeamDecoder(["<b>", "|", "o"], lm=tmp_path / "lm.arpa", separator="|")
    assert "lacks 1 of the 2 units, such as '|'; a" in caplog.text


def test_recording_that_fits_no_word_is_no_error(tmp_path):
    (tmp_path / "lm.arpa").write_text(ARPA)
    beam = BeamDecoder(TOKENS, lm=tmp_path / "lm.arpa", lexicon={"one": [["o", "n", "e"]]})
    assert beam(emissions("t"), torch.tensor([1]))[0].tokens in ([], [5])


BAD = [
    (lambda path: BeamDecoder(TOKENS, beam=0), "beam=0"),
    (lambda path: BeamDecoder(TOKENS, lm=path / "gone"), "no such file"),
    (lambda path: BeamDecoder(TOKENS, lexicon={"one": [["o"]]}), "a lexicon needs words, and"),
    (lambda path: BeamDecoder(TOKENS, lm=path / "bad"), "is no n-gram model of order 2"),
    (lambda path: read_lexicon(path / "empty"), "empty' is empty"),
    (lambda path: BeamDecoder(TOKENS, lm=path / "lm", lexicon={"one": [["x"]]}), "'one' with 'x'"),
    (lambda path: read_lexicon(path / "bad"), "line 2: the word 'two' has no tokens"),
    (lambda path: build_decoder(TOKENS, 0, lm="words"), "--ctc-lm and --ctc-lexicon need a beam"),
    (lambda path: build_decoder(TOKENS, 0, 9, lm="gone"), "--ctc-lm gone, .*no such file"),
    # a model of words without a lexicon, or of words with another spelling; the symbols of a
    # sentence are known to every model, and are no units
    (
        lambda path: BeamDecoder(SYMBOLS, lm=path / "lm", separator="|"),
        "none of the 2 units, .*-lex",
    ),
    (
        lambda path: BeamDecoder(TOKENS, lm=path / "lm", lexicon={"ONE": ["o"]}, separator="|"),
        "knows none of the 1 words of the lexicon, such as 'ONE'; both",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_refused(call, message, tmp_path):
    (tmp_path / "lm").write_text(ARPA)
    (tmp_path / "bad").write_text("one o n e\ntwo\n")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match=message):
        call(tmp_path)
