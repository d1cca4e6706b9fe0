"""Positions of a decoder whose caller gives them, or a mask of four dimensions.
test_check_family.py shows that the stock type computes the same with them as the stock model."""

from operator import attrgetter

import pytest
import torch

from hf_models.switching.modeling import decoder_positions
from tests.support.expected import types_whose
from tests.support.hf import FAMILIES, OF_FAMILY, PAD, sentences
from tests.support.whisper import LABELS

ROW, LENGTH = torch.arange(7), 5
# ways to compute positions, and every type in attention
NAMES = ["sinpos", "cape", "abspos", *types_whose(attrgetter("in_attention"))]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_positions_of_the_caller_are_positions_of_the_text(name):
    model = FAMILIES["marian"].build(OF_FAMILY["marian"][name]).model
    text, states = LABELS % 50, torch.randn(3, 4, 32)
    expected = model.decoder(text, encoder_hidden_states=states).last_hidden_state
    for ids in (ROW, ROW[None], ROW.expand(3, -1)):
        output = model.decoder(text, encoder_hidden_states=states, position_ids=ids)
        torch.testing.assert_close(output.last_hidden_state, expected)
    others = model.decoder(text, encoder_hidden_states=states, position_ids=ROW * 2)
    assert not torch.allclose(others.last_hidden_state, expected, atol=1e-2)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", NAMES)
def test_cache_of_fixed_size_counts_prompts_padded_on_the_left(name, attention):
    model = FAMILIES["marian"].build(OF_FAMILY["marian"][name], attn_implementation=attention)
    prompt = torch.tensor([[PAD, 5, 6, 7], [PAD, PAD, 8, 9]])  # a text begins with padding
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    source = sentences(lengths=(6, 4))
    ways = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "num_beams": 1, "do_sample": False}
    ways |= {"return_dict_in_generate": True, "output_logits": True}
    ways |= {"eos_token_id": None, "forced_eos_token_id": None}
    logits = []
    for cache in ("dynamic", "static"):
        prefix = {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
        output = model.generate(**source, **prefix, **ways, cache_implementation=cache)
        logits.append(torch.stack(output.logits, dim=1))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    alone = {key: value[1:] for key, value in source.items()}
    output = model.generate(**alone, decoder_input_ids=prompt[1:, 1:], **ways)
    torch.testing.assert_close(torch.stack(output.logits, 1)[0], logits[1][1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_of_four_dimensions_counts_up_to_each_token(dtype):
    """Also if the mask shows following tokens, as the mask of a prefix does."""
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()[:, None, None].expand(2, 1, 3, 5)
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    positions = decoder_positions(3, 1, mask, mask.device)
    assert positions.rows[..., 0].tolist() == [[0, 1, 2], [1, 2, 3]]
