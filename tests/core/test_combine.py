"""Position embeddings added to the content or concatenated with it."""

import re

import pytest
import torch

from cape_plugins import combine

CONTENT = torch.arange(24.0).view(2, 3, 4)


def test_adding_is_the_default_and_needs_no_embedding():
    embedding = torch.full((1, 3, 4), 0.5)
    assert torch.equal(combine(CONTENT, embedding), CONTENT + 0.5)
    assert combine(CONTENT, None) is CONTENT
    assert combine(CONTENT, None, dim=4) is CONTENT


@pytest.mark.parametrize("batch", [1, 2])
def test_concatenated_embeddings_stand_behind_the_content(batch):
    embedding = torch.randn(batch, 3, 6)
    expected = torch.cat((CONTENT, embedding.expand(2, 3, 6)), -1)
    assert torch.equal(combine(CONTENT, embedding, "concat", 6), expected)
    assert torch.equal(combine(CONTENT, embedding, "concat"), expected)
    zeros = combine(CONTENT.half(), None, "concat", dim=6)
    assert zeros.dtype == torch.float16
    assert torch.equal(zeros, torch.cat((CONTENT, torch.zeros(2, 3, 6)), -1).half())


@pytest.mark.parametrize(
    ("embedding", "mode", "dim", "message"),
    [
        (None, "multiply", None, "mode='multiply' is unknown; allowed: add, concat"),
        (None, "concat", None, "dim=None is not allowed"),
        (torch.ones(1, 3, 6), "concat", 5, "dim=5 differs from the 6 channels of the embedding"),
        (torch.ones(1, 3, 1), "add", None, "the embedding has 1 channels, the content 4"),
    ],
)
def test_what_does_not_fit_is_refused(embedding, mode, dim, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        combine(CONTENT, embedding, mode, dim)
