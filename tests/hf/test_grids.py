"""Tables of patches, by the families in which something about them is odd."""

import copy

import pytest
import torch
import transformers

import hf_models
from hf_models.seams.grids import PatchGrid
from tests.hf.conftest import check_same_gradients, copies
from tests.support.hf import STACK

SIZES = {**STACK, "image_size": 32, "patch_size": 8}
MODELS = {
    # a table that is a module, one class token
    "clip_vision_model": (transformers.CLIPVisionModelWithProjection, SIZES, 1),
    # parameters
    "vit_msn": (transformers.ViTMSNForImageClassification, SIZES, 1),
    "ijepa": (transformers.IJepaForImageClassification, SIZES, 0),
    # fixed sinusoids in a parameter, for a model that hides patches at random
    "vit_mae": (
        transformers.ViTMAEModel,
        {**SIZES, "mask_ratio": 0.0, "decoder_hidden_size": 16, "decoder_num_attention_heads": 2},
        1,
    ),
}
each = pytest.mark.parametrize("name", MODELS)


def build(name, **fields):
    model_class, sizes, _ = MODELS[name]
    model = model_class(model_class.config_class(**{**sizes, **fields})).eval()
    with torch.no_grad():  # positions must show
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def switched(model, name="cape", **options):
    return hf_models.switch(copy.deepcopy(model), {"type": name, **options})


def images(height=32, width=32, batch=2):
    return torch.randn(batch, 3, height, width)


def output(model, pixels, **options):
    torch.manual_seed(0)  # of the order in which ViT-MAE takes patches
    result = model(pixels, **options)
    return next(result[name] for name in ("logits", "image_embeds", "last_hidden_state")
                if name in result)  # fmt: skip


def grid_of(model):
    return next(seam for seam in model.seams() if isinstance(seam, PatchGrid))


@each
def test_stock_type_is_the_stock_model_bit_for_bit(name):
    stock, pixels = build(name), images()
    model = switched(stock, "abspos")
    larger = images(48, 40)
    for inputs, options in ((pixels, {}), (larger, {"interpolate_pos_encoding": True})):
        outputs = [output(each_model, inputs, **options) for each_model in (model, stock)]
        assert torch.equal(*outputs)
    check_same_gradients((model, stock), outputs)


@each
def test_special_tokens_are_the_rows_beyond_the_grid(name):
    grid = grid_of(switched(build(name)))
    assert (grid.grid, grid.special_tokens) == ((4, 4), MODELS[name][2])
    rows = grid.embedding(torch.zeros(1))
    assert rows.shape == (1, MODELS[name][2] + 16, 32)
    assert not rows[:, : grid.special_tokens].any()
    assert rows[:, grid.special_tokens :].any(-1).all()


@each
def test_images_of_any_size_need_no_flag(name):
    model = switched(build(name))
    for height, width in ((32, 32), (16, 64), (56, 24)):
        assert torch.isfinite(output(model, images(height, width))).all()
    mirrored = images().flip(-1)
    assert not torch.allclose(output(model, mirrored), output(model, mirrored.flip(-1)), atol=1e-4)
    with pytest.raises(ValueError, match=r"7 x 32 pixels is smaller than a patch \(8 x 8\)"):
        model(images(7, 32))


@each
def test_positions_are_drawn_for_each_image_in_training_alone(name, tmp_path):
    model, pixels = switched(build(name)), images(batch=1).repeat(2, 1, 1, 1)
    assert torch.equal(output(model, pixels), output(model, pixels))
    moved = output(model.train(), pixels)
    assert not torch.allclose(moved[0], moved[1], atol=1e-4)  # a draw for each image
    still = output(model.eval(), pixels)
    assert all(torch.equal(output(other, pixels), still) for other in copies(model, tmp_path))


def test_the_class_token_gets_its_row():
    """A table of zeros but for the row of the class token is not lost with the table."""
    stock, pixels = build("clip_vision_model"), images()
    with torch.no_grad():
        stock.vision_model.embeddings.position_embedding.weight[1:].zero_()
    model = switched(stock, "nopos")
    torch.testing.assert_close(output(model, pixels), output(stock, pixels))


DPT = {**SIZES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "num_labels": 3}
DPT |= {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(96, 48), (48, 144), (16, 64)])
@pytest.mark.parametrize(
    "head", [transformers.DPTForDepthEstimation, transformers.DPTForSemanticSegmentation]
)
def test_necks_get_the_grid_of_any_image(head, height, width, tmp_path):
    """As the stock neck does where a caller gives it the rows and columns; 16 x 64 pixels have as
    many patches as a square."""
    torch.manual_seed(0)
    stock, pixels = head(head.config_class(**DPT)).eval(), images(height, width)
    # a copy, because calls for hidden states leave hooks that pickle refuses
    states = copy.deepcopy(stock).dpt(pixels, output_hidden_states=True).hidden_states[1:]
    expected = stock.head(stock.neck(states, height // 8, width // 8))
    model = hf_models.switch(stock, {"type": "abspos"})
    for other in (*copies(model, tmp_path), model):
        assert torch.equal(other(pixels)[0], expected)
    for name in ("cape", "relpos"):  # a second and a third switch
        assert hf_models.switch(model, {"type": name})(pixels)[0].shape == expected.shape


SQUARES = {
    transformers.ViTForMaskedImageModeling: SIZES,
    transformers.DeiTForMaskedImageModeling: SIZES,
    transformers.CLIPSegForImageSegmentation: {
        "text_config": {**STACK, "vocab_size": 20, "max_position_embeddings": 9},
        "vision_config": SIZES, "projection_dim": 32, "extract_layers": [0, 1], "reduce_dim": 16,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 16,
    },
    transformers.Data2VecVisionForSemanticSegmentation: {
        **SIZES, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4],
        "pool_scales": [1], "auxiliary_num_convs": 1,
    },
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("head", SQUARES, ids=lambda head: head.__name__)
def test_heads_that_make_squares_refuse_other_images(head):
    """Also with as many patches as the square, which the stock head would mix up."""
    torch.manual_seed(0)
    stock = head(head.config_class(**SQUARES[head])).eval()
    text = {"input_ids": torch.full((2, 5), 7)} if "text_config" in SQUARES[head] else {}
    pixels = images()
    expected = stock(pixel_values=pixels, **text)[0]
    fields = {"vision_position_embedding": {"type": "abspos"}} if text else {}
    stock_type = "nopos" if hasattr(stock.config, "use_relative_position_bias") else "abspos"
    model = hf_models.switch(stock, {"type": stock_type}, **fields)
    assert torch.equal(model(pixel_values=pixels, **text)[0], expected)
    with pytest.raises(ValueError, match=r"16 x 64 pixels.*allowed: .*Resize"):
        model(pixel_values=images(16, 64), **text)
