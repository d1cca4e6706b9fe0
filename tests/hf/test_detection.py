"""Detections behind the patches, and tables behind the layers (YOLOS)."""

import copy

import pytest
import torch
import transformers

import hf_models
from hf_models.storage.longer_tables import extend_table
from tests.hf.conftest import check_same_gradients, copies
from tests.support.generated import drawn, switched
from tests.support.hf import STACK

DETECTIONS, PATCHES, LAYERS = 3, (4, 2), 3  # patches in rows and columns
SIZES = {**STACK, "num_hidden_layers": LAYERS, "num_detection_tokens": DETECTIONS}
SIZES |= {"image_size": (32, 16), "patch_size": 8}
CAPE = {"type": "cape", "max_global_shift": 0.5}


def build(**fields):
    torch.manual_seed(0)
    config = transformers.YolosConfig(**{**SIZES, **fields})
    return drawn(transformers.YolosForObjectDetection(config))


def images(height=32, width=16, number=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, height, width, generator=generator).repeat(number, 1, 1, 1)


def tables(model):
    """Of an image of the size of the configuration: at the input, and behind the layers."""
    vit = model.vit
    return vit.embeddings.position_embeddings, vit.encoder.interpolation(SIZES["image_size"])


@pytest.mark.parametrize("fields", [{}, {"use_mid_position_embeddings": False}])
def test_stock_type_is_the_stock_model_bit_for_bit(fields):
    stock = build(**fields)
    model = switched(stock, type="abspos")
    for pixels in (images(), images(48, 40)):
        assert torch.equal(model(pixels).pred_boxes, stock(pixels).pred_boxes)
    models = model, stock
    check_same_gradients(models, [each(images()).pred_boxes for each in models])


def test_layers_get_the_positions_of_the_input():
    model = switched(build(), type="sinpos")
    first, later = tables(model)
    rows = PATCHES[0] * PATCHES[1]
    assert first.shape == (1, 1 + rows + DETECTIONS, 32)
    assert torch.equal(later, first.expand(LAYERS - 1, -1, -1)[:, None])
    assert not first[:, 0].any()
    assert not first[:, -DETECTIONS:].any()
    patches = first[0, 1:-DETECTIONS]
    assert len(patches.unique(dim=0)) == rows


@torch.no_grad()
def test_outputs_equal_a_stock_model_with_these_rows():
    model = switched(build(), type="sinpos")
    twin = hf_models.switch(copy.deepcopy(model), {"type": "abspos"}).eval()
    stock = build()
    names = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        names[name].copy_(parameter)
    stock.vit.embeddings.position_embeddings.copy_(tables(model)[0])
    stock.vit.encoder.interpolation.mid_position_embeddings.copy_(tables(model)[1])
    torch.testing.assert_close(model(images()).pred_boxes, stock(images()).pred_boxes)
    assert not torch.allclose(model(images()).pred_boxes, twin(images()).pred_boxes, atol=1e-3)


def test_the_tokens_get_their_rows():
    """Tables of zeros but for class token and detections at the input lose nothing."""
    stock = build(use_mid_position_embeddings=False)
    with torch.no_grad():
        stock.vit.embeddings.position_embeddings[:, 1:-DETECTIONS].zero_()
    model = switched(stock, type="nopos")
    torch.testing.assert_close(model(images()).pred_boxes, stock(images()).pred_boxes)


def test_images_of_any_size_are_taken_by_copies_too(tmp_path):
    model = switched(build(), **CAPE)
    others = copies(model, tmp_path)
    for height, width in ((32, 16), (8, 64), (56, 24)):
        pixels = images(height, width)
        expected = model(pixels).pred_boxes
        assert expected.isfinite().all()
        assert all(torch.equal(other(pixels).pred_boxes, expected) for other in others)
    with pytest.raises(ValueError, match=r"7 x 32 pixels is smaller than a patch \(8 x 8\)"):
        model(images(7, 32))


def test_positions_are_drawn_for_each_image_and_once_for_all_layers():
    model, pixels = switched(build(), **CAPE), images()
    seen = []
    model.vit.encoder.interpolation.register_forward_hook(lambda *call: seen.append(call[2]))
    model.vit.embeddings.interpolation.register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(*model(pixels).pred_boxes)
    assert not torch.allclose(*model.train()(pixels).pred_boxes, atol=1e-3)
    *_, first, later = seen
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(rows, first) for rows in later)


def test_types_that_act_in_attention_are_refused():
    with pytest.raises(ValueError, match="detections behind the patches"):
        switched(build(), type="rope")


def test_tables_grow_between_the_special_tokens():
    model = switched(build(), type="abspos")
    longer = extend_table(model, "64x32", "copy")
    vit = longer.vit
    larger = vit.embeddings.position_embeddings, vit.encoder.interpolation.mid_position_embeddings
    for old, new in zip(tables(model), larger, strict=True):
        assert torch.equal(new[..., :1, :], old[..., :1, :])
        assert torch.equal(new[..., -DETECTIONS:, :], old[..., -DETECTIONS:, :])
        grid = new[..., 1:-DETECTIONS, :].unflatten(-2, (8, 4))
        expected = old[..., 1:-DETECTIONS, :].unflatten(-2, PATCHES)
        torch.testing.assert_close(grid, expected.repeat(*(1,) * (old.dim() - 2), 2, 2, 1))
