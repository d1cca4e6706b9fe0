"""``cape-plugins doctor`` for models of fairseq: correct models pass, and faults of broken models
are named."""

import argparse

import pytest

from fairseq_user_dir.doctor import doctor as fairseq_doctor
from fairseq_user_dir.embedding import TokenPositionEmbedding
from tests.support.core import with_a_draw_in_evaluation
from tests.support.fairseq_models import PAD


def rows_of(model=None, data=None):
    return [row for _, row in fairseq_doctor(argparse.Namespace(model=model, data=data), None)]


def test_the_built_in_transformer_passes():
    rows = rows_of()
    assert [row for row in rows if row.failed] == []
    assert sum(row.status == "ok" for row in rows) >= 15


def seeing(tokens):
    """Breaks models: positions come from other tokens, ``tokens(INPUT, INCREMENTAL STATE)``."""

    def breaks(monkeypatch):
        forward = TokenPositionEmbedding.forward

        def wrong(self, input, state=None, *args, **kwargs):
            return forward(self, tokens(input, state), state, *args, **kwargs)

        monkeypatch.setattr(TokenPositionEmbedding, "forward", wrong)

    return breaks


without_past = seeing(lambda input, state: input if state is None else input[:, -1:])
without_mask = seeing(lambda input, state: input.masked_fill(input.eq(PAD), PAD + 3))
BROKEN = [
    (without_past, "cached steps against one forward"),
    (without_mask, "padding of the source on the left"),
    (with_a_draw_in_evaluation, "cape: evaluation draws no random numbers"),
]


@pytest.mark.parametrize(("breaks", "wrong"), BROKEN)
def test_a_broken_model_is_named_by_the_right_check(breaks, wrong, monkeypatch):
    breaks(monkeypatch)
    assert wrong in [row.name for row in rows_of() if row.failed]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cape", "lm"])
def test_checkpoints_pass(name, trained, corpus):
    data = corpus.lm if name == "lm" else corpus.binary
    rows = rows_of(str(trained(name)), str(data))
    assert [row for row in rows if row.failed] == []
    compared = "logits" in [row.name for row in rows]
    assert compared == (name != "cape")  # a language model has neither alpha nor BOS hint
    if name == "cape":
        (note,) = (row.text for row in rows if row.name == "against the stock model")
        assert "source_bos" in note
