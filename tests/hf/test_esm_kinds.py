"""ESM has two kinds of models under one model type: with a table of positions, and with queries and
keys that are turned (ESM-2). The stock configuration tells which."""

import copy
import json
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_models
from cape_plugins.checkpoints.families import find_family
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.convert import convert
from hf_models.seams.rotary import RotaryAngles, UnturnedAttention
from hf_models.seams.rows import RowTable
from tests.hf.conftest import check_same_gradients, copies
from tests.support.generated import drawn, switched
from tests.support.hf import BERT_NOISE, STACK

PAD, MASK = 1, 32
SIZES = {**STACK, **BERT_NOISE, "vocab_size": 33, "max_position_embeddings": 30}
SIZES |= {"pad_token_id": PAD, "mask_token_id": MASK, "eos_token_id": 2}
AUTO = transformers.AutoModelForMaskedLM


class Kind(NamedTuple):
    """What a kind of ESM has."""

    stock: str  # type of position embedding
    seam: type
    path: str  # of the seam
    cape: dict  # default options of cape


LOCAL = {"max_local_shift": 0.5}
KINDS = {
    "absolute": Kind(
        *("abspos", RowTable, "esm.embeddings.position_embeddings"),
        {"max_global_shift": 5.0, **LOCAL},
    ),
    "rotary": Kind("rope", RotaryAngles, "esm.rotary_embeddings", LOCAL),
}
each = pytest.mark.parametrize("kind", KINDS)


def build(kind, **fields):
    """With the oddities of published checkpoints: masked tokens are zeros and scale the others, and
    a norm follows the embeddings."""
    odd = {"token_dropout": True, "emb_layer_norm_before": True}
    config = transformers.EsmConfig(
        **{**SIZES, **odd, **fields}, position_embedding_type=kind, architectures=["EsmForMaskedLM"]
    )
    torch.manual_seed(0)
    return drawn(transformers.EsmForMaskedLM(config))


def proteins(side="right"):
    """Two proteins with masked tokens, of which the second has four tokens less."""
    ids = torch.randint(4, MASK, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[:, 6] = MASK
    mask = torch.ones_like(ids)
    mask[1, slice(0, 4) if side == "left" else slice(8, 12)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


@each
@pytest.mark.parametrize("oddities", [True, False])
def test_the_stock_type_of_each_kind_is_the_stock_model_bit_for_bit(kind, oddities):
    stock = build(kind, token_dropout=oddities, emb_layer_norm_before=oddities)
    model = switched(stock, type=KINDS[kind].stock)
    assert model.seam_paths == (KINDS[kind].path,)
    assert isinstance(model.seams()[0], KINDS[kind].seam)
    assert model.state_dict().keys() == stock.state_dict().keys()
    for side in ("left", "right"):
        outputs = [each_model(**proteins(side)).logits for each_model in (model, stock)]
        assert torch.equal(*outputs)
    check_same_gradients((model, stock), outputs)


@each
def test_the_configuration_chooses_the_types_and_their_options(kind):
    row, stock = KINDS[kind], build(kind)
    config = switched(stock, type="cape").config
    assert config.position_embedding == {"type": "cape", **row.cape}
    assert config.stock_type("encoder") == row.stock
    if kind == "absolute":
        assert switched(stock, type="sinpos").config.position_embedding["type"] == "sinpos"
    else:
        with pytest.raises(ValueError, match="no type of a model that turns queries and keys"):
            switched(stock, type="sinpos")


@each
def test_stock_and_saved_folders_are_loaded_as_the_kind_that_they_hold(kind, tmp_path):
    """Copies compute the same, too; training draws."""
    row, stock, inputs = KINDS[kind], build(kind), proteins()
    stock.save_pretrained(tmp_path / "stock")
    for loader in (AUTO, transformers.EsmForMaskedLM, hf_models.CapeEsmForMaskedLM):
        same = loader.from_pretrained(tmp_path / "stock", position_embedding={"type": row.stock})
        assert torch.equal(same.eval()(**inputs).logits, stock(**inputs).logits)
    model = AUTO.from_pretrained(tmp_path / "stock", position_embedding={"type": "cape"}).eval()
    others = copies(model, tmp_path / "cape")
    saved = json.loads((tmp_path / "cape" / "config.json").read_text())
    assert saved["model_type"] == "cape_esm"
    assert saved["position_embedding_type"] == kind
    assert saved["position_embedding"] == {"type": "cape", **row.cape}
    loaded = AUTO.from_pretrained(tmp_path / "cape").eval()
    assert isinstance(loaded.seams()[0], row.seam)
    for other in (loaded, *others):
        assert torch.equal(other(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits, atol=1e-4)


@each
def test_folders_are_converted_and_back(kind, tmp_path):
    stock = build(kind)
    stock.save_pretrained(tmp_path / "stock")
    convert(str(tmp_path / "stock"), tmp_path / "cape", {"type": KINDS[kind].stock})
    convert(str(tmp_path / "cape"), tmp_path / "back", None)
    back = transformers.EsmForMaskedLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(back(**proteins()).logits, stock(**proteins()).logits)


def test_a_model_is_switched_again_and_back():
    stock, inputs = build("rotary"), proteins()
    model = switched(switched(switched(stock, type="nopos"), type="cape"), type="rope")
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


def test_rotary_positions_count_places_so_padding_moves_nothing():
    """The stock model counts padding on the left, too; only distances act."""
    stock, inputs = build("rotary"), proteins("left")
    alone = stock(inputs["input_ids"][1:, 4:]).logits
    for model in (stock, switched(stock, type="rope")):
        torch.testing.assert_close(model(**inputs).logits[1:, 4:], alone)
        moved = torch.arange(12)[None] + 7
        logits = [model(**inputs, position_ids=p).logits for p in (moved, 2 * moved)]
        torch.testing.assert_close(logits[0], model(**inputs).logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(logits[1], logits[0], atol=1e-2)


def test_no_positions_leave_rotary_models_without_order():
    model, ids = switched(build("rotary"), type="nopos"), proteins()["input_ids"][:1]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(ids[:, order]).logits, model(ids).logits[:, order])


def test_layers_of_the_encoder_can_be_left_unturned():
    stock, inputs = build("rotary"), proteins()
    first = switched(stock, type="rope", layers="first")
    expected = copy.deepcopy(stock)
    expected.esm.encoder.layer[1].attention.self.position_embedding_type = "none"  # as stock code
    assert torch.equal(first(**inputs).logits, expected(**inputs).logits)
    assert not torch.allclose(first(**inputs).logits, stock(**inputs).logits, atol=1e-2)


def test_frequencies_of_older_checkpoints_are_kept(tmp_path):
    """ESM-2's published files hold the frequencies in each layer, rounded to half precision."""
    stock, name = build("rotary"), "rotary_embeddings.inv_freq"
    stock.save_pretrained(tmp_path / "stock")
    file = tmp_path / "stock" / "model.safetensors"
    weights = {key: value for key, value in load_file(file).items() if not key.endswith(name)}
    frequencies = stock.esm.rotary_embeddings.inv_freq * 1.5
    for layer in range(2):
        weights[f"esm.encoder.layer.{layer}.attention.self.{name}"] = frequencies.clone()
    save_file(weights, file, {"format": "pt"})
    stock = transformers.EsmForMaskedLM.from_pretrained(tmp_path / "stock").eval()
    assert torch.equal(stock.esm.rotary_embeddings.inv_freq, frequencies)
    model = AUTO.from_pretrained(tmp_path / "stock", position_embedding={"type": "rope"})
    model.save_pretrained(tmp_path / "cape")
    for each_model in (model, AUTO.from_pretrained(tmp_path / "cape")):
        assert torch.equal(each_model.eval()(**proteins()).logits, stock(**proteins()).logits)


def test_rows_of_two_kinds_have_the_same_sides_and_fields():
    """What does not depend on the kind is read without settings."""
    for name, row in GENERATED.items():
        if row.variant is not None:
            first = find_family(name)
            second = find_family(name, {row.variant.field: row.variant.value})
            assert first.sides.keys() == second.sides.keys(), name
            for side, other in zip(first.sides.values(), second.sides.values(), strict=True):
                assert (side.field, side.domain) == (other.field, other.domain), name
            assert row.variant.row.variant is None, name


def test_proteins_beside_a_text_keep_their_stock_positions():
    """Evolla reads proteins by an encoder like ESM-2's, with a text by Llama."""
    stock = next(tiny_stock_models("evolla")).model
    assert switched(stock, type="cape").seam_paths == ("model.rotary_emb",)
    model = switched(stock, type="rope", layers="not:2")
    unturned = [name for name, part in model.named_modules() if isinstance(part, UnturnedAttention)]
    odd = range(1, len(stock.model.layers), 2)
    assert unturned == [f"model.layers.{index}.self_attn" for index in odd] != []
