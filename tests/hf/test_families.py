"""Properties of each family of models of transformers: stock checkpoints load, and checkpoints can
be converted back."""

import inspect
import logging

import pytest
import torch

import hf_models
from cape_plugins import TYPES
from cape_plugins.settings.registry import ROTARY, ROTARY_TYPES, types_of
from hf_models.convert import convert
from hf_models.families import FAMILIES as MODULES
from hf_models.families import composed
from hf_models.switching.install import is_model
from tests.support.hf import FAMILIES, VARIANTS, WITH_STOCK, answer, batch

OWN_TESTS = {"cape_whisper": "tests/hf/test_whisper.py"}  # takes inputs of a fixed length
MODELS = [
    part
    for classes in MODULES
    for part in classes.parts
    if is_model(part) and classes.model_type not in OWN_TESTS
]


def stock_batch(family):
    """Inputs that the stock model takes: without padding, images of the size of its table."""
    inputs = batch(family)
    inputs.pop("attention_mask", None)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].repeat(1, 1, 2, 1)[..., :32, :32]
    return inputs


def output(model, inputs):
    with torch.no_grad():
        return answer(model.eval()(**inputs))


@pytest.mark.parametrize("family", WITH_STOCK)
def test_converted_to_its_own_type_and_back_a_checkpoint_is_what_it_was(family, tmp_path):
    row, inputs = FAMILIES[family], stock_batch(family)
    stock = row.build_stock(seed=1, attn_implementation="eager")
    if generates := stock.can_generate():
        stock.generation_config.num_beams = 3
    stock.save_pretrained(tmp_path / "stock")
    settings = stock.config.to_dict()  # a call with labels would add to them
    convert(str(tmp_path / "stock"), tmp_path / "cape", {"type": row.stock_type})
    ours = row.auto.from_pretrained(tmp_path / "cape", attn_implementation="eager")
    assert type(ours) is row.model
    assert torch.equal(output(ours, inputs), output(stock, inputs))
    convert(str(tmp_path / "cape"), tmp_path / "back", None)
    back, report = row.stock_model.from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    assert not generates or back.generation_config.num_beams == 3
    loading = {"_name_or_path": None, "transformers_version": None, "dtype": None}
    for saved in (settings, again := back.config.to_dict()):
        saved |= loading
        for part in filter(lambda value: isinstance(value, dict), saved.values()):
            part |= loading
    assert again == settings
    for name, value in stock.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@pytest.mark.parametrize("family", WITH_STOCK)
def test_every_type_is_taken_or_refused_with_the_reason(family):
    row = FAMILIES[family]
    domain, architecture = next(iter(row.config.position_fields.values()))
    for name in {**TYPES, **ROTARY_TYPES}:
        if name in types_of(architecture, domain):
            settings = VARIANTS[family].get(name, {"type": name})
            assert row.config(position_embedding=settings).position_config.type == name
        else:
            reason = "turns queries and keys.*allowed: nopos, rope, cape"
            if name in types_of(architecture):
                reason = "sorts the positions of a sequence.*allowed: nopos, sinpos"
            elif architecture != ROTARY:
                reason = "needs a model that turns queries and keys.*allowed: nopos, sinpos"
            with pytest.raises(ValueError, match=f"'{name}'.*{reason}"):
                row.config(position_embedding={"type": name})


# settings without which a stock head warns or is refused
OF_HEADS = {
    "BertLMHeadModel": {"is_decoder": True},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_model_takes_a_stock_checkpoint_without_a_word(model, tmp_path, caplog, monkeypatch):
    """The result equals the model that `switch` makes of the stock model."""
    rows = [row for row in FAMILIES.values() if row.config is model.config_class]
    assert rows, f"{model.config_class.model_type} has no row in tests/support/hf.py FAMILIES"
    (row,) = rows
    if row.stock_model is None:
        pytest.skip("transformers has no such model")
    stock_class = model.__bases__[-1]
    torch.manual_seed(1)
    sizes = {**row.sizes, **OF_HEADS.get(stock_class.__name__, {})}
    stock_class(row.stock_config(**sizes)).save_pretrained(tmp_path)
    settings = {"type": row.stock_type}
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    ours, report = model.from_pretrained(
        tmp_path, position_embedding=settings, output_loading_info=True
    )
    assert not any(report.values())
    # stock SigLIP warns of the token ids in its default configuration, too
    messages = [record.getMessage() for record in caplog.records]
    assert [text for text in messages if not text.startswith("Model config: ")] == []
    switched = hf_models.switch(stock_class.from_pretrained(tmp_path), settings)
    assert type(switched) is model
    assert switched.state_dict().keys() == ours.state_dict().keys()
    for name, value in switched.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_name_of_no_row_is_refused():
    assert composed.CapeBertModel is hf_models.CapeBertModel
    with pytest.raises(AttributeError, match=r"'hf_models\.families\.composed'.*'CapeBertTower'"):
        _ = composed.CapeBertTower


def test_a_subclass_of_a_user_keeps_the_arguments_of_frames():
    """The Trainer drops columns of the data that the signature lacks."""
    stock = hf_models.CapeSpeech2TextForConditionalGeneration
    subclass = type("Mine", (stock,), {})
    assert "hop_nanoseconds" in inspect.signature(stock.forward).parameters
    assert subclass.forward is stock.forward
