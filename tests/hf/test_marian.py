"""Translation: generation, alpha, the BOS hint and what is given back."""

import copy
from itertools import chain

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from tests.support.hf import MARIAN, make, sentences, targets


def logits(model, inputs, decoder_ids=None, **kwargs):
    ids = targets() if decoder_ids is None else decoder_ids
    with torch.no_grad():
        return model(**inputs, decoder_input_ids=ids, **kwargs).logits


MODES = ({"num_beams": 1}, {"num_beams": 4}, {"num_beams": 1, "cache_implementation": "static"})
KINDS = ("sinpos", "abspos", "cape", "relpos+first")  # of what is added, and of attention


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_encoder_outputs_can_be_reused(name, left):
    """forward and generate() take the outputs of an encoder as an object or as a tuple."""
    model, inputs = make("marian", name), sentences(left)
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs, output_hidden_states=True)
        as_tuple = model.get_encoder()(**inputs, return_dict=False)
    expected = logits(model, inputs)
    mask = {"attention_mask": inputs["attention_mask"]}
    for outputs in (encoded, encoded.to_tuple(), as_tuple):
        assert torch.equal(logits(model, mask, encoder_outputs=outputs), expected)
    with torch.no_grad():
        again = model(**mask, encoder_outputs=encoded, decoder_input_ids=targets())
    assert torch.equal(again.encoder_last_hidden_state, encoded.last_hidden_state)
    for mode in MODES:
        options = {**mode, "do_sample": False, "max_new_tokens": 8}
        generated = model.generate(**inputs, **options)
        again = model.generate(**mask, encoder_outputs=copy.deepcopy(encoded), **options)
        assert torch.equal(again, generated)


def test_encoder_outputs_without_the_hint_are_refused():
    """The decoder would see another source than the one that was encoded."""
    model, inputs = make("marian", "cape"), sentences()
    with torch.no_grad():
        out = model(**inputs, decoder_input_ids=targets())
        encoded = model.get_encoder()(**inputs)
    for mask in ({"attention_mask": inputs["attention_mask"]}, {}):
        for incomplete in (
            (out.encoder_last_hidden_state,),
            BaseModelOutput(out.encoder_last_hidden_state),
            BaseModelOutput(*encoded.to_tuple()[:1]),
        ):
            with pytest.raises(ValueError, match=r"leading_state.*given: none"):
                logits(model, mask, encoder_outputs=incomplete)
    encoded.last_hidden_state = encoded.last_hidden_state.repeat_interleave(2, 0)
    with pytest.raises(ValueError, match="one of 3 rows"):
        logits(model, {}, targets(6), encoder_outputs=encoded)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_fit_the_tokens_of_the_caller(name, left):
    model, inputs = make("marian", name), sentences(left)
    ask = {"output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        out = model(**inputs, decoder_input_ids=targets(), **ask)
        encoded = model.get_encoder()(**inputs, **ask)
        in_tuple = model.get_encoder()(**inputs, **ask, return_dict=False)
    search = {"num_beams": 2, "max_new_tokens": 3, "return_dict_in_generate": True}
    generated = model.generate(**inputs, **ask, **search)
    pads = inputs["attention_mask"].eq(0)
    encoder = (out.encoder_attentions, encoded.attentions, generated.encoder_attentions)
    for attention in (*chain.from_iterable(encoder), *in_tuple[2]):
        assert attention.shape == (3, 4, 9, 9)
    assert {attention.shape for attention in out.cross_attentions} == {(3, 4, 7, 9)}
    assert {attention.shape for attention in generated.cross_attentions[1]} == {(6, 4, 1, 9)}
    for attention in (*out.encoder_attentions, *out.cross_attentions):
        rows = pads[:, None, None].expand_as(attention)
        assert (attention[rows] < 1e-6).all()
    total = out.cross_attentions[0].sum(-1)
    hint = model.config.position_config.source_bos
    assert torch.allclose(total, torch.ones_like(total)) == (not hint)
    all_states = out.encoder_hidden_states, encoded.hidden_states, in_tuple[1]
    for states in (*all_states, generated.encoder_hidden_states):
        assert len(states) == 3
        assert all(state.shape == (3, 9, 32) for state in states)
        assert torch.equal(states[-1], out.encoder_last_hidden_state)
    for last in (encoded.last_hidden_state, in_tuple[0]):
        assert torch.equal(last, out.encoder_last_hidden_state)


def test_the_selected_hidden_states_equal_the_stock_model():
    """Indices count other states before transformers 5.23."""
    inputs = sentences()
    states, expected = (
        model.get_encoder()(**inputs, output_hidden_states=[1]).hidden_states
        for model in (make("marian", "cape"), MARIAN.build_stock())
    )
    assert [state is None for state in states] == [state is None for state in expected]
    assert {state.shape for state in states if state is not None} == {(3, 9, 32)}


def test_hint_is_a_token_before_the_source():
    """Equals what the caller gets who puts EOS, Marian's only candidate, in front."""
    hinted = make("marian", "sinpos+bos")
    plain = MARIAN.build({"type": "sinpos", "source_scale": "11/10"})
    plain.load_state_dict(hinted.state_dict())
    inputs = sentences()
    first = {"input_ids": 0, "attention_mask": 1}
    longer = {n: torch.nn.functional.pad(v, (1, 0), value=first[n]) for n, v in inputs.items()}
    expected = logits(plain, longer)
    embeds = hinted.get_input_embeddings()(inputs["input_ids"]) * 32**0.5
    embeds = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    for without_hint in (inputs, embeds):
        actual = logits(hinted, without_hint)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def coordinates(model, **kwargs):
    """``[B, T, 1]`` that source and target encode in one forward."""
    seen = []
    for stack in (model.model.encoder, model.model.decoder):
        encoding = stack.positions.encoding
        for method in ("forward", "grid"):
            stock = getattr(type(encoding), method)

            def noted(coords, encoding=encoding, stock=stock):
                seen.append(coords)
                return stock(encoding, coords)

            setattr(encoding, method, noted)
    with torch.no_grad():
        model(**sentences(lengths=(9, 9, 9)), decoder_input_ids=targets(), **kwargs)
    return seen


@pytest.mark.parametrize("synchronize", [True, False])
def test_source_and_target_share_the_global_shift_only(synchronize):
    settings = {"type": "cape", "source_scale": 1, "synchronize": synchronize}
    settings |= {"max_global_shift": 1000, "source_bos": False}
    model = MARIAN.build(settings).train()
    source, target = coordinates(model)
    shift = source[:, 0] - target[:, 0]
    assert (shift.abs() < 1).all() == synchronize
    assert len(set(source[:, 0, 0].tolist())) == 3  # each sample its own
    local = (source[:, :7] - source[:, :1]) - (target - target[:, :1])
    assert local.abs().max() > 0.05  # independent


WIDTH = r"attention_mask has shape \(3, 8\).*\(3, 9\)"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("cape", (3, 1, 9, 9), r"\(3, 1, 9, 9\).*source_bos"),
        ("cape", (3, 8), WIDTH),
        ("sinpos", (3, 8), WIDTH),
    ],
)
def test_masks_that_do_not_fit_the_source_are_refused(name, shape, message):
    inputs = {**sentences(), "attention_mask": torch.ones(shape).long()}
    with pytest.raises(ValueError, match=message):
        logits(make("marian", name), inputs)
