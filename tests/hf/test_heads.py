"""Heads of the families with rows: each family has all heads of its stock model type."""

import copy

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

import hf_models
from hf_models.checks.samples import Samples
from hf_models.checks.tiny import fill_zeros
from hf_models.families import FAMILIES as MODULES
from hf_models.switching.install import auto_models
from tests.support.hf import FAMILIES, FOUR_LAYERS, VARIANTS, loss, sentences, targets

PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
CLASSES = {"labels": torch.tensor([0, 1, 1])}
# without padding, whose tokens have other positions than in stock models
TEXT = sentences(lengths=(9, 9, 9))
TOKENS = {**TEXT, "labels": targets(3, 9)}
WRITTEN = {"input_ids": TEXT["input_ids"], "labels": TEXT["input_ids"].roll(-1, 1)}
CHOICES = {"input_ids": targets(6, 9).view(3, 2, 9), **CLASSES}
ENDS = {"start_positions": torch.tensor([0, 2, 1]), "end_positions": torch.tensor([3, 4, 2])}
HIDDEN = {"pixel_values": PIXELS, "bool_masked_pos": torch.arange(48).view(3, 16) % 3 == 0}
AREAS = torch.arange(3 * 32 * 32).view(3, 32, 32) % 5
# Family, settings beside the settings of the row, and inputs.
HEADS = {
    "BertForPreTraining": ("bert", {}, {**TOKENS, "next_sentence_label": CLASSES["labels"]}),
    "BertLMHeadModel": ("bert", {"is_decoder": True}, TOKENS),
    "BertForNextSentencePrediction": ("bert", {}, {**TEXT, **CLASSES}),
    "BertForMultipleChoice": ("bert", {}, CHOICES),
    "MarianForCausalLM": ("marian", {}, WRITTEN),
    "BartForCausalLM": ("bart", {}, WRITTEN),
    "BartForQuestionAnswering": ("bart", {}, {**TEXT, **ENDS}),
    "MBartForCausalLM": ("mbart", {}, WRITTEN),
    "MBartForQuestionAnswering": ("mbart", {}, {**TEXT, **ENDS}),
    "PegasusForCausalLM": ("pegasus", {}, WRITTEN),
    "ViTForMaskedImageModeling": ("vit", {"encoder_stride": 8}, HIDDEN),
    "DeiTForMaskedImageModeling": ("deit", {"encoder_stride": 8}, HIDDEN),
    "BeitForMaskedImageModeling": (
        "beit", {"vocab_size": 7, "use_mask_token": True}, {**HIDDEN, "labels": AREAS[0, 0, :16]}
    ),
    "BeitForSemanticSegmentation": ("beit", FOUR_LAYERS, {"pixel_values": PIXELS, "labels": AREAS}),
}  # fmt: skip
# The main position embedding of Whisper belongs to an encoder that this head lacks.
REFUSED = ("WhisperForCausalLM",)
each = pytest.mark.parametrize("name", HEADS)


def build(name, **more):
    """A stock model in evaluation mode."""
    family, fields, _ = HEADS[name]
    row, config = FAMILIES[family], CONFIG_MAPPING[family]
    sizes = {**row.sizes, **row.noise}
    torch.manual_seed(1)
    config = config(**{**sizes, "attn_implementation": "eager", **fields, **more})
    return fill_zeros(getattr(transformers, name)(config).eval())


def switched(name, stock, type_name=None):
    """A copy with another position embedding, or with the position embedding of the stock model."""
    family, stock = HEADS[name][0], copy.deepcopy(stock)
    settings = VARIANTS[family][type_name] if type_name else {"type": FAMILIES[family].stock_type}
    return hf_models.switch(stock, settings)


def outputs(model, inputs):
    """All tensors that a forward in evaluation mode gives."""
    with torch.no_grad():
        found = model.eval()(**inputs)
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("family", MODULES, ids=lambda family: family.model_type)
def test_auto_classes_find_every_head_of_the_stock_model_type(family):
    for model_type in family.config.model_types()[1:]:
        found = auto_models(family.config)
        stock = auto_models(CONFIG_MAPPING[model_type])
        stock = {auto: head for auto, head in stock.items() if head.__name__ not in REFUSED}
        assert stock
        assert {auto: head.__bases__[-1] for auto, head in found.items()} == stock


@each
def test_stock_type_equals_the_stock_model_bit_for_bit(name):
    """Outputs and parameters after a training step, also with dropout."""
    stock, inputs = build(name), HEADS[name][2]
    models = (stock, switched(name, stock))
    for model in models:
        torch.manual_seed(3)
        loss(model.train()(**inputs)).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    expected, found = (outputs(model, inputs) for model in models)
    assert found.keys() == expected.keys()
    for key in expected:
        assert torch.equal(found[key], expected[key]), key
    theirs = dict(stock.named_parameters())
    for path, parameter in models[1].named_parameters():
        assert torch.equal(parameter, theirs[path]), path


@each
def test_heads_draw_in_training_and_load_by_their_auto_class(name, tmp_path):
    row, inputs = FAMILIES[HEADS[name][0]], HEADS[name][2]
    no_dropout = dict.fromkeys(row.noise, 0.0)
    model = switched(name, build(name, **no_dropout), "cape").train()
    losses = [loss(model(**inputs)) for _ in range(2)]
    assert not torch.equal(*losses)
    losses[1].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.save_pretrained(tmp_path)
    heads = auto_models(model.config_class)
    # no Auto class loads the stock model for masked images of BEiT
    auto = next((auto for auto, head in heads.items() if head is type(model)), type(model))
    options = {"output_loading_info": True, "attn_implementation": "eager"}
    again, report = auto.from_pretrained(tmp_path, **options)
    assert not any(report.values())
    assert type(again) is type(model)
    expected, found = (outputs(each_model, inputs) for each_model in (model, again))
    for key in expected:  # a loaded stock segmenter, too, rounds in another way
        torch.testing.assert_close(found[key], expected[key], atol=1e-3, rtol=1e-5)


@each
def test_trainer_is_told_whether_the_loss_counts_items(name):
    """Else it would multiply the loss by the number of accumulated batches."""
    model, inputs = switched(name, build(name)), HEADS[name][2]
    few, default = (loss(model(**inputs, **n)) for n in ({"num_items_in_batch": 1}, {}))
    assert model.accepts_loss_kwargs == (not torch.equal(few, default))


@pytest.mark.parametrize("name", ["BertLMHeadModel", "MarianForCausalLM", "BertForMultipleChoice"])
def test_decoders_alone_and_choices_pass_the_check_of_a_family(name):
    """Each step of generation too, with caches and padding."""
    rows = [{"input_ids": CHOICES["input_ids"][n : n + 1]} for n in range(2)]
    inputs = Samples(rows, {}) if HEADS[name][2] is CHOICES else None
    checks = hf_models.check_family(build(name), inputs=inputs)
    assert any("generation" in check.name for check in checks) == (inputs is None)
    assert [check.name for check in checks if check.failed] == []
