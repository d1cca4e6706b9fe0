"""The proof of a generated family finds each kind of fault that is put into it."""

import contextlib
import functools

import pytest
import torch
from transformers import MixtralForCausalLM

from cape_plugins.checkpoints.generated import GENERATED
from hf_models.checks import stock_models
from hf_models.checks.calls import LENGTH, calls_of, padded
from hf_models.checks.proof import STOCK_MODEL, prove
from hf_models.checks.stock_models import NoModelType, NoStockModel, tiny_stock_models
from hf_models.checks.without_seam import REASONS
from hf_models.generated.families import class_of_name, make
from hf_models.seams.rotary import RotaryAngles
from hf_models.switching.install import PARTS
from tests.support.generated import without_row

TYPE = "mistral"


@contextlib.contextmanager
def fault(monkeypatch, owner, name, wrong):
    """`owner.name` is `wrong(right)` while the body runs."""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong(getattr(owner, name)))
        yield


def test_a_right_family_shows_everything():
    proof = prove(TYPE)
    assert proof.is_proved
    assert not proof.is_new
    assert {row.status for row in proof.checks} == {"ok"}
    names = " ".join(row.name for row in proof.checks)
    for part in ("outputs", "left", "right", "packed", "generation", "updates", "saved"):
        assert part in names
    assert "copied" in names
    assert "pickled" in names


def shifted(right):
    """Counts twice the distance."""
    return lambda self, x, position_ids, *args, **kwargs: right(
        self, x, 2 * position_ids, *args, **kwargs
    )


def still(right):
    """Draws nothing."""
    return lambda self, scope, x, position_ids: position_ids


def always(right):
    """Draws in evaluation as well."""

    def moved(self, scope, x, position_ids):
        return position_ids + torch.rand(len(x), 1)

    return moved


def constant(right):
    """Positions do not matter, whatever they are."""
    return lambda self, x, position_ids, *args, **kwargs: right(
        self, x, torch.zeros_like(position_ids), *args, **kwargs
    )


@pytest.mark.parametrize(
    ("name", "wrong", "found"),
    [
        ("forward", shifted, "outputs"),
        ("forward", constant, "outputs"),
        ("_moved", still, "cape: training draws positions"),
        ("_moved", always, "cape: evaluation draws nothing"),
    ],
)
def test_a_wrong_seam_is_found(name, wrong, found, monkeypatch):
    with fault(monkeypatch, RotaryAngles, name, wrong):
        proof = prove(TYPE)
    assert not proof.is_proved
    assert found in {row.name for row in proof.checks if row.failed}


def test_a_model_that_saves_another_position_embedding_is_found(monkeypatch):
    def nopos(right):
        return lambda self: {**right(self), "position_embedding": {"type": "nopos"}}

    with fault(monkeypatch, make(TYPE).config, "to_dict", nopos):
        failed = {row.name for row in prove(TYPE).checks if row.failed}
    assert {name.partition(" by ")[0] for name in failed} == {"saved and loaded"}


def test_a_part_that_has_no_positions_if_called_alone_is_found(monkeypatch):
    monkeypatch.setattr("hf_models.generated.model._open_scopes_alone", lambda model: None)
    failed = {row.name for row in prove("metaclip_2").checks if row.failed}
    assert failed == {f"{name}: inner models alone" for name in ("rope", "alibi")}


def test_a_gradient_that_is_wrong_is_found_by_the_updates(monkeypatch):
    cape_class = class_of_name("CapeMistralForCausalLM")

    def detached(right):
        def forward(self, *args, **kwargs):
            output = right(self, *args, **kwargs)
            output.logits = output.logits.detach() + output.logits * 0
            return output

        return forward

    with fault(monkeypatch, cape_class, "forward", detached):
        failed = {row.name for row in prove(TYPE).checks if row.failed}
    assert "3 updates" in failed
    assert "outputs" not in failed


def test_packed_texts_that_see_each_other_are_found(monkeypatch):
    """With a mask of one text, transformers takes positions from 0 on for no border."""
    cape_class = class_of_name("CapeMistralForCausalLM")

    def masked(right):
        @functools.wraps(right)
        def forward(self, input_ids=None, **kwargs):
            kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
            return right(self, input_ids=input_ids, **kwargs)

        return forward

    with fault(monkeypatch, cape_class, "forward", masked):
        failed = [row.name for row in prove(TYPE).checks if row.failed]
    assert failed == ["packed texts", "cape: packed texts"]


def test_packed_texts_are_skipped_where_stock_texts_see_each_other():
    stock = {c.name: c.text for c in prove("modernbert").checks}
    assert stock["packed texts"] == "packed texts see each other in the stock model"
    assert stock["cape: packed texts"].startswith("relative difference")  # rows may keep borders
    text = {c.name: c.text for c in prove("roberta").checks}["cape: packed texts"]
    assert text == "packed texts see each other, as in the stock model"


def test_gradients_that_checkpointing_changes_are_found(monkeypatch):
    def doubled(right):
        def enable(self):
            right(self)
            self.get_input_embeddings().weight.data.mul_(2)

        return enable

    cape_class = class_of_name("CapeMistralForCausalLM")
    with fault(monkeypatch, cape_class, "gradient_checkpointing_enable", doubled):
        failed = [row.name for row in prove(TYPE).checks if row.failed]
    assert failed == ["cape: gradient checkpointing"]


@pytest.fixture
def row():
    """The row of Mixtral, which the table lacks in the test."""
    with without_row("mixtral") as row:
        yield row


def test_a_type_without_a_row_is_proved_with_the_row_of_another(row):
    proof = prove("mixtral")
    assert proof.is_proved
    assert proof.is_new
    assert proof.row == row


def test_a_type_that_fails_with_each_row_leaves_nothing_behind(row, monkeypatch):
    with fault(monkeypatch, RotaryAngles, "forward", shifted):
        proof = prove("mixtral")
    assert proof.failure.name == "outputs"
    assert "mixtral" not in GENERATED
    assert MixtralForCausalLM not in PARTS


def test_a_type_without_a_seam_is_told_in_plain_words():
    proof = prove("wav2vec2")
    assert not proof.is_proved
    assert [row.text for row in proof.checks] == [REASONS["wav2vec2"]]
    assert "wav2vec2" not in GENERATED


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError, match="'mistrl' is no model type of the installed transformers"):
        prove("mistrl")


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen2_vl", {"input_ids"}),
        ("bart", {"input_ids", "decoder_input_ids"}),
        ("layoutlmv3", {"input_ids", "bbox"}),
        ("audio-spectrogram-transformer", {"input_values"}),
        ("videomae", {"pixel_values"}),
        ("time_series_transformer", {"past_values", "future_values"}),
    ],
)
def test_a_tiny_model_of_any_kind_runs_with_inputs_of_its_kind(model_type, names):
    stock = next(tiny_stock_models(model_type))
    assert names <= stock.inputs.keys()
    assert sum(parameter.numel() for parameter in stock.model.parameters()) < 3_000_000
    for name, table in stock.model.named_parameters():
        assert table.dim() < 2 or table.any() or name.endswith("bias"), name


def test_another_name_of_a_model_type_is_told():
    with pytest.raises(NoModelType, match="another name of mlcd_vision_model"):
        next(tiny_stock_models("mlcd"))


def test_a_class_of_another_type_hides_no_reason_of_the_type():
    """AutoModelForImageTextToText gives Gemma 3 for ShieldGemma 2, whose class needs tokens that
    the small vocabulary lacks."""
    models = tiny_stock_models("shieldgemma2")
    assert next(models).model.config.model_type == "gemma3"
    with pytest.raises(NoStockModel, match="^ShieldGemma2ForImageClassification, shrunk: Index"):
        next(models)
    (check,) = prove("shieldgemma2").checks
    assert check.name == STOCK_MODEL
    assert check.text.startswith("ShieldGemma2ForImageClassification")


def test_a_class_whose_package_is_missing_is_told(monkeypatch):
    class Missing:
        """As transformers makes for a class that needs a package."""

        @property
        def config_class(self):
            raise ImportError("X requires the torchaudio library")

    monkeypatch.setattr(stock_models, "_heads", lambda config: [(None, Missing())])
    with pytest.raises(NoStockModel, match="requires the torchaudio library"):
        next(tiny_stock_models("mistral"))


def test_padding_is_masked_on_its_side():
    model = next(tiny_stock_models(TYPE)).model
    batch = next(calls_of(model))
    for side, start in (("right", LENGTH - 3), ("left", 0)):
        mask = padded(model, batch, side)["attention_mask"]
        assert mask[0].all()
        assert mask[1].logical_not().nonzero().flatten().tolist() == [*range(start, start + 3)]
