"""Tables of patches that a configuration may leave out, beside biases of distances
(data2vec-vision)."""

import pytest
import torch
import transformers

from hf_models.checks.proof import prove
from hf_models.checks.updates import same_updates
from tests.support.generated import drawn, switched
from tests.support.hf import STACK

SIZES = {**STACK, "image_size": 32, "patch_size": 8, "drop_path_rate": 0.0}
FORMS = {
    "biases": {"use_relative_position_bias": True},
    "shared biases": {"use_shared_relative_position_bias": True},
    "table": {"use_absolute_position_embeddings": True},
    "both": {"use_absolute_position_embeddings": True, "use_relative_position_bias": True},
    "none": {},
}
CAPE = {"type": "cape", "max_global_shift": 0.5}
each = pytest.mark.parametrize("form", FORMS)


def build(form="biases", **fields):
    config = transformers.Data2VecVisionConfig(**{**SIZES, **FORMS[form], **fields})
    torch.manual_seed(0)
    return drawn(transformers.Data2VecVisionForImageClassification(config))


def images(height=32, width=32, number=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, height, width, generator=generator).repeat(number, 1, 1, 1)


def table_of(model):
    return model.data2vec_vision.embeddings.position_embeddings


@each
def test_stock_type_is_the_stock_model_bit_for_bit(form):
    stock = build(form)
    type_name = "abspos" if "use_absolute_position_embeddings" in FORMS[form] else "nopos"
    model = switched(stock, type=type_name)
    assert model.state_dict().keys() == stock.state_dict().keys()
    for pixels in (images(), images(48, 40)):
        assert torch.equal(model(pixels).logits, stock(pixels).logits)
    same_updates(stock, model, {"pixel_values": images()})


def test_settings_of_the_stock_type_follow_the_configuration(tmp_path):
    for form, expected in (("biases", "nopos"), ("both", "abspos")):
        stock = build(form)
        assert switched(stock, **CAPE).config.stock_type("encoder") == expected
        stock.save_pretrained(tmp_path / form)
        auto = transformers.AutoModelForImageClassification
        loaded = auto.from_pretrained(tmp_path / form, position_embedding={"type": expected})
        assert torch.equal(loaded.eval()(images()).logits, stock(images()).logits)


def test_a_new_table_begins_with_zeros_and_is_trained(tmp_path):
    stock = build()
    model = switched(stock, type="abspos")
    assert table_of(model).shape == (1, 17, 32)
    assert not table_of(model).any()
    assert torch.equal(model(images()).logits, stock(images()).logits)
    model(images()).logits.sum().backward()
    with torch.no_grad():
        table_of(model).sub_(table_of(model).grad)
    expected = model(images()).logits
    assert not torch.allclose(expected, stock(images()).logits, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(images()).logits, expected)


def test_no_table_leaves_the_class_token_its_row():
    stock = build("table")
    with torch.no_grad():
        table_of(stock)[:, 1:].zero_()
    model = switched(stock, type="nopos")
    assert table_of(model) is None
    torch.testing.assert_close(model(images()).logits, stock(images()).logits)


@each
def test_images_of_any_size_are_taken_and_moved_in_training(form):
    model = switched(build(form), **CAPE)
    for height, width in ((32, 32), (8, 64), (56, 24)):
        assert model(images(height, width)).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"7 x 32 pixels is smaller than a patch \(8 x 8\)"):
        model(images(7, 32))
    torch.testing.assert_close(*model(images()).logits)
    assert not torch.allclose(*model.train()(images()).logits, atol=1e-3)


def test_positions_are_patch_centres():
    model = switched(build("none"), type="sinpos")
    rows = table_of(model)
    assert not rows[:, 0].any()
    assert len(rows[0, 1:].unique(dim=0)) == 16
    pixels = images()
    mirrored = pixels.flip(-1)
    assert not torch.allclose(model(pixels).logits, model(mirrored).logits, atol=1e-4)


def test_types_that_act_in_attention_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="does not look its attention function up"):
        switched(build(), type="rope")


def test_the_proof_has_both_kinds_of_stock_models():
    proof = prove("data2vec-vision")
    assert proof.is_proved
    text = {check.name: check.text for check in proof.checks}
    assert "'nopos'" in text["switch"]
    assert "'abspos'" in text["use_absolute_position_embeddings=True, switch"]
