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


def fault(owner, name, wrong):
    """What puts `wrong(right)` in the place of `owner.name`."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))


def not_saved(save):
    def without(self, folder):
        weights = self.state_dict()
        del weights["model.encoder.layers.0.fc1.weight"]
        save(self, folder, state_dict=weights)

    return without


def all_valid(valid_tokens):
    return lambda self, mask, ids, content, length: torch.ones(len(content), length).bool()


def unrecorded(record):  # the next model that is switched is recorded anew
    return lambda module: dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(module)), {})


without_a_draw_in_training = fault(tokens, "draw_positions", lambda right: lambda *_: None)
FAULTS_OF_MARIAN = [
    fault(text.TextStack, "valid_tokens", all_valid),
    fault(relative, "cached_tokens", lambda right: lambda *_: 0),
    fault(switching, "record_outputs", unrecorded),
    fault(PositionModelMixin, "save_pretrained", not_saved),
]
BERT, MARIAN, VIT = "BertForMaskedLM", "MarianMTModel", "ViTForImageClassification"


@pytest.mark.parametrize(
    ("breaks", "stock", "wrong"),
    [
        ([with_a_draw_in_evaluation], BERT, ["cape: evaluation draws no random numbers"]),
        ([without_a_draw_in_training], BERT, ["cape: training draws positions"]),
        (
            FAULTS_OF_MARIAN,
            MARIAN,
            [
                "padding on the left",
                "cape: padding on the left",
                "hidden states and attentions",
                "relpos: greedy generation: cached steps against one forward",
                "relpos: beam search: cached steps against one forward",
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


def changed_inputs(part, change):
    """A fault: what a forward of ours gets, by the names of its arguments, is changed before."""

    def wrong(forward):
        def changed(self, *args, **kwargs):
            named = inspect.signature(forward).bind(self, *args, **kwargs)
            change(named.arguments)
            return forward(*named.args, **named.kwargs)

        return changed

    return fault(part, "forward", wrong)


def without(name):
    return changed_inputs(TokenEmbeddings, lambda inputs: inputs.pop(name, None))


def no_position_ids(right):
    return lambda self, model, call: call.pop("position_ids", None)


def swapped(positions):
    return lambda self, embeddings, height, width: positions(self, embeddings, width, height)


def no_static_past(count):
    return lambda cache: 0 if cache is None or cache.is_compileable else count(cache)


def drop_source_mask(inputs):
    if inputs.get("encoder_outputs") is not None:
        inputs["attention_mask"] = None


def another_loss(forward):
    def wrong(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if output.loss is not None:
            output.loss = 2 * output.loss
        return output

    return wrong


@pytest.mark.parametrize(
    ("breaks", "stock", "wrong"),
    [
        (without("token_type_ids"), BERT, "token types"),
        (without("position_ids"), BERT, "positions of the caller"),
        (fault(RotaryAngles, "adapt_call", no_position_ids), "LlamaForCausalLM", "of the caller"),
        (fault(PatchEmbeddings, "interpolate_pos_encoding", swapped), VIT, "of another shape"),
        (fault(text, "cached_tokens", no_static_past), MARIAN, "generation with a static cache"),
        (changed_inputs(TranslationModel, drop_source_mask), MARIAN, "from a batch padded"),
        (fault(PARTS[transformers.BertForMaskedLM], "forward", another_loss), BERT, "loss"),
    ],
)
def test_what_one_check_alone_sees_is_named_by_it(breaks, stock, wrong, monkeypatch):
    model = tiny_model(getattr(transformers, stock))
    breaks(monkeypatch)
    names = failed(model)
    assert names
    assert [name for name in names if wrong not in name] == []


def small_table():
    """A tiny BERT, whose stock table is too small for some samples."""
    sizes = {**tiny_sizes(transformers.BertConfig), "max_position_embeddings": 5}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()


def test_what_the_stock_model_fails_as_well_is_no_difference():
    rows = hf_models.check_family(small_table())
    assert [row for row in rows if row.failed] == []
    excused = [row for row in rows if row.text.startswith("the stock model fails it, too: ")]
    assert excused
    assert all(row.status == "skip" for row in excused)
    assert "ok" in [row.status for row in rows if row.name == "logits"]


def test_the_check_of_what_the_stock_model_can_do_stays(monkeypatch):
    look_up = LearnedTable.look_up

    def another_row(self, positions, batch_size):
        self.offset += 1
        try:
            return look_up(self, positions, batch_size)
        finally:
            self.offset -= 1

    monkeypatch.setattr(LearnedTable, "look_up", another_row)
    assert "logits" in failed(small_table())
