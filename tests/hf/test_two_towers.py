"""CLIP and its relatives: positions of text and of images, set apart."""

import copy
import pickle

import pytest
import torch
import transformers

import hf_models
from tests.support.generated import drawn
from tests.support.hf import STACK

SMALL = {**STACK, "projection_dim": 16}
TEXT = {"vocab_size": 60, "max_position_embeddings": 12, "eos_token_id": 59, "pad_token_id": 1}
TEXT |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)  # Chinese CLIP
IMAGE = {"image_size": 32, "patch_size": 8}
MODELS = {
    "clip": transformers.CLIPModel,
    "metaclip_2": transformers.MetaClip2Model,
    "chinese_clip": transformers.ChineseCLIPModel,
    "siglip": transformers.SiglipModel,
}
each = pytest.mark.parametrize("name", MODELS)
CAPE = {"type": "cape", "max_global_shift": 0.5}
STOCK = {"type": "abspos"}


def build(name="clip", **fields):
    text, image = {**SMALL, **TEXT, **fields}, {**SMALL, **IMAGE, **fields}
    config = MODELS[name].config_class(text_config=text, vision_config=image, projection_dim=16)
    return drawn(MODELS[name](config))


def switched(model, text=None, images=None):
    fields = {} if images is None else {"vision_position_embedding": images}
    return hf_models.switch(copy.deepcopy(model), text or STOCK, **fields)


def inputs(height=32, width=32, length=9):
    """Two texts of a kind beside three images of a kind."""
    ids = torch.randint(3, 58, (1, length)).repeat(2, 1)
    ids[:, -1] = 59
    pixels = torch.randn(1, 3, height, width).repeat(3, 1, 1, 1)
    return {"input_ids": ids, "pixel_values": pixels}


def embeddings(model, batch, **options):
    outputs = model(**batch, **options)
    return outputs.text_embeds, outputs.image_embeds


@each
def test_stock_types_are_the_stock_model_bit_for_bit(name):
    stock, batch = build(name), inputs()
    for images in (None, STOCK):  # the images keep their stock positions by default
        model = switched(stock, STOCK, images)
        assert torch.equal(model(**batch).logits_per_image, stock(**batch).logits_per_image)
    larger = {**inputs(48, 40), "interpolate_pos_encoding": True}
    assert torch.equal(model(**larger).logits_per_image, stock(**larger).logits_per_image)


@each
def test_each_tower_has_its_own_setting(name):
    stock, batch = build(name), inputs()
    text, images = embeddings(stock, batch)
    without_text = embeddings(switched(stock, {"type": "nopos"}), batch)
    without_places = embeddings(switched(stock, STOCK, {"type": "nopos"}), batch)
    assert torch.equal(without_text[1], images)
    assert not torch.allclose(without_text[0], text, atol=1e-3)
    assert torch.equal(without_places[0], text)
    assert not torch.allclose(without_places[1], images, atol=1e-3)


@each
def test_texts_and_images_are_drawn_one_by_one(name):
    """By the whole model, and by an inner model that is called alone."""
    model, batch = switched(build(name), {"type": "cape"}, CAPE).train(), inputs()
    for text, images in (
        embeddings(model, batch),
        (model.text_model(batch["input_ids"])[0], model.vision_model(batch["pixel_values"])[0]),
    ):
        assert not torch.allclose(text[0], text[1], atol=1e-3)
        assert not torch.allclose(images[0], images[1], atol=1e-3)
        assert not torch.allclose(images[1], images[2], atol=1e-3)
    text, images = embeddings(switched(build(name), STOCK, CAPE).train(), batch)
    torch.testing.assert_close(text[0], text[1])
    assert not torch.allclose(images[0], images[1], atol=1e-3)


@each
def test_a_tower_called_alone_has_the_positions_of_the_whole_model(name):
    """By the methods that contrastive training calls: draws, padding, positions in attention;
    longer texts and other images than in training."""

    def features(model, **inputs):
        method = model.get_text_features if "input_ids" in inputs else model.get_image_features
        output = method(**inputs)
        output = output if isinstance(output, torch.Tensor) else output.pooler_output
        return torch.nn.functional.normalize(output, dim=-1)

    batch = inputs(24, 56, length=30)
    texts, pixels = batch["input_ids"], batch["pixel_values"]
    model = switched(build(name), {"type": "cape"}, CAPE)
    torch.testing.assert_close(features(model, pixel_values=pixels), embeddings(model, batch)[1])
    model.train()
    text, image = features(model, input_ids=texts), features(model, pixel_values=pixels)
    assert not torch.allclose(text[0], text[1], atol=1e-3)
    assert not torch.allclose(image[0], image[1], atol=1e-3)
    padded = {"input_ids": texts, "attention_mask": (torch.arange(30) > 2).long().expand(2, -1)}
    for type_name in ("cape", "rope", "relpos"):
        model = switched(build(name), {"type": type_name}, CAPE)
        expected, _ = embeddings(model, {**batch, **padded})
        torch.testing.assert_close(features(model, **padded), expected)
        assert not torch.allclose(features(model, input_ids=texts), expected, atol=1e-3)


@each
@pytest.mark.parametrize("type_name", ["cape", "rope", "fire"])
def test_an_inner_model_called_alone_is_the_one_in_the_whole_model(name, type_name):
    """Some programs call ``text_model`` and ``vision_model`` of a trained CLIP themselves."""
    images = CAPE if name == "siglip" else {"type": type_name}
    model, batch = switched(build(name), {"type": type_name}, images), inputs(24, 56, length=30)
    batch["attention_mask"] = (torch.arange(30) > 4).long().expand(2, -1)
    texts, pixels = ("input_ids", "attention_mask"), ("pixel_values",)
    for part, names in (("text_model", texts), ("vision_model", pixels)):
        inner_model, outputs = getattr(model, part), []
        handle = inner_model.register_forward_hook(lambda *call, seen=outputs: seen.append(call[2]))
        model(**batch)
        inner_model(**{argument: batch[argument] for argument in names})
        handle.remove()
        assert torch.equal(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    assert pickle.loads(pickle.dumps(model)).text_model(batch["input_ids"])[0].shape[1] == 30
    assert type(model.text_model).__name__ == type(build(name).text_model).__name__


@each
def test_texts_longer_than_the_table_begin_it_anew(name):
    text, _ = embeddings(switched(build(name)), batch := inputs(length=30))
    assert torch.isfinite(text).all()
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        build(name)(**batch)


def test_folders_copies_and_pickles(tmp_path):
    stock, batch = build(), inputs()
    model = switched(stock, {"type": "cape"}, CAPE)
    expected = model(**batch).logits_per_image
    model.save_pretrained(tmp_path / "switched")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "switched").eval()
    assert loaded.config.vision_position_embedding == model.config.vision_position_embedding
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(**batch).logits_per_image, expected)
    stock.save_pretrained(tmp_path / "stock")
    loaded = transformers.AutoModel.from_pretrained(
        tmp_path / "stock", position_embedding=STOCK, vision_position_embedding=STOCK
    )
    assert torch.equal(loaded.eval()(**batch).logits_per_image, stock(**batch).logits_per_image)


def test_switched_again():
    stock, batch = build(), inputs()
    model = switched(stock, {"type": "cape"}, CAPE)
    again = hf_models.switch(copy.deepcopy(model), STOCK, vision_position_embedding=CAPE)
    assert type(again.vision_model.embeddings) is type(model.vision_model.embeddings)
    text, images = embeddings(again, batch)
    assert torch.equal(images, embeddings(model, batch)[1])
    assert again.config.position_embedding["type"] == "abspos"
    assert not torch.allclose(text, embeddings(model, batch)[0], atol=1e-3)


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_a_setting_without_a_tower_is_refused(name):
    stock = getattr(transformers, f"{name}ForImageClassification")
    classifier = stock(build(name.lower()).config)
    with pytest.raises(ValueError, match=r"position_embedding='cape' has no effect.*'abspos'"):
        hf_models.switch(copy.deepcopy(classifier), {"type": "cape"})
    model = hf_models.switch(classifier, STOCK, vision_position_embedding=CAPE).train()
    logits = model(inputs()["pixel_values"]).logits
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_positions_of_images_alone_leave_the_texts_as_they_were(tmp_path):
    stock, batch = build(), inputs()
    stock.save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, vision_position_embedding=CAPE)
    assert model.config.position_embedding["type"] == "abspos"
    text, _ = embeddings(model.eval(), batch)
    assert torch.equal(text, embeddings(stock, batch)[0])


def test_an_error_names_the_field_of_the_images():
    with pytest.raises(ValueError, match="vision_position_embedding='cpe' is unknown"):
        hf_models.switch(build(), STOCK, vision_position_embedding={"type": "cpe"})


# ---- parts alone ---------------------------------------------------------------------------------

PARTS = ["ChineseCLIPTextModel", "SiglipTextModel", "Siglip2TextModel"]
for _tower in ("MetaClip2Text", "MetaClip2Vision", "ClapText"):
    PARTS += [f"{_tower}Model", f"{_tower}ModelWithProjection"]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_alone_is_switched_and_loaded_by_its_class(name, tmp_path):
    """A pipeline may have a part alone; no Auto class loads it. Texts are longer than the table,
    images larger than in training."""
    stock_class, is_text = getattr(transformers, name), "Text" in name
    stock = stock_class(stock_class.config_class(**SMALL, **(TEXT if is_text else IMAGE))).eval()
    main_input = "input_ids" if is_text else "pixel_values"
    batch, larger = inputs(length=8)[main_input], inputs(48, 40, length=30)[main_input]
    model = switched(stock)
    for ours, theirs in zip(model(batch).values(), stock(batch).values(), strict=True):
        assert torch.equal(ours, theirs)
    model = switched(stock, {"type": "cape", "max_global_shift": 3.0})
    stock.save_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "cape")
    expected = model(larger)[0]
    assert not torch.equal(model.train()(larger)[0], expected)
    model.eval()
    loaded = type(model).from_pretrained(tmp_path / "cape")
    assert torch.equal(loaded.eval()(larger)[0], expected)
    settings = model.config.position_embedding
    loaded = stock_class.from_pretrained(tmp_path / "stock", position_embedding=settings)
    assert type(loaded) is type(model)
    # only switch adds the table's row of the class token to that token
    assert not is_text or torch.equal(loaded.eval()(larger)[0], expected)
