"""Inputs that are missing, given twice, or of a form that stock models take as well."""

import pytest
import torch

from tests.support.hf import FAMILIES, VARIANTS, batch

IDS = torch.arange(1, 7).expand(2, -1)
EMBEDS = torch.zeros(2, 6, 32)


@pytest.mark.parametrize("family", ["marian", "bert", "llama"])
def test_message_says_what_is_missing_or_given_twice(family):
    model = FAMILIES[family].build(VARIANTS[family]["cape"]).base_model
    for mode in (True, False):
        for inputs in ({}, {"attention_mask": torch.ones(2, 6)}):
            with pytest.raises(ValueError, match="input_ids.*inputs_embeds"):
                model.train(mode)(**inputs)
    with pytest.raises(ValueError, match="input_ids.*inputs_embeds"):
        model(IDS, inputs_embeds=EMBEDS)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_empty_batch_is_refused_with_its_shape(family, training):
    """Where torch would name a tensor that cannot be reshaped."""
    model = FAMILIES[family].build(VARIANTS[family]["cape"]).train(training)
    inputs = {name: value[:0] for name, value in batch(family).items()}
    with pytest.raises(ValueError, match=r"(input_ids|input_features|pixel_values) has .*at least"):
        model(**inputs)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if "input_ids" in FAMILIES[name].batch()]
)
def test_empty_texts_are_refused_on_either_side(family):
    for name in ("cape", FAMILIES[family].stock_type):
        model = FAMILIES[family].build(VARIANTS[family][name])
        with pytest.raises(ValueError, match=r"input_ids has shape \(2, 0\); allowed: .*one token"):
            model(IDS[:, :0], attention_mask=torch.ones(2, 0))
        if model.config.is_encoder_decoder:
            with pytest.raises(ValueError, match=r"decoder_input_ids has shape \(2, 0\)"):
                model(IDS, decoder_input_ids=IDS[:, :0])


@pytest.mark.parametrize("family", ["speech_ctc", "speech_to_text"])
@pytest.mark.parametrize("shape", [(3, 50, 7), (3, 50, 80), (50, 8)])
def test_features_of_other_widths_are_refused_with_the_bins(family, shape):
    model = FAMILIES[family].build({"type": "cape"})
    with pytest.raises(
        ValueError, match=r"input_features has shape .*\[batch, frames, 8\].*mel bins"
    ):
        model(**{**batch(family), "input_features": torch.zeros(shape)})
