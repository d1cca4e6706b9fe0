"""Several texts in one sample of a model that turns queries and keys: borders, draws, losses."""

import pytest
import torch

from hf_models.rotary import draw_texts, number_texts, sample_texts
from tests.support.hf import FAMILIES, batch

LENGTHS = (5, 3, 4)
SAMPLED = ("randpos", "rfs")
SETTINGS = [
    {"type": "cape", "max_global_scale": 2.0},
    *({"type": name, "max_position": 40} for name in SAMPLED),
]


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

    stock.forward = note
    try:
        model(**inputs)
    finally:
        stock.forward = forward
    assert all(torch.equal(seen[0], other) for other in seen)  # asked twice, moved once
    return seen[0].float()


def by_text(row):
    return row.split(LENGTHS)


# ---- draws ---------------------------------------------------------------------------------------


def test_each_packed_text_has_a_scale_of_its_own():
    model = model_of({"type": "cape", "max_global_scale": 2.0, "max_local_shift": 0}).train()
    ids, positions = packed()
    texts = by_text(moved_positions(model, input_ids=ids, position_ids=positions)[0])
    scales = [text[1].item() for text in texts]
    assert len(set(scales)) == 3
    for text, scale, length in zip(texts, scales, LENGTHS, strict=True):
        torch.testing.assert_close(text, torch.arange(float(length)) * scale)


@pytest.mark.parametrize("name", SAMPLED)
def test_each_packed_text_has_sorted_positions_of_its_own(name):
    model = model_of({"type": name, "max_position": 40}).train()
    ids, positions = packed()
    texts = by_text(moved_positions(model, input_ids=ids, position_ids=positions)[0])
    assert all((text.diff() > 0).all() and text[0] >= 0 and text[-1] <= 40 for text in texts)
    first = [text[0].item() for text in texts]
    assert len(set(first)) == 3
    whole = torch.cat(texts)
    assert torch.equal(whole, whole.round()) == (name == "randpos")


@pytest.mark.parametrize("name", SAMPLED)
def test_packed_texts_of_several_samples_take_the_first_of_their_orders(name):
    encoder = model_of({"type": name, "max_position": 9}).model.rotary_emb.positions.train()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    torch.manual_seed(1)
    actual = sample_texts(encoder, positions)
    torch.manual_seed(1)
    order = encoder.draw(6).order  # three texts a sample at most
    texts = [order[row, :length].sort().values for row, length in ((0, 3), (1, 2), (2, 1), (3, 6))]
    assert torch.equal(actual, torch.stack((torch.cat(texts[:3]), texts[3])))


@pytest.mark.parametrize("name", SAMPLED)
def test_a_packed_text_longer_than_the_range_is_refused(name):
    model = model_of({"type": name, "max_position": 4}).train()
    ids, positions = packed()
    with pytest.raises(ValueError, match="max_position=4 .*5 positions"):
        model(input_ids=ids, position_ids=positions)
    shorter = positions.masked_fill(positions == 4, 0)  # five texts, none of them longer than 4
    model(input_ids=ids, position_ids=shorter)


def test_a_draw_of_each_text_is_there_at_each_of_its_tokens():
    encoder = model_of({"type": "cape", "max_global_scale": 2.0}).model.rotary_emb.positions.train()
    positions = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    scale = draw_texts(encoder, positions).scale[..., 0]
    assert scale[0, 0] == scale[0, 1] != scale[0, 2] == scale[0, 3] == scale[0, 4]
    assert len(set(scale[1].tolist())) == 1


# ---- borders and losses --------------------------------------------------------------------------


def logits(model, seed=None, **inputs):
    if seed is not None:
        torch.manual_seed(seed)
    return model(**inputs, use_cache=False).logits.detach()  # with gradients, or nothing is drawn


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["type"])
def test_packed_texts_do_not_see_each_other(settings, training):
    """Also where positions are moved: another first text changes nothing behind the border."""
    model, (ids, positions) = model_of(settings).train(training), packed()
    other = ids.clone()
    other[0, : LENGTHS[0]] += 1
    first, second = (logits(model, 5, input_ids=i, position_ids=positions) for i in (ids, other))
    assert not torch.equal(first[0, : LENGTHS[0]], second[0, : LENGTHS[0]])
    assert torch.equal(first[0, LENGTHS[0] :], second[0, LENGTHS[0] :])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["type"])
def test_packed_texts_are_evaluated_as_unpacked_ones(settings, family):
    model, (ids, positions) = model_of(settings, family), packed()
    together = logits(model, input_ids=ids, position_ids=positions)[0].split(LENGTHS)
    for text, expected in zip(by_text(ids[0]), together, strict=True):
        alone = logits(model, input_ids=text[None])[0]
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["type"])
def test_training_on_packed_texts_compiles_without_graph_breaks(settings):
    """Also where positions are drawn for each text, whose number the device alone knows."""
    model, (ids, positions) = model_of(settings, num_hidden_layers=1), packed()
    torch._dynamo.reset()
    compiled = torch.compile(model.train(), fullgraph=True, backend="aot_eager")
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


# ---- padding -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["type"])
def test_generation_in_training_mode_draws_nothing(settings, use_cache):
    model, inputs = model_of(settings), batch("llama")
    inputs = {key: inputs[key][:1] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": use_cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options).logits
    for _ in range(2):
        generated = model.train().generate(**inputs, **options).logits
        assert torch.equal(torch.stack(generated), torch.stack(expected))


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
