"""V-JEPA 2 turns queries and keys by frame, row and column, in its encoder and its predictor."""

import pytest
import torch
import transformers

import hf_models
from cape_plugins import Draw
from tests.support.generated import drawn, switched

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {f"pred_{name}": size for name, size in SIZES.items()}
SIZES |= {"num_pooler_layers": 1, "patch_size": 8, "frames_per_clip": 4, "tubelet_size": 2}
CAPE = {"type": "cape", "max_global_scale": 1.5}
SCALE = Draw(scale=torch.tensor([1.0, 1.4]).view(2, 1, 1), batch_size=2)


def build(model_class=transformers.VJEPA2Model, crop_size=16, **fields):
    torch.manual_seed(0)
    config = transformers.VJEPA2Config(**{**SIZES, **fields}, crop_size=crop_size)
    return drawn(model_class(config))


def videos(frames=4, height=16, width=16):
    torch.manual_seed(1)
    return torch.randn(1, frames, 3, height, width).repeat(2, 1, 1, 1, 1)


def all_outputs(model, inputs, **arguments):
    output = model(inputs, output_hidden_states=True, output_attentions=True, **arguments)
    predicted = output.predictor_output
    return [output.last_hidden_state, predicted.last_hidden_state, *output.hidden_states]


def places(model, inputs, part="encoder", **arguments):
    """Frames, rows and columns by which the second layer turns, ``[1 or B, tubelets]`` each."""
    attention, seen = getattr(model, part).layer[1].attention, []
    stock = attention.get_position_ids
    attention.get_position_ids = lambda *args, **kwargs: (
        seen.append(stock(*args, **kwargs)) or seen[0]
    )
    try:
        model(inputs, **arguments)
    finally:
        del attention.get_position_ids
    (ids,) = seen
    return [numbers.float().reshape(-1, numbers.shape[-1]) for numbers in ids]


def numbers_of(frames, rows, columns):
    axes = torch.arange(frames), torch.arange(rows), torch.arange(columns)
    return [axis.flatten().float() for axis in torch.meshgrid(*axes, indexing="ij")]


@pytest.mark.parametrize("size", [16, 24])
def test_another_size_equals_a_model_made_for_it(size):
    """The stock size bit for bit."""
    stock, inputs = build(crop_size=size), videos(8, size, size)
    model = switched(build(), type="rope")
    model.load_state_dict(stock.state_dict())
    close = {"rtol": 0, "atol": 0} if size == 16 else {"rtol": 1e-4, "atol": 1e-4}
    for pair in zip(all_outputs(model, inputs), all_outputs(stock, inputs), strict=True):
        torch.testing.assert_close(*pair, **close)


@pytest.mark.parametrize("size", [(4, 16, 16), (8, 16, 24), (6, 40, 8), (1, 24, 16)])
@pytest.mark.parametrize("part", ["encoder", "predictor"])
def test_tubelets_have_the_numbers_of_their_frame_row_and_column(part, size):
    actual = places(switched(build(), type="rope"), videos(*size), part)
    expected = numbers_of(max(1, size[0] // 2), size[1] // 8, size[2] // 8)
    if part == "predictor":  # sees each tubelet as context and as target, sorted
        expected = [numbers.repeat_interleave(2) for numbers in expected]
    for axis, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(axis[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("part", ["encoder", "predictor"])
def test_a_draw_scales_the_distances_of_its_video(part):
    model = switched(build(), **CAPE, max_local_shift=0.0).train()
    frames, rows, columns = places(model, videos(8, 24, 24), part, draw=SCALE)
    expected = numbers_of(4, 3, 3)
    if part == "predictor":
        expected = [numbers.repeat_interleave(2) for numbers in expected]
    for axis, wanted, middle in zip((frames, rows, columns), expected, (1.5, 1, 1), strict=True):
        torch.testing.assert_close(axis[0], wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(axis[1], (wanted - middle) * 1.4 + middle, atol=1e-5, rtol=0)


def test_masked_tubelets_keep_the_places_of_the_encoder():
    """Local shifts are drawn once, for both stacks."""
    model, inputs = switched(build(), type="rope", max_local_shift=0.5).train(), videos()
    context, target = torch.tensor([[0, 3, 5], [1, 2, 7]]), torch.tensor([[1, 7], [0, 4]])
    masks = {"context_mask": [context], "target_mask": [target]}
    draw = Draw(batch_size=2)
    torch.manual_seed(3)
    encoded = places(model, inputs, draw=draw, **masks)
    torch.manual_seed(3)
    predicted = places(model, inputs, "predictor", draw=draw, **masks)
    tokens = torch.cat((context, target), 1).sort(1).values
    for axis, of_encoder in zip(predicted, encoded, strict=True):
        assert (of_encoder[0] != of_encoder[1]).all()
        assert torch.equal(axis, of_encoder.gather(1, tokens))


def test_without_positions_tubelets_are_a_set():
    model, inputs = switched(build(), type="nopos"), videos()
    mirrored = model(inputs.flip(1)).last_hidden_state  # within tubelets, too
    same = inputs[:, [2, 3, 0, 1]]
    plain = model(inputs).last_hidden_state.unflatten(1, (2, 4))
    torch.testing.assert_close(model(same).last_hidden_state.unflatten(1, (2, 4)), plain.flip(1))
    assert not torch.allclose(mirrored.unflatten(1, (2, 4)), plain.flip(1), atol=1e-3)
    turned = build()
    plain = turned(inputs).last_hidden_state.unflatten(1, (2, 4))
    assert not torch.allclose(turned(same).last_hidden_state.unflatten(1, (2, 4)), plain.flip(1))


def test_layers_that_are_not_named_do_not_turn():
    model = switched(build(), type="rope", layers="first")
    turns = [layer.attention.turns for layer in (*model.encoder.layer, *model.predictor.layer)]
    assert turns == [True, False, True, False]
    half = model(videos()).last_hidden_state
    assert not torch.allclose(half, build()(videos()).last_hidden_state, atol=1e-3)


def test_checkpointed_layers_see_the_draw():
    gradients = []
    for is_on in (False, True):
        model = switched(build(), **CAPE).train()
        if is_on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        model(videos(8, 24, 16)).predictor_output.last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert sum(gradient is not None for gradient in gradients[0].values()) > 50
    for name, gradient in gradients[0].items():
        if gradient is not None:
            torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_half_precision_keeps_the_places():
    """Numbers of frames beyond 256 have no fraction in bfloat16."""
    model = switched(build(), type="rope").to(torch.bfloat16)
    attention = model.encoder.layer[0].attention
    with attention.using(torch.tensor([[[0.0, 0.0, 600.0], [0.0, 0.0, 601.0]]])):
        ids = attention.get_position_ids(torch.zeros(1, 2, 24, dtype=torch.bfloat16))
        query = torch.ones(1, 2, 2, 12, dtype=torch.bfloat16)
        turned = attention.apply_rotary_embeddings(query, ids)
    assert turned.dtype == torch.bfloat16
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


def test_a_users_model_is_compared_with_its_stock_model():
    rows = hf_models.check_family(build())
    assert not [row for row in rows if row.failed]
    assert {row.name for row in rows} > {"cape: training draws positions"}
