"""The comparison of translations by a host and by ctranslate2."""

import pytest

from cape_plugins.serving.ctranslate2_notes import Hypothesis, compare, read_sentences, readme

HOST = [Hypothesis(("a", "b"), -0.5, True), Hypothesis(("c",), -0.25, True)]


def changed(**values):
    """The second translation is another one."""
    return [HOST[0], HOST[1]._replace(**values)]


@pytest.mark.parametrize("values", [{"score": -0.2512}, {"tokens": ("d",), "score": -0.3}])
def test_a_difference_is_an_error_unless_weights_were_rounded(values):
    for quantization in (None, "float32"):
        with pytest.raises(ValueError, match="computes something else than the model"):
            compare(HOST, changed(**values), quantization)
    assert "scores differ by at most" in compare(HOST, changed(**values), "int8")


def test_report_has_the_share_and_the_largest_difference():
    other = changed(tokens=("d",), score=-0.25001)
    assert compare(HOST, other) == (
        "check: 1 of 2 translations are the same, scores differ by at most 1.0e-05"
    )


def test_what_did_not_end_is_counted_and_not_compared():
    for host, engine in ((HOST, changed(tokens=("x",), score=-9.0, ended=False)),
                         (changed(score=-9.0, ended=False), HOST)):  # fmt: skip
        report = compare(host, engine)
        assert report.startswith("check: 1 of 1 translations are the same")
        assert "1 more, not compared" in report


def test_score_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="something else"):
        compare(HOST, changed(score=float("nan")))


def test_texts_to_check_have_sentences(tmp_path):
    text = tmp_path / "text"
    text.write_text("a b\n\n" + "c\n" * 300, encoding="utf-8")
    assert read_sentences(text) == ["a b", *["c"] * 199]
    text.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="has no sentence"):
        read_sentences(text)
    text.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match="cannot be read"):
        read_sentences(text)
    with pytest.raises(ValueError, match="cannot be read"):
        read_sentences(tmp_path / "missing")


def test_a_check_of_nothing_is_refused():
    open_end = Hypothesis(("a",), -1.0, False)
    with pytest.raises(ValueError, match="of 2 none did"):
        compare([open_end, open_end], [open_end, Hypothesis(("a",), -1.0, True)], "int8")


@pytest.mark.parametrize("quantization", [None, "float32", "int8", "float16"])
def test_readme_tells_what_rounding_changes(quantization):
    text = readme(
        "A model", program="", conventions=["c"], rows={}, options=["o"], quantization=quantization
    )
    assert f"weights {quantization or 'float32'}." in text
    assert ("Weights are rounded" in text) == (quantization in ("int8", "float16"))
