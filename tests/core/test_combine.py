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
    joined = combine(CONTENT, embedding, "concat", 6)
    assert joined.shape == (2, 3, 10)
    assert torch.equal(joined[..., :4], CONTENT)
    assert torch.equal(joined[..., 4:], embedding.expand(2, 3, 6))
    assert torch.equal(joined, combine(CONTENT, embedding, "concat"))


def test_without_embedding_the_channels_are_zero():
    content = CONTENT.half()
    joined = combine(content, None, "concat", dim=6)
    assert joined.shape == (2, 3, 10)
    assert joined.dtype == torch.float16
    assert torch.equal(joined[..., :4], content)
    assert not joined[..., 4:].any()


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
