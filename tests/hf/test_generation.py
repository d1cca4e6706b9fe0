"""Text that models of all families generate, with each decoding method of generate()."""

import pytest
import torch

from tests.support.expected import IN_ATTENTION
from tests.support.hf import (
    FAMILIES,
    OF_FAMILY,
    PAD,
    STACKS,
    VARIANTS,
    batch,
    frames,
    make,
    sentences,
)

SPEECH = ("speech_to_text",)
GENERATING = [n for n, row in FAMILIES.items() if row.model.can_generate() and n not in SPEECH]
# of the others, and against the stock model, in test_check_family.py
PAIRS = [(family, name) for family in GENERATING if family in STACKS for name in VARIANTS[family]]
TRANSLATORS = [n for n in GENERATING if FAMILIES[n].config().is_encoder_decoder] + [*SPEECH]
MODES = {
    "greedy": {"num_beams": 1},
    "beam": {"num_beams": 3},
    "static cache": {"num_beams": 1, "cache_implementation": "static"},
}
# of the other translators, types in attention: over the families each type meets each mode
OTHERS = [name for name in TRANSLATORS if name not in dict(PAIRS)]
MORE = [
    (family, name, [*MODES][(row + column) % len(MODES)])
    for row, family in enumerate(OTHERS)
    for column, name in enumerate(IN_ATTENTION)
]
ENDLESS = {"do_sample": False, "eos_token_id": None, "forced_eos_token_id": None}
ENDLESS |= {"no_repeat_ngram_size": 1, "suppress_tokens": [PAD]}


def model_of(family, name):
    """A model with a table of 12 positions; M2M100 needs a row for its padding."""
    limit = "max_target_positions" if family in SPEECH else "max_position_embeddings"
    short = {} if family == "m2m_100" else {limit: 12}
    return FAMILIES[family].build(OF_FAMILY[family][name], **short)


def prompts(family):
    """Sources padded on the right, texts to go on with padded on the left."""
    return frames() if family in SPEECH else sentences(left=family not in TRANSLATORS)


@pytest.mark.parametrize(
    ("family", "name", "mode"), [*((*pair, mode) for pair in PAIRS for mode in MODES), *MORE]
)
def test_generation_equals_teacher_forcing(family, name, mode):
    """Scores of the generated tokens, step by step from a cache, against one pass; beyond the last
    position of the stock model."""
    model, inputs = model_of(family, name), prompts(family)
    out = model.generate(
        **inputs, **MODES[mode], **ENDLESS, max_new_tokens=14,
        return_dict_in_generate=True, output_logits=True, output_scores=True,
    )  # fmt: skip
    forced = forced_logits(model, family, inputs, out.sequences)
    if out.get("beam_indices") is None:
        torch.testing.assert_close(torch.stack(out.logits, dim=1), forced, atol=1e-4, rtol=1e-4)
    else:
        steps = out.sequences[:, -14:, None]
        chosen = forced.log_softmax(-1).gather(-1, steps)[..., 0]
        scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
        torch.testing.assert_close(chosen, scores, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def forced_logits(model, family, inputs, sequences):
    """Logits of the 14 generated tokens, from one pass over all of them."""
    if family in TRANSLATORS:
        return model(**inputs, decoder_input_ids=sequences[:, :-1]).logits
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 13), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(sequences[:, :-1], attention_mask=mask, position_ids=positions)
    return output.logits[:, -14:]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", GENERATING)
def test_generation_in_training_mode_equals_evaluation_mode(family, use_cache):
    model = model_of(family, "cape")
    options = {**ENDLESS, "max_new_tokens": 8, "num_beams": 2, "use_cache": use_cache}
    options |= prompts(family)
    expected = model.generate(**options)
    assert torch.equal(model.train().generate(**options), expected)
    assert all(module.training for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("family", [*GENERATING, *SPEECH, "bert"])
def test_a_step_with_a_cache_sees_the_positions_of_evaluation(family):
    """Other forwards without gradients draw, as the training does that repeats them."""
    is_bert = {"is_decoder": True} if family == "bert" else {}
    model, inputs = make(family, "cape", **is_bert), batch(family)
    labels = inputs.pop("labels")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = labels.clamp(min=0)
    expected = model(**inputs, use_cache=True).logits
    model.train()
    assert torch.equal(model(**inputs, use_cache=True).logits, expected)
    assert not torch.allclose(model(**inputs, use_cache=False).logits, expected, atol=1e-4)
