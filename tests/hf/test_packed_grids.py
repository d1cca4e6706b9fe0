"""Packed patches, images of different sizes in one batch (SigLIP 2)."""

import copy

import pytest
import torch
import transformers

import hf_models
from cape_plugins import patch_positions
from hf_models.seams.packed_grids import PackedTable, packed_positions
from hf_models.seams.rows import RowTable
from tests.hf import test_two_towers
from tests.support.generated import drawn, switched
from tests.support.hf import STACK

IMAGE = {**STACK, "num_patches": 16, "patch_size": 4}
CAPE = {"type": "cape", "max_global_shift": 0.5}
SHAPES = ((4, 4), (2, 5), (1, 1))


def build():
    return drawn(transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**IMAGE)))


def build_both():
    config = transformers.Siglip2Config(
        text_config={**STACK, **test_two_towers.TEXT}, vision_config=IMAGE
    )
    return drawn(transformers.Siglip2Model(config))


def images(*shapes, length=16):
    """Patches of images of these sizes; the first patches of all images are the same."""
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(1, 64, 48, generator=generator)[:, :length].repeat(len(shapes), 1, 1)
    sizes = torch.tensor(shapes)
    mask = (torch.arange(length) < sizes.prod(1, keepdim=True)).long()
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": sizes}


def pooled(model, **inputs):
    return model(**inputs).pooler_output


def test_stock_type_is_the_stock_model_bit_for_bit():
    stock = build()
    model = switched(stock, type="abspos")
    for inputs in (images(*SHAPES), images((8, 8), length=64)):
        assert torch.equal(pooled(model, **inputs), pooled(stock, **inputs))


@pytest.mark.parametrize("shape", [(4, 4), (2, 5), (5, 2), (1, 7), (1, 1)])
def test_each_image_has_the_patch_centres_of_its_size(shape):
    number = shape[0] * shape[1]
    packed, alone = packed_positions(torch.tensor([(3, 3), shape]), 16), patch_positions(*shape)
    torch.testing.assert_close(packed.coords[1:, :number], alone.coords)
    torch.testing.assert_close(packed.step[1, 0], alone.step)
    assert packed.valid.sum(1).tolist() == [9, number]


@pytest.mark.parametrize("type_name", ["sinpos", "cape", "nopos"])
def test_neither_other_images_nor_padding_change_an_image(type_name):
    model = switched(build(), type=type_name)
    together = pooled(model, **images(*SHAPES, length=30))
    for number, shape in enumerate(SHAPES):
        alone = pooled(model, **images(shape, length=shape[0] * shape[1]))
        torch.testing.assert_close(together[number], alone[0])


def test_the_shape_of_an_image_tells_its_patches_apart():
    model = switched(build(), type="sinpos")
    wide, high = pooled(model, **images((2, 4), (4, 2), length=8))
    assert not torch.allclose(wide, high, atol=1e-3)
    still = pooled(switched(build(), type="nopos"), **images((2, 4), (4, 2), length=8))
    torch.testing.assert_close(*still)


@pytest.mark.parametrize("shape", [(5, 4), (0, 4)])
def test_wrong_sizes_are_refused(shape):
    model = switched(build(), **CAPE)
    inputs = images((4, 4))
    inputs["spatial_shapes"] = torch.tensor([shape])
    with pytest.raises(ValueError, match=f"{shape[0]} x {shape[1]} patches for an image"):
        model(**inputs)


def test_types_that_act_in_attention_are_refused():
    with pytest.raises(ValueError, match="images of different sizes in one batch"):
        switched(build(), type="rope")
    with pytest.raises(ValueError, match="images of different sizes in one batch"):
        hf_models.switch(build_both(), {"type": "rope"}, vision_position_embedding={"type": "rope"})


def test_text_and_images_have_a_field_each():
    stock = build_both()
    ids = torch.randint(3, 58, (2, 30))  # longer than the table
    model = hf_models.switch(
        copy.deepcopy(stock), {"type": "sinpos"}, vision_position_embedding=CAPE
    )
    assert [isinstance(seam, PackedTable) for seam in model.seams()] == [False, True]
    assert isinstance(model.seams()[0], RowTable)
    assert model.eval()(input_ids=ids, **images(*SHAPES)).logits_per_text.isfinite().all()
    stock_images = switched(stock, type="sinpos")
    expected = pooled(stock.get_image_features, **images(*SHAPES))
    assert torch.equal(pooled(stock_images.get_image_features, **images(*SHAPES)), expected)
    moved = pooled(model.get_image_features, **images(*SHAPES))
    assert not torch.allclose(moved, expected, atol=1e-3)


def test_classifiers_have_the_field_of_images():
    config = build_both().config
    stock = drawn(transformers.Siglip2ForImageClassification(config))
    model = hf_models.switch(
        copy.deepcopy(stock), {"type": "abspos"}, vision_position_embedding=CAPE
    )
    inputs = images((4, 4), (4, 4))
    assert not torch.allclose(*model.train()(**inputs).logits, atol=1e-3)
    with pytest.raises(ValueError, match="has no effect"):
        switched(stock, **CAPE)
