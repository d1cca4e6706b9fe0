"""Proves that the outputs of a sentence do not depend on padding, on the side of padding, or on the
other sentences of the batch; and that the BOS hint is a BOS token before the source, which the
caller does not see."""

import pytest
import torch

from cape_plugins import ENCODINGS, TYPES
from tests.support.fairseq_models import (
    BOS,
    PAD,
    VARIANTS,
    batch,
    build,
    build_variant,
    decoder_input,
    differences,
    pad,
    sentences,
)

BOTH_SIDES = pytest.mark.parametrize("left", [True, False], ids=["left", "right"])


def at_words(values, tokens):
    """The rows of `values` ``[B, S, ...]`` that belong to real tokens."""
    return values[tokens.ne(PAD)]


@BOTH_SIDES
@pytest.mark.parametrize("name", VARIANTS)
def test_sentence_alone_equals_sentence_in_a_batch(name, left):
    model = build_variant(name).eval()
    source, previous = batch(left=left)
    together, extra = model(source, source.ne(PAD).sum(1), previous)
    for index, row in enumerate(sentences()):
        length = int(previous[index].ne(PAD).sum())
        alone, extra_alone = model(torch.tensor([row]), None, previous[[index], :length])
        torch.testing.assert_close(together[index, :length], alone[0], atol=1e-5, rtol=1e-5)
        attention = at_words(extra["attn"][0][index, :length].T, source[index]).T
        torch.testing.assert_close(attention, extra_alone["attn"][0][0], atol=1e-5, rtol=1e-5)


WITH_ALPHA = {"position_source_scale": "1.25"}
ADDING = {name: row for name, row in TYPES.items() if ENCODINGS[row.encoding].adds}
HINTED = {name: WITH_ALPHA if "source_scale" in row.options else {} for name, row in ADDING.items()}
HINTED["cape+relative"] = WITH_ALPHA


def with_and_without_hint(name, **options):
    """Two models with the same parameters."""
    options |= HINTED[name]
    hinted, plain = (build_variant(name, position_source_bos=b, **options) for b in (True, False))
    assert differences(hinted.state_dict(), plain.state_dict()) == []
    return hinted, plain


def prefixed(left):
    return pad([[BOS, *row] for row in sentences()], left)


def run(model, source, **options):
    """Encoder states and logits in training mode, always with the same random numbers."""
    torch.manual_seed(4)
    encoded = model.encoder(source, source.ne(PAD).sum(1), **options)
    logits, extra = model.decoder(decoder_input(), encoder_out=encoded)
    return encoded, logits, extra["attn"][0]


@pytest.mark.parametrize(("left", "mode"), [(True, "train"), (False, "eval")])
@pytest.mark.parametrize("name", HINTED)
def test_hint_equals_sentences_with_bos(name, left, mode):
    hinted, plain = with_and_without_hint(name, dropout=0.1)
    getattr(hinted, mode)()
    getattr(plain, mode)()
    encoded, logits, _ = run(hinted, pad(sentences(), left))
    expected, expected_logits, _ = run(plain, prefixed(left))
    for key in ("encoder_out", "encoder_padding_mask", "encoder_embedding", "src_lengths"):
        assert torch.equal(encoded[key][0], expected[key][0]), key
    assert torch.equal(logits, expected_logits)
    without, _, _ = run(plain, pad(sentences(), left))
    assert without["encoder_out"][0].shape != encoded["encoder_out"][0].shape


@BOTH_SIDES
def test_hint_equals_a_prefix_with_token_embeddings(left):
    hinted, plain = with_and_without_hint("cape", layernorm_embedding=True)
    source, longer = pad(sentences(), left), prefixed(left)
    embeddings = torch.nn.Embedding(24, 32)
    embeddings.weight.data[BOS] = hinted.encoder.embed_tokens.weight.data[BOS]
    _, logits, _ = run(hinted, source, token_embeddings=embeddings(source))
    _, expected, _ = run(plain, longer, token_embeddings=embeddings(longer))
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, run(hinted, source)[1])


@BOTH_SIDES
@pytest.mark.parametrize("name", HINTED)
def test_attention_belongs_to_the_callers_tokens(name, left):
    hinted, plain = with_and_without_hint(name)
    source, longer = pad(sentences(), left), prefixed(left)
    _, _, attention = run(hinted.eval(), source)
    _, _, expected = run(plain.eval(), longer)
    assert attention.shape == (4, 7, source.shape[1])
    assert attention.masked_select(source.eq(PAD)[:, None]).abs().max() == 0
    on_words = longer.ne(PAD) & longer.ne(BOS)
    words = at_words(attention.transpose(1, 2), source)
    assert torch.equal(words, expected.transpose(1, 2)[on_words])
    # what is missing from 1 is what BOS got
    on_bos = expected.masked_fill(longer.ne(BOS)[:, None], 0).sum(-1)
    assert on_bos.min() > 0.01
    torch.testing.assert_close(attention.sum(-1), 1 - on_bos)


def test_alignment_heads_and_layers_are_aligned_too():
    model = build("cape_transformer_align", alignment_layer=0, alignment_heads=1).eval()
    source, previous = batch()
    attention = model(source, source.ne(PAD).sum(1), previous)[1]["attn"][0]
    assert attention.shape == (4, 7, 8)
    assert attention.masked_select(source.eq(PAD)[:, None]).abs().max() == 0
