"""Encoders of images inside stock models that write text, as TrOCR."""

import functools

import pytest
import torch
import transformers

from hf_models.seams.base import Seam
from tests.hf.test_grids import SIZES
from tests.support.generated import drawn, switched
from tests.support.hf import DECODER_SIZES

# stock encoders, with the number of special tokens in their tables
ENCODERS = {
    "vit": (transformers.ViTConfig, 1),
    "deit": (transformers.DeiTConfig, 2),
    "dinov2": (transformers.Dinov2Config, 1),
    "beit": (functools.partial(transformers.BeitConfig, use_absolute_position_embeddings=True), 1),
}
each = pytest.mark.parametrize("name", ENCODERS)
CAPE = {"type": "cape", "max_global_shift": 0.5}


def build(name="vit"):
    """TrOCR with one of the encoders."""
    torch.manual_seed(0)
    encoder = ENCODERS[name][0](**SIZES)
    decoder = transformers.TrOCRConfig(
        **DECODER_SIZES, vocab_size=40, d_model=32, max_position_embeddings=20, is_decoder=True,
        add_cross_attention=True,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 2, 1
    return drawn(transformers.VisionEncoderDecoderModel(config=config))


def images(height=32, width=32):
    return torch.randn(1, 3, height, width).repeat(2, 1, 1, 1)


def text():
    return torch.randint(3, 40, (1, 6)).repeat(2, 1)


def generated(model, pixels):
    """Logits of the tokens, and the tokens that they follow."""
    steps = model.generate(
        pixels, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(steps.logits, 1), steps.sequences[:, :-1]


@each
def test_stock_type_is_the_stock_model_bit_for_bit(name):
    stock, pixels, ids = build(name), images(), text()
    model = switched(stock, type="abspos")
    assert torch.equal(model(pixels, ids).logits, stock(pixels, ids).logits)
    assert torch.equal(generated(model, pixels)[0], generated(stock, pixels)[0])
    assert model.seams()[0].special_tokens == ENCODERS[name][1]


@each
@pytest.mark.parametrize("settings", [CAPE, {"type": "rope"}], ids=["cape", "rope"])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (16, 56)])
def test_generation_sees_the_positions_of_the_forward(name, settings, height, width):
    """Generation calls the stock encoder alone, which has to know the size of the images."""
    model, pixels = switched(build(name), **settings), images(height, width)
    logits, ids = generated(model, pixels)
    torch.testing.assert_close(model(pixels, ids).logits, logits, rtol=1e-4, atol=1e-4)


@each
def test_each_image_has_a_draw_and_generation_has_none(name):
    model, pixels, ids = switched(build(name), **CAPE), images(), text()
    at_rest, _ = generated(model, pixels)
    model.train()
    moved = model(pixels, ids).logits
    assert not torch.allclose(moved[0], moved[1], atol=1e-3)
    for module in model.modules():  # a model in training mode that changes nothing else
        if module is not model and not isinstance(module, Seam):
            module.training = False
    state = torch.get_rng_state()
    torch.testing.assert_close(generated(model, pixels)[0], at_rest)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_text_keeps_its_stock_positions():
    stock = build()
    decoders = switched(stock, type="nopos").decoder, stock.decoder
    assert type(decoders[0]) is type(decoders[1])
    assert torch.equal(*(each.model.decoder.embed_positions.weight for each in decoders))


def test_folders(tmp_path):
    model, pixels = switched(build(), **CAPE), images()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    assert torch.equal(generated(loaded, pixels)[0], generated(model, pixels)[0])
