"""DINOv3: queries and keys turned by the centres of patches, moved for each image."""

import pytest
import torch
import transformers

from cape_plugins import Draw, PositionConfig
from hf_models.seams.rotary import leave_layers_unturned
from hf_models.switching.install import fixed_positions
from tests.support.generated import drawn, switched
from tests.support.hf import STACK

SIZES = {**STACK, "image_size": 32, "patch_size": 8, "num_register_tokens": 2}
SCALED = {"type": "rope", "max_global_scale": 2.0}  # the augmentation that DINOv3 was trained with
STOCK_AUGMENTATION = {"pos_embed_rescale": 2.0, "pos_embed_shift": 0.3, "pos_embed_jitter": 1.5}


def build(stock_class=transformers.DINOv3ViTModel, **fields):
    return drawn(stock_class(transformers.DINOv3ViTConfig(**{**SIZES, **fields})))


def images(height=32, width=32):
    return torch.randn(1, 3, height, width).repeat(2, 1, 1, 1)


def output(model, pixels, seed=0, **options):
    torch.manual_seed(seed)
    return model(pixels, **options).last_hidden_state


def test_rope_is_the_stock_model_with_its_augmentation_bit_for_bit():
    stock, pixels = build(**STOCK_AUGMENTATION), images()
    model = switched(stock, type="rope")
    assert torch.equal(output(model, pixels), output(stock, pixels))
    stock.train(), model.train()
    moved = output(stock, pixels)
    assert torch.equal(output(model, pixels), moved)
    assert not torch.equal(output(stock, pixels, seed=1), moved)  # the stock model draws
    assert torch.equal(*moved)  # once for the batch


@pytest.mark.parametrize("settings", [SCALED, {"type": "cape"}, {"type": "nopos"}], ids=str)
def test_the_stock_augmentation_is_replaced(settings):
    """Positions that this package moves, or leaves out, are not moved by the stock module too."""
    stock = build(**STOCK_AUGMENTATION)
    model, pixels = switched(stock, **settings), images()
    at_rest = output(model, pixels)
    model.train()
    scale = torch.ones(2, 1, 1)
    not_moved = Draw(scale=scale, chance=scale, batch_size=2)
    for seed in (0, 1):
        torch.testing.assert_close(output(model, pixels, seed, draw=not_moved), at_rest)
        with fixed_positions(model):
            assert torch.equal(output(model, pixels, seed), at_rest)
    assert model.config.pos_embed_rescale == 2.0  # the configuration is the user's


def test_a_scale_moves_its_image_as_the_stock_angles_of_scaled_centres():
    """Compares with the module of the stock model, given a grid of twice the distances."""
    model, pixels = switched(build(), **SCALED), images()
    draw = Draw(scale=torch.tensor([1.0, 2.0]).view(2, 1, 1), batch_size=2)
    moved = output(model, pixels, draw=draw)
    at_rest = output(model, pixels)
    torch.testing.assert_close(moved[0], at_rest[0])
    assert not torch.allclose(moved[1], at_rest[1], atol=1e-3)
    stock = build()
    stock.rope_embeddings.inv_freq.mul_(2.0)  # angles are products of centres and frequencies
    torch.testing.assert_close(moved[1], output(stock, pixels)[1], rtol=1e-4, atol=1e-4)


def test_images_of_any_size_and_none_without_a_patch():
    model = switched(build(), **SCALED).train()
    for height, width in ((32, 32), (16, 64), (56, 24)):
        tokens = output(model, images(height, width)).shape[1]
        assert tokens == 1 + 2 + (height // 8) * (width // 8)
    with pytest.raises(ValueError, match=r"7 x 32 pixels is smaller than a patch \(8 x 8\)"):
        model(images(7, 32))


def test_without_positions_patches_have_no_order():
    model, pixels = switched(build(), type="nopos"), images()
    mirrored = pixels.flip(-1).unflatten(-1, (4, 8)).flip(-1).flatten(-2)  # columns of patches
    features = output(model, pixels)[:, 0]
    torch.testing.assert_close(output(model, mirrored)[:, 0], features)
    other = switched(build(), type="rope")
    assert not torch.allclose(output(other, mirrored)[:, 0], output(other, pixels)[:, 0], atol=1e-3)


def test_backbones_are_switched():
    stock = build(transformers.DINOv3ViTBackbone)
    model, pixels = switched(stock, **SCALED), images()
    assert torch.equal(model(pixels).feature_maps[0], stock(pixels).feature_maps[0])
    torch.manual_seed(0)
    moved = model.train()(pixels).feature_maps[0]
    assert not torch.allclose(moved[0], moved[1], atol=1e-3)


def test_layers_that_are_not_named_are_not_turned():
    """The stock model computes the same where the second layer gets angles of zero."""
    stock, pixels = build(), images()

    def unturned(_, args, kwargs):
        cosines, sines = kwargs["position_embeddings"]
        angles = torch.ones_like(cosines), torch.zeros_like(sines)
        return args, {**kwargs, "position_embeddings": angles}

    model = switched(stock, type="rope", layers="first")
    (layers,) = (part for part in stock.modules() if isinstance(part, torch.nn.ModuleList))
    layers[1].attention.register_forward_pre_hook(unturned, with_kwargs=True)
    torch.testing.assert_close(output(model, pixels), output(stock, pixels))
    assert torch.equal(
        output(model, pixels), output(switched(build(), type="rope", layers="not:2"), pixels)
    )


@pytest.mark.parametrize("stacks", [0, 2])
def test_layers_are_named_in_one_stack_alone(stacks):
    owner = torch.nn.Sequential(*(build() for _ in range(stacks)))
    settings = PositionConfig("rope", "text", "rotary", layers="not:2")
    message = rf"layers='not:2' is not allowed for Sequential.*{stacks} stacks.*allowed: 'all'"
    with pytest.raises(ValueError, match=message):
        leave_layers_unturned(owner, settings)
