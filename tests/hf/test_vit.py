"""Images of any height and width."""

import warnings

import pytest
import torch

from tests.support.hf import FAMILIES, IMAGE, answer, make

NAMES = list(IMAGE)


def logits(model, *size, rows=2):
    images = torch.randn(rows, 3, *size, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        return model(images).logits, images


@pytest.mark.parametrize("size", [(8, 8), (37, 50)])
@pytest.mark.parametrize("name", NAMES)
def test_images_of_any_size_need_no_flag(name, size):
    model = make("vit", name)
    both, images = logits(model, *size)
    assert both.isfinite().all()
    for row in range(2):
        alone = model(images[row : row + 1]).logits
        torch.testing.assert_close(alone[0], both[row], atol=1e-5, rtol=1e-5)


COARSE = "alias on a grid of 4 x 4 patches"


@pytest.mark.parametrize("name", NAMES)
def test_a_coarse_grid_is_warned_of_when_the_model_is_built_and_not_later(name):
    """By sinusoids, for the size of the configuration; images of other sizes are silent."""
    encoding = make("vit", name).config.position_config.encoding
    sinusoid = encoding.adds and not encoding.learned
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = make("vit", name)
        built = [warning for warning in seen if COARSE in str(warning.message)]
        logits(model.train(), 32, 32)
        logits(model.eval(), 16, 24)
        assert [warning for warning in seen if "alias" in str(warning.message)] == built
    assert len(built) == sinusoid


def test_bad_images_are_refused():
    model = make("vit", "cape")
    with pytest.raises(ValueError, match="6 x 32 pixels.*8 x 8.*Resize"):
        model(torch.zeros(1, 3, 6, 32))
    with pytest.raises(ValueError, match="channel"):
        model(torch.zeros(1, 4, 32, 32))
    with pytest.raises(ValueError, match="pixel_values is NoneType; allowed: a tensor"):
        model(None)
    with pytest.raises(ValueError, match=r"pixel_values has shape \(3, 32, 32\).*image\[None\]"):
        model(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match=r"pixel_values has shape \(1, 32, 32, 3\).*3 channels"):
        model(torch.zeros(1, 32, 32, 3))


@pytest.mark.parametrize("name", ["abspos", "cape"])
@pytest.mark.parametrize("family", ["siglip_vision_model", "beit"])
def test_resized_model_is_saved_and_loads_or_stays(family, name, tmp_path):
    row, images = FAMILIES[family], torch.randn(1, 3, 24, 24)
    model = row.build(IMAGE[name])
    for parameter in model.parameters():  # new relative biases of BEiT are zero at any size
        torch.nn.init.normal_(parameter, std=0.1)
    body = next(module for module in model.modules() if hasattr(module, "resize_images"))
    with pytest.raises(ValueError, match=r"24 x 40 pixels is not allowed.*height = width.*square"):
        body.resize_images(24, 40)
    assert body.config.image_size == 32
    with torch.no_grad():
        expected = answer(model(images))
        body.resize_images(24, 24)
        model.save_pretrained(tmp_path)
        again = row.model.from_pretrained(tmp_path)
        torch.testing.assert_close(answer(again(images)), expected)
