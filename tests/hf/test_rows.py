"""Tables with a row for each position, by the families in which something about them is odd."""

import copy
import math

import pytest
import torch
import transformers

import hf_models
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.seams.rows import RowTable
from tests.support.generated import TOWER, drawn, switched
from tests.support.hf import STACK

TABLE, LENGTH = 20, 50  # positions of the stock models, and a longer text
SIZES = {**STACK, "vocab_size": 60, "max_position_embeddings": TABLE}
GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": TABLE}
NEO = {**SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}
CLIP = {**SIZES, "eos_token_id": 3, "projection_dim": 16}
PAD = 1
SPECIAL = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
DISTIL = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
MODELS = {
    # rows begin behind the padding token
    "roberta": ("RobertaForMaskedLM", SIZES),
    "xlm-roberta": ("XLMRobertaForMaskedLM", SIZES),
    "camembert": ("CamembertForMaskedLM", SIZES),
    "data2vec-text": ("Data2VecTextForMaskedLM", SIZES),
    "mpnet": ("MPNetForMaskedLM", SIZES),
    "esm": ("EsmForMaskedLM", {**SIZES, "position_embedding_type": "absolute", "mask_token_id": 4}),
    # a second table is looked up by the same numbers
    "lilt": ("LiltForTokenClassification", {**SIZES, "hidden_size": 48, "channel_shrink_ratio": 4}),
    "layoutlm": ("LayoutLMForMaskedLM", SIZES),
    # coordinates on the page stay stock, and so do relative distances in attention
    "layoutlmv3": (
        "LayoutLMv3ForTokenClassification",
        {**SIZES, "coordinate_size": 4, "shape_size": 8, "has_relative_attention_bias": True},
    ),
    # rows begin at 0
    "electra": ("ElectraForMaskedLM", {**SIZES, "embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", {**DISTIL, "max_position_embeddings": TABLE}),
    "clip_text_model": ("CLIPTextModelWithProjection", CLIP),
    "gpt2": ("GPT2LMHeadModel", GPT),
    # the stock class chooses the rows, by the mask
    "opt": ("OPTForCausalLM", OPT),
    "biogpt": ("BioGptForCausalLM", SIZES),
    # causal masks in buffers that end with the table; windows
    "gpt_neo": ("GPTNeoForCausalLM", {**NEO, "window_size": 6}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
}
WRITERS = [name for name in MODELS if GENERATED[name].side == "decoder"]
READERS = [name for name in MODELS if GENERATED[name].side == "encoder"]
each = pytest.mark.parametrize("name", MODELS)


def build(name, **fields):
    class_name, sizes = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**SPECIAL, **sizes, **fields})
    for field, value in vars(config).items():
        if "drop" in field and isinstance(value, float):
            setattr(config, field, 0.0)
    return drawn(model_class(config))


def texts(length=12, batch=2):
    return torch.randint(5, 60, (batch, length))


def output(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    result = model(ids, attention_mask=mask)
    return result.logits if "logits" in result else result.last_hidden_state


@each
def test_texts_have_any_length(name):
    model = switched(build(name), type="cape")
    ids = texts(LENGTH)
    long = output(model, ids)
    assert torch.isfinite(long).all()
    if name in WRITERS:  # later tokens change nothing
        torch.testing.assert_close(output(model, ids[:, :30]), long[:, :30])
    moved = ids.clone()
    moved[:, 30], moved[:, 40] = ids[:, 40], ids[:, 30]
    if "clip" not in name:  # order is seen behind the end of the stock table
        assert not torch.allclose(output(model, moved)[:, -1], long[:, -1], atol=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if "clip" not in name])
def test_learned_tables_begin_anew(name):
    """Rows are those behind the first, not those for padding. Stock CLIP refuses longer texts."""
    model = switched(build(name), type="abspos")
    table = model.seams()[0]
    count = table.num_embeddings - table.first_row
    rows = table.first_row + torch.arange(3 * count)[None]
    looked_up = RowTable.forward(table, rows)
    torch.testing.assert_close(looked_up, looked_up[:, :count].repeat(1, 3, 1))
    assert torch.isfinite(output(model, texts(LENGTH))).all()


@each
def test_padding_changes_nothing(name):
    model, ids = switched(build(name), type="cape"), texts(9, 1)
    alone = output(model, ids)
    for side, (before, after) in {"left": (4, 0), "right": (0, 4)}.items():
        if name == "clip_text_model" and side == "left":
            continue  # the state of the first end token counts, and PAD is no such token
        padded = torch.nn.functional.pad(ids, (before, after), value=PAD)
        mask = padded.ne(PAD).long()
        expected = output(model, padded, mask)[:, before : before + 9]
        torch.testing.assert_close(expected, alone, msg=side)


@pytest.mark.parametrize("name", READERS)
def test_positions_of_the_caller_count_from_zero_or_from_the_first_row(name):
    """Also where padding stands in a mask, or, without a mask, at the row of padding."""
    model, ids = switched(build(name), type="cape"), texts(9)
    table = model.seams()[0]
    if table.first_row == 0:
        return
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    from_zero = torch.arange(9).expand(2, 9)
    at_rows = torch.where(mask.bool(), from_zero + table.first_row, PAD)
    expected = output(model, ids, mask)[mask.bool()]
    for numbers in (from_zero, from_zero[:1], at_rows, from_zero + table.first_row):
        logits = model(ids, attention_mask=mask, position_ids=numbers).logits
        torch.testing.assert_close(logits[mask.bool()], expected)
    alone = model(ids[:1], position_ids=from_zero[:1]).logits
    torch.testing.assert_close(alone, output(model, ids[:1]))
    torch.testing.assert_close(model(ids, position_ids=at_rows).logits[:1], alone)


@pytest.mark.parametrize("name", WRITERS)
def test_generation_equals_teacher_forcing_beyond_the_table(name):
    model = switched(build(name), type="cape")
    ids, mask = texts(8), torch.ones(2, 8).long()
    mask[1, :3] = 0
    padded = ids.masked_fill(mask == 0, PAD)
    longer = {"min_new_tokens": 25, "max_new_tokens": 25, "do_sample": False}
    both = model.generate(padded, attention_mask=mask, **longer)
    for row, first in enumerate((0, 3)):
        text = both[row : row + 1, first:]
        scores = model(text).logits[0, 8 - first - 1 : -1]
        scores[:, 2] = -math.inf  # no end
        assert torch.equal(scores.argmax(-1), text[0, 8 - first :])


def test_pooled_token_of_a_long_caption():
    """CLIP pools the state of the first end token, wherever it stands."""
    model, ids = switched(build("clip_text_model"), type="cape"), texts(LENGTH, 1)
    ids[:, 40:] = 3
    embeds = model(ids).text_embeds
    torch.testing.assert_close(model(ids[:, :41]).text_embeds, embeds)
    changed = ids.clone()
    changed[:, 35] = 5 + ids[:, 35] % 50
    assert not torch.allclose(model(changed).text_embeds, embeds, atol=1e-4)


def test_whole_clip_takes_long_captions():
    """The images keep their stock positions; the text has the positions of CLIP's text model."""
    config = transformers.CLIPConfig(text_config=CLIP, vision_config=TOWER, projection_dim=16)
    stock = transformers.CLIPModel(config).eval()
    model = switched(stock, type="cape")
    assert model.seam_paths[0] == "text_model.embeddings.position_embedding"
    pixels, ids = torch.randn(2, 3, 16, 16), texts(LENGTH)
    ids[:, 45] = 3  # the end, whose state is pooled
    result = model(input_ids=ids, pixel_values=pixels)
    assert torch.isfinite(result.logits_per_image).all()
    expected = stock(input_ids=ids[:, :12], pixel_values=pixels)
    assert torch.equal(result.image_embeds, expected.image_embeds)
    ids[:, 30], ids[:, 40] = ids[:, 40].clone(), ids[:, 30].clone()
    changed = model(input_ids=ids, pixel_values=pixels)
    assert not torch.allclose(changed.text_embeds, result.text_embeds, atol=1e-5)


def test_local_windows_stay_beyond_the_table():
    """GPT-Neo's local layers see 6 tokens at any distance from the beginning."""
    model = build("gpt_neo", attention_types=[[["local", "local"], 1]])
    model, ids = switched(model, type="nopos"), texts(LENGTH, 1)
    changed = ids.clone()
    changed[:, 20] = ids[:, 20] % 50 + 5
    differs = (output(model, ids) != output(model, changed)).any(-1)[0]
    assert differs[20 : 20 + 11].all()
    assert not differs[20 + 11 :].any()  # two layers of six tokens


def test_stock_model_is_restored():
    stock, ids = build("roberta"), texts()
    model = switched(switched(stock, type="cape"), type="abspos")
    table = model.roberta.embeddings.position_embeddings
    assert table.weight.shape == (TABLE, 32)
    assert output(model, ids).shape == output(stock, ids).shape


def test_a_stock_decoder_counts_its_tokens_and_not_the_source():
    """In a model of two stock stacks: padding of the source moves no target."""
    sizes = {**SIZES, **SPECIAL, "type_vocab_size": 1, "max_position_embeddings": TABLE + 2}
    encoder, decoder = (transformers.RobertaConfig(**sizes) for _ in range(2))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = switched(drawn(transformers.EncoderDecoderModel(config=config)), type="cape")
    source, target = texts(12), texts(7)
    mask, target_mask = torch.ones_like(source), torch.ones_like(target)
    mask[1, :3] = 0
    target_mask[1, 5:] = 0
    batch = model(
        input_ids=source.masked_fill(mask == 0, PAD), attention_mask=mask,
        decoder_input_ids=target, decoder_attention_mask=target_mask,
    ).logits  # fmt: skip
    alone = model(input_ids=source[1:, 3:], decoder_input_ids=target[1:, :5]).logits
    torch.testing.assert_close(batch[1:, :5], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", ["fsmt", "autoformer"])
def test_tables_that_stock_code_computes_are_dropped_for_good(model_type, tmp_path):
    """Loading initialises such a table anew, by the size that the module says."""
    stock = next(tiny_stock_models(model_type)).model
    model = hf_models.switch(copy.deepcopy(stock), {"type": "nopos"})
    model.save_pretrained(tmp_path / "saved")
    stock.save_pretrained(tmp_path / "stock")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    from_stock = type(model).from_pretrained(
        tmp_path / "stock", position_embedding={"type": "nopos"}
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
        assert torch.equal(from_stock.state_dict()[name], weight), name
