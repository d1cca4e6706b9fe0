"""Models of every class are copied, pickled, saved whole and averaged; their settings stay what the
model was built with."""

import copy
import json
import pickle
from itertools import chain

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import hf_models
from hf_models.checks.tiny import fill_zeros
from tests.support import whisper
from tests.support.hf import EOS, FAMILIES, OF_FAMILY, SIZES_OF_HEADS, STACKS, make


def build(name):
    """A tiny model of a class, with the type cape and relative attention where it can have both."""
    model = hf_models.MODELS[name]
    family = model.config_class.model_type.removeprefix("cape_")
    if family == "whisper":
        sizes, settings = whisper.SIZES, {"type": "cape"}
    else:
        sizes, types = FAMILIES[family].sizes, OF_FAMILY[family]
        relative = family in STACKS and "cape+relative" in types
        settings = types["cape+relative" if relative else "cape"]
    torch.manual_seed(0)
    sizes = {**sizes, **SIZES_OF_HEADS.get(name, {})}
    config = model.config_class(**sizes, position_embedding=settings)
    return fill_zeros(model(config).eval())


def states(model):
    """All states of an evaluation, in the order of the output."""
    config, name = model.config, model.main_input_name
    number = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 9, (2, 6), generator=number)
    tokens[:, -1] = EOS  # the classifiers of BART read this state
    if name == "input_ids":
        has_choices = type(model).__name__.endswith("MultipleChoice")
        inputs = {name: tokens[:, None] if has_choices else tokens}
    else:
        frames = (2, 8, 40) if config.model_type == "cape_whisper" else (2, 40, 8)
        shape = (2, 3, 24, 24) if name == "pixel_values" else frames
        inputs = {name: torch.randn(shape, generator=number)}
    if config.is_encoder_decoder and "Classification" not in type(model).__name__:
        inputs["decoder_input_ids"] = tokens
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    values = (value if isinstance(value, tuple) else (value,) for value in output.to_tuple())
    return [value for value in chain(*values) if isinstance(value, torch.Tensor)]


def saved(model, folder):
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


def loaded(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder)


COPIES = {
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "torch.save": saved,
    "average": lambda model, folder: AveragedModel(model).module,
    "from_pretrained": loaded,
}
# transformers gives backbones hooks when it builds them
UNPICKLED = ("deepcopy", "average")


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_copies_compute_and_hold_what_the_model_does(name, tmp_path):
    model = build(name)
    # before states are asked for, whose hooks no stock model pickles
    ways = UNPICKLED if name.endswith("Backbone") else ("torch.save", *UNPICKLED)
    copies = {way: COPIES[way](model, tmp_path) for way in ways}
    expected = states(model)
    for way, again in copies.items():
        actual = states(again)
        assert type(again) is type(model)
        assert len(actual) == len(expected) > 0, way
        assert all(map(torch.equal, actual, expected)), way
        with pytest.raises(ValueError, match="a model was built from this configuration"):
            again.config.position_embedding = {"type": "nopos"}


@pytest.mark.parametrize("way", COPIES)
def test_settings_of_a_copied_or_loaded_model_are_read_only(way, tmp_path):
    """Otherwise a changed setting would be saved, but not computed with."""
    model = COPIES[way](make("marian", "nopos"), tmp_path)
    settings = model.config.position_embedding
    changes = (
        lambda: settings.__setitem__("source_scale", 2.0),
        lambda: settings.update(type="cape"),
        lambda: settings.pop("type"),
        lambda: settings.setdefault("gamma", 2.0),
        lambda: settings.__ior__({"type": "cape"}),
        settings.clear,
    )
    for change in changes:
        with pytest.raises(ValueError, match="cannot be changed one by one"):
            change()
    assert settings == {"type": "nopos"}


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_settings_of_a_copied_configuration_are_written_and_compared_as_dicts(copied, tmp_path):
    config = FAMILIES["speech_to_text"].config(position_embedding={"type": "cape"})
    again = copied(config)
    assert again == config
    assert json.loads(again.to_json_string()) == json.loads(config.to_json_string())
    for field in config.position_fields:
        assert type(again.to_dict()[field]) is dict
        assert getattr(again, field) == dict(getattr(config, field))
        with pytest.raises(ValueError, match="cannot be changed one by one"):
            getattr(again, field)["type"] = "nopos"
    again.position_embedding = {"type": "nopos"}  # as a whole it may change
    assert config.position_embedding["type"] == "cape"


@pytest.mark.parametrize(
    "family", [name for name, row in FAMILIES.items() if len(row.config.position_fields) > 1]
)
def test_a_configuration_without_the_fields_of_a_side_is_copied(family):
    """transformers takes these away from a copy, and copies that, to size a cache."""
    config = FAMILIES[family].config(position_embedding={"type": "cape"})
    text_config = copy.deepcopy(config.get_text_config(decoder=True))
    assert text_config.position_embedding["type"] == "cape"
