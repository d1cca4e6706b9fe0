"""A new family: a tiny tagger and, in about 40 lines, the code that gives it any position
embedding. Settings, flags of the commands, errors, pictures and conversion then support the
family."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel
from transformers import PretrainedConfig as PreTrainedConfig
from transformers.modeling_outputs import TokenClassifierOutput

import hf_models
from cape_plugins import ENCODINGS, TYPES, token_positions
from cape_plugins.checkpoints.families import FAMILY_ROWS, Family, Side, add_family_row
from hf_models import convert
from hf_models.seams.tokens import TokenTable
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import PARTS, FamilyClasses, PositionHost, PositionSlot
from hf_models.switching.modeling import (
    PositionModelMixin,
    build_positions,
    draw_positions,
    embed_positions,
)
from tests.support.expected import EXPECTED


class TinyConfig(PreTrainedConfig):
    model_type = "tiny"
    vocab_size: int = 20
    d_model: int = 16
    tags: int = 3
    init_std: float = 0.1


class TinyTagger(PreTrainedModel):
    config_class = TinyConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(12, config.d_model)
        self.mix = nn.Linear(config.d_model, config.d_model)
        self.head = nn.Linear(config.d_model, config.tags)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        rows = self.embed_positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        hidden = self.mix(self.embed_tokens(input_ids) + rows).tanh()
        return TokenClassifierOutput(logits=self.head(hidden + hidden.mean(1, keepdim=True)))


# ---- the family ----------------------------------------------------------------------------------

SIDE = Side(domain="text", architecture="encoder", table="embed_positions.weight")
ROW = Family("tiny", {"encoder": SIDE}, "abspos")
add_family_row(ROW)


class CapeTinyConfig(PositionEmbeddingMixin, TinyConfig):
    model_type = "cape_tiny"
    position_embedding: dict | None = None


class CapeTinyTagger(PositionHost, PositionModelMixin, TinyTagger):
    config_class = CapeTinyConfig

    def install_positions(self, config, trained):
        self.positions = build_positions(config, "encoder", std=config.init_std)
        if self.positions.config.encoding.counts:
            self.positions.encoding = None  # the stock table has the rows
            self.embed_positions.__class__ = TokenTable
        else:
            self.embed_positions = PositionSlot()

    def forward(self, input_ids, attention_mask=None, draw=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        draw = draw_positions(self.positions, input_ids) if draw is None else draw
        raw = token_positions(mask.bool())
        if isinstance(self.embed_positions, TokenTable):
            rows = self.embed_positions.look_up(raw, len(input_ids))
        else:
            rows = embed_positions(self.positions, raw, draw, self.embed_tokens.weight)
        with self.embed_positions.using(rows):
            return super().forward(input_ids, attention_mask)


CLASSES = FamilyClasses(
    CapeTinyConfig, (CapeTinyTagger,), auto={AutoModelForTokenClassification: CapeTinyTagger}
)

# --------------------------------------------------------------------------------------------------

ADDING = [
    name
    for name, row in TYPES.items()
    if not (ENCODINGS[row.encoding].relative or ENCODINGS[row.encoding].in_attention)
]


@pytest.fixture(autouse=True)
def registered():
    """Registers the family, and takes it back for the tests of other files."""
    with contextlib.ExitStack() as restored:
        for registry in (hf_models.AUTO_CLASSES, hf_models.MODELS, PARTS, FAMILY_ROWS):
            restored.enter_context(mock.patch.dict(registry))
        FAMILY_ROWS["tiny"] = ROW
        hf_models.register_family(CLASSES)
        AutoConfig.register("tiny", TinyConfig, exist_ok=True)
        AutoModelForTokenClassification.register(TinyConfig, TinyTagger, exist_ok=True)
        yield


@pytest.fixture
def stock(tmp_path):
    model = TinyTagger(TinyConfig()).eval()
    model.save_pretrained(tmp_path / "stock")
    return model


TOKENS = torch.arange(10)[None] % 7


@pytest.mark.parametrize("name", ADDING)
def test_settings_choose_what_is_added(name, stock):
    expected = stock(TOKENS).logits
    model = hf_models.switch(stock, {"type": name})
    assert torch.equal(model(TOKENS).logits, expected) == (name == ROW.stock)
    model.train()
    drawn = not torch.equal(model(TOKENS).logits, model(TOKENS).logits)
    assert drawn == EXPECTED[name].random


def test_configuration_without_a_row_is_refused():
    with pytest.raises(ValueError, match=r"'cape_crow' of CapeCrowConfig.*add_family_row"):
        type("CapeCrowConfig", (CapeTinyConfig,), {"model_type": "cape_crow"})


def test_auto_classes_load_it_and_conversion_takes_it(stock, tmp_path, capsys):
    load = AutoModelForTokenClassification.from_pretrained
    model = load(tmp_path / "stock", position_embedding={"type": "cape"})
    assert type(model) is CapeTinyTagger
    model.save_pretrained(tmp_path / "own")
    again = load(tmp_path / "own").eval()
    assert torch.equal(again(TOKENS).logits, model.eval()(TOKENS).logits)
    command = [str(tmp_path / "stock"), str(tmp_path / "converted"), "--position-embedding", "cape"]
    assert convert.main([*command, "--position-max-global-shift", "3"]) == 0
    assert "'abspos' -> 'cape'" in capsys.readouterr().out
    assert load(tmp_path / "converted").config.position_embedding["max_global_shift"] == 3.0


@pytest.mark.parametrize(
    ("name", "reported"), [("abspos", {"embed_positions.weight"}), ("cape", set())]
)
def test_trained_table_that_a_new_one_replaces_is_reported(
    name, reported, stock, tmp_path, monkeypatch
):
    def rename(self, config, trained):
        self.positions = build_positions(config, "encoder", len(self.embed_positions.weight))
        self.embed_positions = PositionSlot()

    monkeypatch.setattr(CapeTinyTagger, "install_positions", rename)
    _, report = CapeTinyTagger.from_pretrained(
        tmp_path / "stock", position_embedding={"type": name}, output_loading_info=True
    )
    assert set(report["unexpected_keys"]) == reported


@pytest.mark.parametrize(
    ("bases", "reason"),
    [
        ((PositionModelMixin,), "PositionModelMixin, which is no stock class"),
        ((TinyTagger, PositionModelMixin), "PositionModelMixin, which is no stock class"),
        ((CapeTinyTagger,), "CapeTinyTagger, which is no stock class"),
        ((PositionHost, TinyTagger), r"install_positions from PositionHost.*Define it"),
    ],
)
def test_parts_that_take_no_place_are_refused(bases, reason):
    part = type("CapeOther", bases, {})
    with pytest.raises(ValueError, match=f"CapeOther .*{reason}"):
        FamilyClasses(CapeTinyConfig, (part,))


def test_switch_of_a_family_without_registered_classes_says_so(stock):
    with pytest.raises(ValueError, match="whose positions cannot be switched") as refusal:
        hf_models.switch(nn.Linear(1, 1), {"type": "cape"})
    assert "register_family" not in str(refusal.value)
    other = type("OtherTagger", (TinyTagger,), {})(TinyConfig())
    with pytest.raises(ValueError, match="OtherTagger .*CapeTinyTagger.*register_family"):
        hf_models.switch(other, {"type": "cape"})
    del PARTS[TinyTagger]
    with pytest.raises(ValueError, match=r"'tiny'.*hf_models\.register_family"):
        hf_models.switch(stock, {"type": "cape"})
