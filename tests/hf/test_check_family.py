"""check_family finds no difference in correct families, and names the faults of broken families."""

import inspect

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, RobertaConfig, RobertaForMaskedLM, RobertaModel
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

import hf_models
from cape_plugins.checkpoints.families import FAMILY_ROWS, Family, Side, add_family_row
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.checks.tiny import tiny_model, tiny_sizes
from hf_models.doctor import head_of
from hf_models.seams import attention as relative
from hf_models.seams import text, tokens
from hf_models.seams.images import PatchEmbeddings
from hf_models.seams.rotary import RotaryAngles
from hf_models.seams.text import TranslationModel
from hf_models.seams.tokens import TokenEmbeddings, TokenModel
from hf_models.switching import install as switching
from hf_models.switching.configuration import PositionEmbeddingMixin
from hf_models.switching.install import PARTS, FamilyClasses, LearnedTable
from hf_models.switching.modeling import PositionModelMixin
from tests.support.core import with_a_draw_in_evaluation

# the doctor's choice of each family
CHOSEN = [head_of(config) for config in hf_models.AUTO_CLASSES if head_of(config)]


def failed(model, position_embedding=None):
    """Names of the checks that failed."""
    return [row.name for row in hf_models.check_family(model, position_embedding) if row.failed]


@pytest.mark.parametrize("stock", CHOSEN, ids=lambda stock: stock.__name__)
def test_registered_families_pass(stock):
    rows = hf_models.check_family(tiny_model(stock))
    assert [row for row in rows if row.failed] == []
    assert sum(row.status == "ok" for row in rows) >= 10


def test_the_model_and_the_random_numbers_of_the_caller_stay():
    model = tiny_model(transformers.BertForMaskedLM).half().train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    assert failed(model) == []
    assert torch.equal(before, torch.get_rng_state())
    assert type(model) is transformers.BertForMaskedLM
    assert model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


def test_a_model_of_no_family_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match=r"stock_model is a Linear.*Register.*MarianMTModel"):
        hf_models.check_family(torch.nn.Linear(1, 1))
    switched = hf_models.switch(tiny_model(transformers.BertModel), {"type": "cape"})
    with pytest.raises(ValueError, match="stock_model is a CapeBertModel"):
        hf_models.check_family(switched)


# ---- a family that was copied from a neighbour ---------------------------------------------------


@pytest.fixture
def registry():
    """Takes back what a test registers."""
    configs = CONFIG_MAPPING._extra_content
    tables = hf_models.AUTO_CLASSES, hf_models.MODELS, PARTS, FAMILY_ROWS, configs
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def test_a_table_with_rows_before_the_first_position_is_found_by_its_logits(registry, monkeypatch):
    """RoBERTa as bert.py has it; its table begins with two rows before the first position."""
    monkeypatch.delitem(GENERATED, "roberta")
    table = Side(
        domain="text", architecture="encoder", dim="hidden_size", table="position_embeddings.weight"
    )
    add_family_row(Family("roberta", {"encoder": table}, "abspos"))

    class CapeRobertaConfig(PositionEmbeddingMixin, RobertaConfig):
        model_type = "cape_roberta"
        position_embedding: dict | None = None

    class CapeRobertaEmbeddings(TokenEmbeddings, RobertaEmbeddings):
        pass

    class CapeRobertaModel(TokenModel, PositionModelMixin, RobertaModel):
        pass

    class CapeRobertaForMaskedLM(PositionModelMixin, RobertaForMaskedLM):
        pass

    parts = (CapeRobertaEmbeddings, CapeRobertaModel, CapeRobertaForMaskedLM)
    hf_models.register_family(FamilyClasses(CapeRobertaConfig, parts))
    rows = hf_models.check_family(tiny_model(RobertaForMaskedLM))
    wrong = {row.name: row.text for row in rows if row.failed}
    assert "relative difference" in wrong["logits"]
    # what needs no stock model to compare with is right
    assert not any(name.startswith(("cape", "relpos", "saved", "switch")) for name in wrong)


# ---- adapters that are broken in one way ---------------------------------------------------------


def without_mask(monkeypatch):
    def valid_tokens(self, mask, ids, content, length):
        return content.new_ones((content.shape[0], length), dtype=torch.bool)

    monkeypatch.setattr(text.TextStack, "valid_tokens", valid_tokens)


def with_another_row(monkeypatch):
    look_up = LearnedTable.look_up

    def wrong(self, positions, batch_size):
        self.offset += 1
        try:
            return look_up(self, positions, batch_size)
        finally:
            self.offset -= 1

    monkeypatch.setattr(LearnedTable, "look_up", wrong)


def without_query_offset(monkeypatch):
    monkeypatch.setattr(relative, "cached_tokens", lambda *_: 0)


def without_a_draw_in_training(monkeypatch):
    monkeypatch.setattr(tokens, "draw_positions", lambda *_: None)


def with_a_weight_that_is_not_saved(monkeypatch):
    save = PositionModelMixin.save_pretrained

    def without(self, folder):
        weights = self.state_dict()
        del weights["model.encoder.layers.0.fc1.weight"]
        save(self, folder, state_dict=weights)

    monkeypatch.setattr(PositionModelMixin, "save_pretrained", without)


def without_recorded_states(monkeypatch):
    def record_nothing(module):  # the next model that is switched is recorded anew
        dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), {})

    monkeypatch.setattr(switching, "record_outputs", record_nothing)


CACHED = [
    f"{name}: cached steps against one forward" for name in ("greedy generation", "beam search")
]


@pytest.mark.parametrize(
    ("breaks", "stock", "wrong"),
    [
        (
            [with_a_draw_in_evaluation],
            "BertForMaskedLM",
            ["cape: evaluation draws no random numbers"],
        ),
        ([without_a_draw_in_training], "BertForMaskedLM", ["cape: training draws positions"]),
        (
            [
                without_mask,
                without_query_offset,
                without_recorded_states,
                with_a_weight_that_is_not_saved,
            ],
            "MarianMTModel",
            [
                "padding on the left",
                "cape: padding on the left",
                *(f"relpos: {name}" for name in CACHED),
                "hidden states and attentions",
                "saved and loaded by AutoModelForSeq2SeqLM",
            ],
        ),
    ],
)
def test_a_broken_adapter_is_named_by_the_right_check(breaks, stock, wrong, monkeypatch):
    model = tiny_model(getattr(transformers, stock))
    for break_one in breaks:
        break_one(monkeypatch)
    assert {*wrong} <= {*failed(model)}


# ---- adapters that one check alone sees ----------------------------------------------------------


def with_changed_inputs(monkeypatch, part, change):
    """A forward of ours whose arguments, by their names, are changed before it runs."""
    forward = part.forward

    def wrong(self, *args, **kwargs):
        named = inspect.signature(forward).bind(self, *args, **kwargs)
        change(named.arguments)
        return forward(*named.args, **named.kwargs)

    monkeypatch.setattr(part, "forward", wrong)


def without_token_types(monkeypatch):
    part = TokenEmbeddings
    with_changed_inputs(monkeypatch, part, lambda inputs: inputs.pop("token_type_ids", None))


def without_position_ids(monkeypatch):
    part = TokenEmbeddings
    with_changed_inputs(monkeypatch, part, lambda inputs: inputs.pop("position_ids", None))
    monkeypatch.setattr(
        RotaryAngles, "adapt_call", lambda self, model, call: call.pop("position_ids", None)
    )


def with_rows_for_columns(monkeypatch):
    positions = PatchEmbeddings.interpolate_pos_encoding

    def wrong(self, embeddings, height, width):
        return positions(self, embeddings, width, height)

    monkeypatch.setattr(PatchEmbeddings, "interpolate_pos_encoding", wrong)


def without_static_past(monkeypatch):
    count = text.cached_tokens

    def wrong(cache):
        return 0 if cache is None or cache.is_compileable else count(cache)

    monkeypatch.setattr(text, "cached_tokens", wrong)


def without_mask_of_encoded_sources(monkeypatch):
    def drop(inputs):
        if inputs.get("encoder_outputs") is not None:
            inputs["attention_mask"] = None

    with_changed_inputs(monkeypatch, TranslationModel, drop)


def with_another_loss(monkeypatch):
    forward = PARTS[transformers.BertForMaskedLM].forward

    def wrong(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output

    monkeypatch.setattr(PARTS[transformers.BertForMaskedLM], "forward", wrong)


STATIC = "greedy generation with a static cache"


@pytest.mark.parametrize(
    ("breaks", "stock", "wrong"),
    [
        (without_token_types, "BertForMaskedLM", "token types"),
        (without_position_ids, "BertForMaskedLM", "positions of the caller"),
        (without_position_ids, "LlamaForCausalLM", "positions of the caller"),
        (with_rows_for_columns, "ViTForImageClassification", "image of another shape"),
        (without_static_past, "MarianMTModel", STATIC),
        (without_mask_of_encoded_sources, "MarianMTModel", "generation from a batch padded"),
        (with_another_loss, "BertForMaskedLM", "loss"),
    ],
)
def test_what_one_check_alone_sees_is_named_by_it(breaks, stock, wrong, monkeypatch):
    model = tiny_model(getattr(transformers, stock))
    breaks(monkeypatch)
    names = failed(model)
    assert names
    assert [name for name in names if wrong not in name] == []


# ---- what the stock model cannot do itself -------------------------------------------------------


def with_a_table_of(rows):
    """A tiny BERT, whose stock table is too small for some samples."""
    sizes = {**tiny_sizes(transformers.BertConfig), "max_position_embeddings": rows}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()


def test_what_the_stock_model_fails_as_well_is_no_difference():
    rows = hf_models.check_family(with_a_table_of(5))
    assert [row for row in rows if row.failed] == []
    excused = [row for row in rows if row.text.startswith("the stock model fails it, too: ")]
    assert excused
    assert all(row.status == "skip" for row in excused)
    assert "ok" in [row.status for row in rows if row.name == "logits"]


def test_the_check_of_what_the_stock_model_can_do_stays(monkeypatch):
    with_another_row(monkeypatch)
    assert "logits" in failed(with_a_table_of(5))
