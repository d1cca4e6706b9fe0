"""``cape-plugins doctor`` for models of fairseq: correct models pass, and faults of broken models
are named."""

import argparse

import pytest

from fairseq_user_dir.doctor import doctor as fairseq_doctor
from fairseq_user_dir.embedding import TokenPositionEmbedding
from tests.support.core import with_a_draw_in_evaluation
from tests.support.fairseq_models import PAD


def rows_of(model=None, data=None):
    path = None if model is None else str(model)
    data = None if data is None else str(data)
    return [row for _, row in fairseq_doctor(argparse.Namespace(model=path, data=data), None)]


def failed(**arguments):
    return [row.name for row in rows_of(**arguments) if row.failed]


def test_the_built_in_transformer_passes():
    rows = rows_of()
    assert [row for row in rows if row.failed] == []
    assert sum(row.status == "ok" for row in rows) >= 15


def without_past(monkeypatch):
    forward = TokenPositionEmbedding.forward

    def wrong(self, input, incremental_state=None, *args, **kwargs):
        part = input if incremental_state is None else input[:, -1:]
        return forward(self, part, incremental_state, *args, **kwargs)

    monkeypatch.setattr(TokenPositionEmbedding, "forward", wrong)


def without_mask(monkeypatch):
    forward = TokenPositionEmbedding.forward

    def wrong(self, input, *args, **kwargs):
        return forward(self, input.masked_fill(input.eq(PAD), PAD + 3), *args, **kwargs)

    monkeypatch.setattr(TokenPositionEmbedding, "forward", wrong)


@pytest.mark.parametrize(
    ("breaks", "wrong"),
    [
        (without_past, "cached steps against one forward"),
        (without_mask, "padding of the source on the left"),
        (with_a_draw_in_evaluation, "cape: evaluation draws no random numbers"),
    ],
)
def test_a_broken_model_is_named_by_the_right_check(breaks, wrong, monkeypatch):
    breaks(monkeypatch)
    assert wrong in failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cape", "lm"])
def test_checkpoints_pass(name, trained, corpus):
    data = corpus.lm if name == "lm" else corpus.binary
    rows = rows_of(model=trained(name), data=data)
    assert [row for row in rows if row.failed] == []
    compared = "logits" in [row.name for row in rows]
    assert compared == (name != "cape")  # a language model has neither alpha nor BOS hint
    if name == "cape":
        (note,) = (row.text for row in rows if row.name == "against the stock model")
        assert "source_bos" in note
