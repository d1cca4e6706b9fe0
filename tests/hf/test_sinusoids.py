"""Sinusoids that stock modules keep in a table: one stack, and a pair that counts ids."""

import math

import pytest
import torch
import transformers

from hf_models.seams.sinusoids import SinusoidTable
from tests.support.expected import acts_in_attention, types_whose
from tests.support.generated import drawn, switched

TABLE, LENGTH, PAD = 20, 50, 1  # positions of the stock table, a longer text, the padding token
SMALL = {"vocab_size": 60, "d_model": 32, "max_position_embeddings": TABLE}
XGLM = {**SMALL, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
OF_SIDE = {"layers": 2, "ffn_dim": 48, "attention_heads": 4, "layerdrop": 0.0, "sparse_step": 0}
NLLB = {**SMALL, "num_experts": 2, **{f"encoder_{name}": size for name, size in OF_SIDE.items()}}
NLLB |= {f"decoder_{name}": size for name, size in OF_SIDE.items()}
MODELS = {
    # rows are positions + 2, whatever the padding token is; padding is counted
    "xglm": (transformers.XGLMForCausalLM, XGLM),
    # rows begin behind the padding token; ids that are no padding are counted
    "nllb-moe": (transformers.NllbMoeForConditionalGeneration, NLLB),
}
# without the stock type, of which one counts padding
OTHERS = {*types_whose(lambda encoding: not acts_in_attention(encoding))} - {"sinpos"}
each = pytest.mark.parametrize("name", MODELS)


def build(name, **fields):
    model_class, sizes = MODELS[name]
    special = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
    config = model_class.config_class(
        **special, decoder_start_token_id=2, dropout=0.0, attention_dropout=0.0, **sizes | fields
    )
    config.activation_dropout = 0.0
    return drawn(model_class(config))


def texts(length=12, batch=2):
    return torch.randint(5, 60, (batch, length))


def output(model, ids, mask=None, **inputs):
    mask = torch.ones_like(ids) if mask is None else mask
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return model(ids, attention_mask=mask, **inputs).logits


@each
@pytest.mark.parametrize("length", [12, LENGTH])
def test_stock_type_is_the_stock_model_bit_for_bit(name, length):
    """Padded and not, shorter and longer than the table, which grows as in the stock model; also
    after another type."""
    stock = build(name)
    model = switched(switched(stock, type="cape"), type="sinpos")
    ids, mask = texts(length), torch.ones(2, length).long()
    mask[1, 9:] = 0
    for each_mask in (torch.ones_like(mask), mask, mask.flip(1)):
        padded = ids.masked_fill(each_mask == 0, PAD)
        outputs = [output(each_model, padded, each_mask) for each_model in (model, stock)]
        assert torch.equal(*outputs)


@each
def test_other_sinusoids_continue_the_stock_ones(name):
    """SHAPE without a draw is the stock model: first coordinate, frequencies and channels agree, at
    lengths within the table and beyond it."""
    stock = build(name)
    model = switched(stock, type="shape")
    assert all(seam.weights.dtype == torch.long for seam in model.seams())
    for length in (12, LENGTH):
        ids = texts(length)
        torch.testing.assert_close(output(model, ids), output(stock, ids), atol=1e-4, rtol=1e-4)


@each
@pytest.mark.parametrize("type_name", sorted(OTHERS))
def test_padding_changes_nothing(name, type_name):
    model, ids = switched(build(name), type=type_name), texts(9, 1)
    alone = output(model, ids)
    for side, (before, after) in {"left": (4, 0), "right": (0, 4)}.items():
        padded = torch.nn.functional.pad(ids, (before, after), value=PAD)
        result = output(model, padded, padded.ne(PAD).long())[:, before : before + 9]
        torch.testing.assert_close(result, alone, msg=side)


@each
def test_all_stacks_share_a_draw_and_a_stock_checkpoint_is_loaded(name, tmp_path):
    stock, ids = build(name), texts(LENGTH)
    model = switched(stock, type="cape", max_global_shift=50.0, max_local_shift=0.0)
    expected, seen = output(model, ids), []
    for seam in model.seams():
        seam.register_forward_hook(lambda *call: seen.append(call[2]))
    output(model.train(), ids)
    assert len(seen) == len(model.seams()) > 0
    assert all(torch.equal(embedding, seen[0]) for embedding in seen)
    stock.save_pretrained(tmp_path)
    cape = model.config.position_embedding
    loaded = type(model).from_pretrained(tmp_path, position_embedding=cape)
    assert torch.equal(output(loaded.eval(), ids), expected)


def test_generation_equals_teacher_forcing_beyond_the_table():
    model = switched(build("xglm"), type="cape")
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


def test_given_positions_count():
    """Positions of the caller are the positions, in the stock model and with another type."""
    stock, ids = build("xglm"), texts(12)
    numbers = torch.arange(12).expand(2, -1) * 3
    moved = output(switched(stock, type="shape"), ids, position_ids=numbers)
    with torch.no_grad():  # the stock table grows by the length, not by the positions
        stock(texts(LENGTH))
    expected = output(stock, ids, position_ids=numbers)
    torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)


def test_source_and_target_of_other_lengths():
    """Each side counts its tokens: generation with a cache equals one forward."""
    model, source = switched(build("nllb-moe"), type="cape"), texts(LENGTH)
    target = model.generate(source, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    scores = model(source, decoder_input_ids=target[:, :-1]).logits
    scores[..., 2] = -math.inf
    assert torch.equal(scores.argmax(-1)[:, :-1], target[:, 1:-1])


def test_learned_table_has_the_size_of_the_stock_table():
    """Also if the stock table has grown with a text, or the checkpoint could not be loaded."""
    stock = build("xglm")
    stock(texts(LENGTH))
    assert switched(stock, type="abspos").seams()[0].positions.encoding.weight.shape == (TABLE, 32)


def test_precision_follows_the_model():
    """The numbers of rows stay whole in half precision, in which 2049 is not a number."""
    (seam,) = switched(build("xglm"), type="cape").to(torch.bfloat16).seams()
    assert isinstance(seam, SinusoidTable)
    assert seam.weights.dtype == torch.long
    embedding = seam(torch.tensor([[256, 257, 258]]), 300)
    assert embedding.dtype == torch.bfloat16
    assert not torch.equal(embedding[:, 0], embedding[:, 1])
