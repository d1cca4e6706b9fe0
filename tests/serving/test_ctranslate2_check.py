"""The comparison of translations by a host and by ctranslate2, and READMEs of exported folders."""

from itertools import pairwise

import pytest

from cape_plugins.serving.ctranslate2_check import Hypothesis, compare, read_sentences
from cape_plugins.serving.ctranslate2_readme import precision_notes

LENGTHS = (7, 3)  # of the sources of HOST
HOST = [Hypothesis(("a", "b"), -0.5, True), Hypothesis(("c",), -0.25, True)]


def changed(**values):
    """The second translation is another one."""
    return [HOST[0], HOST[1]._replace(**values)]


@pytest.mark.parametrize(
    "values", [{"score": -0.2512}, {"tokens": ("d",), "score": -0.3}, {"score": float("nan")}]
)
def test_a_difference_is_an_error_unless_weights_were_rounded(values):
    for quantization in (None, "float32"):
        with pytest.raises(ValueError, match="computes something else than the model"):
            compare(HOST, changed(**values), LENGTHS, quantization)
    assert "scores differ by at most" in compare(HOST, changed(**values), LENGTHS, "int8")


def test_what_did_not_end_is_counted_and_not_compared():
    for host, engine in ((HOST, changed(tokens=("x",), score=-9.0, ended=False)),
                         (changed(score=-9.0, ended=False), HOST)):  # fmt: skip
        report = compare(host, engine, (3, 7))
        assert report.startswith("check: 1 of 1 translations of sources of up to 3 tokens are the")
        assert "1 more, of up to 7 tokens, not compared" in report
    nothing = [hypothesis._replace(ended=False) for hypothesis in HOST]
    with pytest.raises(ValueError, match="none of 2 translations"):
        compare(nothing, changed(), LENGTHS, "int8")


def test_texts_to_check_have_sentences(tmp_path):
    text = tmp_path / "text"
    text.write_bytes("\ufeffa b\r\n\nc\u2028d\x0be\x85\rf".encode())
    assert read_sentences(text) == ["a b", "c\u2028d\x0be\x85\rf"]
    text.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no sentence"):
        read_sentences(text)
    text.write_bytes(b"a\nb\n\xff\xfe\xfa\n")
    with pytest.raises(ValueError, match="--check .*: line 3 is not UTF-8 text"):
        read_sentences(text)
    with pytest.raises(ValueError, match="cannot be read"):
        read_sentences(tmp_path / "missing")


def test_sentences_to_check_are_spread_over_the_text(tmp_path):
    """In their order, some of the first lines and some of the last, and the longest of all."""
    lines = [f"{number} word" for number in range(10_000)]
    long = {number: f"{number}" + 30 * " word" for number in range(5003, 5013)}
    for number, line in long.items():
        lines[number] = line
    wide = "x" * 1000  # one word of many letters
    lines[77] = wide
    (tmp_path / "text").write_text("\n".join(lines), encoding="utf-8")
    sentences = read_sentences(tmp_path / "text", length=lambda line: len(line.split()))
    assert len(sentences) == len({*sentences}) == 200
    places = [lines.index(sentence) for sentence in sentences]
    assert places == sorted(places)
    assert {*long} <= {*places}
    assert all(lines[index] != wide for index in places)
    gaps = [after - before for before, after in pairwise(places)]
    assert places[0] < 100
    assert places[-1] > 9900
    assert max(gaps) < 100
    assert wide in read_sentences(tmp_path / "text")  # by letters, where nobody has split them


def test_a_precision_that_the_processor_does_not_have_is_told():
    """CTranslate2 computes in int16 by MKL alone, and elsewhere in int8, which rounds more."""
    without, with_mkl = {"float32", "int8"}, {"float32", "int8", "int16"}
    (note,) = precision_notes("int16", without)
    assert "int16 is computed in int8 on this machine" in note
    (note,) = precision_notes("int8_bfloat16", without)
    assert "int8_bfloat16 is converted" in note
    assert precision_notes("int16", with_mkl) == precision_notes("int8", without) == []
    assert precision_notes(None, without) == precision_notes("float32", without) == []
