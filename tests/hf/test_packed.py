"""Several texts in one sample of a model that turns queries and keys: borders, draws, losses."""

from functools import partial
from unittest import mock

import pytest
import torch
from transformers import AutoModelForMaskedLM

from cape_plugins.settings.registry import ROTARY_TYPES
from hf_models.seams.rotary import number_texts
from tests.support.hf import FAMILIES, VARIANTS, batch, families_of

# a later text is longer than the first: it needs distances that the first lacks
LENGTHS = (3, 5, 4)
BIDIRECTIONAL = [name for name, row in FAMILIES.items() if row.auto is AutoModelForMaskedLM]
SAMPLED = [name for name, row in ROTARY_TYPES.items() if row.sampling]
SETTINGS = [
    {"type": "cape", "max_global_scale": 2.0},
    *({"type": name, "max_position": 40} for name in SAMPLED),
]
each_settings = pytest.mark.parametrize("settings", SETTINGS, ids=lambda value: value["type"])


def packed():
    """``[1, 12]`` ids of three texts, and their positions, each from 0 on."""
    ids = torch.randint(1, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def model_of(settings, family="llama", **sizes):
    return FAMILIES[family].build(settings, attn_implementation="eager", **sizes)


def moved_positions(model, **inputs):
    """What reaches the stock module of angles in one forward, ``[B, T]``."""
    seen, stock = [], type(model.model.rotary_emb).__bases__[-1]
    forward = stock.forward

    def note(module, x, position_ids, *args, **kwargs):
        seen.append(position_ids)
        return forward(module, x, position_ids, *args, **kwargs)

    with mock.patch.object(stock, "forward", note):
        model(**inputs)
    assert all(torch.equal(seen[0], other) for other in seen)  # asked twice, moved once
    return seen[0].float()


def test_all_layers_see_one_draw_of_local_shifts():
    """ModernBERT asks for angles once for each kind of layer; a second draw would differ."""
    model = model_of({"type": "cape", "max_local_shift": 0.5}, "modernbert").train()
    ids, positions = packed()
    moved = moved_positions(model, input_ids=ids)
    assert moved.shape == positions.shape
    assert not torch.equal(moved, moved.round())


def test_each_packed_text_has_a_scale_of_its_own():
    model = model_of({"type": "cape", "max_global_scale": 2.0, "max_local_shift": 0}).train()
    ids, positions = packed()
    texts = moved_positions(model, input_ids=ids, position_ids=positions)[0].split(LENGTHS)
    scales = [text[1].item() for text in texts]
    assert len(set(scales)) == 3
    for text, scale, length in zip(texts, scales, LENGTHS, strict=True):
        torch.testing.assert_close(text, torch.arange(float(length)) * scale)


@pytest.mark.parametrize("name", SAMPLED)
def test_each_packed_text_has_sorted_positions_of_its_own(name):
    """A text that is longer than the range is refused."""
    model = model_of({"type": name, "max_position": 40}).train()
    ids, positions = packed()
    texts = moved_positions(model, input_ids=ids, position_ids=positions)[0].split(LENGTHS)
    assert all((text.diff() > 0).all() and text[0] >= 0 and text[-1] <= 40 for text in texts)
    first = [text[0].item() for text in texts]
    assert len(set(first)) == 3
    whole = torch.cat(texts)
    assert torch.equal(whole, whole.round()) == (name == "randpos")
    model = model_of({"type": name, "max_position": 4}).train()
    with pytest.raises(ValueError, match="max_position=4 .*5 positions"):
        model(input_ids=ids, position_ids=positions)
    shorter = positions.masked_fill(positions == 4, 0)  # five texts, none of them longer than 4
    model(input_ids=ids, position_ids=shorter)


def logits(model, seed=None, **inputs):
    if seed is not None:
        torch.manual_seed(seed)
    return model(**inputs, use_cache=False).logits.detach()  # with gradients, or nothing is drawn


@each_settings
def test_packed_texts_do_not_see_each_other(settings):
    """Where positions are moved: another first text changes nothing behind the border."""
    model, (ids, positions) = model_of(settings).train(), packed()
    other = ids.clone()
    other[0, : LENGTHS[0]] += 1
    first, second = (logits(model, 5, input_ids=i, position_ids=positions) for i in (ids, other))
    assert not torch.equal(first[0, : LENGTHS[0]], second[0, : LENGTHS[0]])
    assert torch.equal(first[0, LENGTHS[0] :], second[0, LENGTHS[0] :])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@each_settings
def test_packed_texts_are_evaluated_as_unpacked_ones(settings, family):
    model, (ids, positions) = model_of(settings, family), packed()
    together = logits(model, input_ids=ids, position_ids=positions)[0].split(LENGTHS)
    for text, expected in zip(ids[0].split(LENGTHS), together, strict=True):
        alone = logits(model, input_ids=text[None])[0]
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in BIDIRECTIONAL for name in VARIANTS[family]]
)
def test_packed_texts_of_bidirectional_models_are_evaluated_as_unpacked_ones(
    family, name, attention
):
    """Also those that are given as embeddings, or share positions with the other samples."""
    model = FAMILIES[family].build(VARIANTS[family][name], attn_implementation=attention)
    ids, positions = packed()
    with torch.no_grad():
        together = model(ids, position_ids=positions).logits[0]
        alone = [model(text[None]).logits[0] for text in ids[0].split(LENGTHS)]
        embeds = model.get_input_embeddings()(ids)
        embedded = model(inputs_embeds=embeds, position_ids=positions).logits[0]
        shared = model(ids.flip(1).repeat(2, 1), position_ids=positions).logits
        flipped = model(ids.flip(1), position_ids=positions).logits
        seen = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits[0]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(embedded, together, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared, flipped.expand(2, -1, -1), atol=1e-5, rtol=1e-5)
    assert (seen - together).abs().max() > 1e-2  # with a mask, it says what is seen


@pytest.mark.parametrize("family", families_of("seq2seq"))
def test_packed_sources_of_a_decoder_are_refused(family):
    """Positions of the target alone come with the output of the encoder."""
    model, (ids, positions) = FAMILIES[family].build({"type": "sinpos"}), packed()
    embedded = torch.ones(1, 12, 32)
    for call in (
        partial(model, input_ids=ids, decoder_input_ids=ids),
        partial(model, decoder_input_ids=ids, inputs_embeds=embedded),
        partial(model.get_encoder(), ids),
    ):
        call()
        with pytest.raises(ValueError, match=r"position_ids.*with a source.*encoder_outputs"):
            call(position_ids=positions)
    decode = partial(model, encoder_outputs=model.get_encoder()(ids), decoder_input_ids=ids)
    assert torch.equal(decode(position_ids=torch.arange(12)[None]).logits, decode().logits)


@pytest.mark.parametrize("family", [*BIDIRECTIONAL, "llama"])
@pytest.mark.parametrize("training", [True, False])
def test_position_ids_of_every_shape_keep_borders(family, training):
    model, (ids, positions) = FAMILIES[family].build({"type": "nopos"}), packed()
    ids = ids.repeat(2, 1)
    expected = model(ids, position_ids=positions.repeat(2, 1)).logits
    for shaped in (positions, positions[0]):
        output = model.train(training)(ids, position_ids=shaped).logits
        torch.testing.assert_close(output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS[:2], ids=lambda settings: settings["type"])
def test_training_on_packed_texts_compiles_without_graph_breaks(settings):
    """Also where positions are drawn for each text, whose number the device alone knows."""
    model, (ids, positions) = model_of(settings, num_hidden_layers=1), packed()
    torch._dynamo.reset()
    backend = "aot_eager" if settings["type"] in SAMPLED else "eager"  # which has an operator
    compiled = torch.compile(model.train(), fullgraph=True, backend=backend)
    gradients = []
    for call in (model, compiled):
        model.zero_grad()
        torch.manual_seed(1)
        call(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for pair in zip(*gradients, strict=True):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
    if settings["type"] in SAMPLED:
        with pytest.raises(ValueError, match="max_position=40 .*41 positions"):
            compiled(torch.ones(1, 41, dtype=torch.long), position_ids=torch.arange(41)[None])


@pytest.mark.parametrize("family", ["llama", "modernbert"])
@pytest.mark.parametrize("name", SAMPLED)
def test_padding_takes_no_position(name, family):
    """Distances of a sample are the same with padding on either side, and alone."""
    model = model_of({"type": name, "max_position": 40}, family).train()
    inputs = batch("llama")
    mask = inputs["attention_mask"].bool()
    draw = model.model.rotary_emb.positions.draw(3)
    lengths = mask.sum(1).tolist()
    expected = [draw.order[row, :length].sort().values for row, length in enumerate(lengths)]
    for valid in (mask, mask.flip(1)):
        padded = {"input_ids": inputs["input_ids"], "attention_mask": valid.long()}
        positions = moved_positions(model, draw=draw, **padded)
        assert torch.equal(positions[valid], torch.cat(expected))


def test_packed_texts_may_begin_anywhere():
    """A step other than 1 is a border, as in transformers."""
    model = model_of({"type": "cape", "max_global_scale": 2.0, "max_local_shift": 0}).train()
    positions = torch.cat((torch.arange(5), torch.arange(3, 10)))[None]
    assert number_texts(positions).tolist() == [[0] * 5 + [1] * 7]
    assert number_texts(torch.tensor([[0, 1, 5, 6, 2, 2]])).tolist() == [[0, 0, 1, 1, 2, 3]]
    ids = torch.ones(1, 12, dtype=torch.long)
    moved = moved_positions(model, input_ids=ids, position_ids=positions)[0]
    first, second = moved[1], moved[5] / 3  # their scales
    assert first != second
    expected = torch.cat((torch.arange(5) * first, torch.arange(3, 10) * second))
    torch.testing.assert_close(moved, expected)
