"""Models whose positions are drawn and sorted in training: what source and target share, and draws
in evaluation."""

import pytest
import torch

from cape_plugins import TYPES
from tests.support.hf import ALPHA, FAMILIES, MARIAN, PAD, answer, batch, frames, sentences, targets

SAMPLED = [name for name, row in TYPES.items() if row.sampling]


def coordinates(model, **inputs):
    """``[B, S]`` and ``[B, T]`` coordinates of source and target in one forward."""
    seen, encoders = [], [stack.positions for stack in (model.model.encoder, model.model.decoder)]
    hooks = [
        encoder.encoding.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0]))
        for encoder in encoders
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def translation(left, lengths=(9, 4, 6), words=(3, 7, 5)):
    inputs = sentences(left=left, lengths=lengths)
    ids = targets(3, max(words))
    mask = torch.arange(max(words)) < torch.tensor(words)[:, None]
    return {
        **inputs,
        "decoder_input_ids": ids.masked_fill(~mask, PAD),
        "decoder_attention_mask": mask.long(),
    }


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("name", SAMPLED)
def test_source_and_target_share_one_function_of_the_index(name, hint, left):
    """With the exact counts of both sides: alpha 2 puts source tokens at even numbers."""
    settings = {"type": name, "source_scale": 2, "source_bos": hint, "max_position": 64}
    model = MARIAN.build(settings).train()
    inputs = translation(left)
    draw = model.model.encoder.positions.draw(3)
    source, target = coordinates(model, **inputs, draw=draw)
    for row, (here, there) in enumerate(zip((9, 4, 6), (3, 7, 5), strict=True)):
        here += hint
        count = max(2 * (here - 1) + 1, there)
        taken = draw.order[row, :count].sort().values
        length = source.shape[1]
        of_text = source[row, length - here :] if left else source[row, :here]
        assert torch.equal(of_text, taken[: 2 * here : 2][:here])
        assert torch.equal(target[row, :there], taken[:there])


@pytest.mark.parametrize("name", SAMPLED)
def test_evaluation_and_generation_equal_sinpos(name):
    settings = {"source_scale": ALPHA}
    model, plain = (MARIAN.build({"type": position, **settings}) for position in (name, "sinpos"))
    with torch.no_grad():
        assert torch.equal(*(answer(other(**batch("marian"))) for other in (model, plain)))
    options = {**sentences(), "max_new_tokens": 6, "num_beams": 2}
    expected = plain.generate(**options)
    assert torch.equal(model.generate(**options), expected)
    assert torch.equal(model.train().generate(**options), expected)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("family", ["bert", "speech_ctc"])
def test_evaluation_draws_where_that_is_asked_for(family, name):
    counted, drawn = (
        FAMILIES[family].build({"type": name, "random_evaluation": drawn})
        for drawn in (False, True)
    )
    with torch.no_grad():
        for model in (counted, drawn):
            first, second = (answer(model(**batch(family))) for _ in range(2))
            assert torch.equal(first, second) == (model is counted)


def test_generation_draws_where_evaluation_does():
    """The encoder of speech, which is called once for a text."""
    family = FAMILIES["speech_to_text"]
    options = {**frames(), "max_new_tokens": 2, "num_beams": 1, "output_hidden_states": True}
    options |= {"return_dict_in_generate": True, "do_sample": False}
    for random in (False, True):
        model = family.build({"type": "randpos", "random_evaluation": random})
        first, second = (model.generate(**options).encoder_hidden_states[0] for _ in range(2))
        assert torch.equal(first, second) == (not random)
