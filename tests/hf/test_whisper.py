"""Whisper: stock models bit for bit, recordings of any length, generation."""

import copy
import warnings
from operator import attrgetter

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import WhisperForAudioClassification, WhisperModel

import hf_models
from cape_plugins import TYPES
from hf_models.checks.outputs import equal, outputs_of
from hf_models.checks.updates import same_updates
from tests.support.expected import IN_ATTENTION, types_whose
from tests.support.whisper import (
    LABELS,
    LENGTHS,
    MASK,
    RAGGED,
    SEGMENT,
    SIZES,
    SPECIAL,
    WHOLE,
    encoder_sizes,
    features,
    make_stock,
    mask_of,
    switched,
)


@pytest.mark.parametrize("natural", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_types_equal_stock(dtype, natural):
    stock, cape = make_stock().to(dtype), switched("sinpos", natural_length=natural).to(dtype)
    inputs = {"input_features": WHOLE.to(dtype), "labels": LABELS}
    expected = outputs_of(stock, inputs, output_hidden_states=True)
    equal(outputs_of(cape, inputs, output_hidden_states=True), expected)


@pytest.mark.parametrize("model", [WhisperModel, WhisperForAudioClassification])
def test_other_models_equal_stock(model):
    inputs = {"decoder_input_ids": LABELS} if model is WhisperModel else {}
    inputs["input_features"] = WHOLE
    pair = switched("sinpos", model=model), make_stock(model)
    equal(*(outputs_of(each_model, inputs) for each_model in pair))


WAYS = {
    "greedy": {"max_new_tokens": 8, "language": "en", "task": "transcribe"},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "timestamps": {"return_timestamps": True, "condition_on_prev_tokens": True},
    "words": {"return_timestamps": True, "return_token_timestamps": True},
    "prompt": {"max_new_tokens": 8, "prompt_ids": torch.tensor([56, 3, 4, 5])},
    "fallback": {"return_timestamps": True, "temperature": (0.0, 0.2)},
}
WAYS["fallback"] |= {"logprob_threshold": -0.1, "compression_ratio_threshold": 1.2}
WAYS["fallback"]["no_speech_threshold"] = 0.2


@pytest.mark.parametrize(("way", "frames"), [*((way, 200) for way in WAYS), ("greedy", 50)])
def test_stock_types_generate_what_stock_does(way, frames):
    inputs = features(3, frames)
    mask = mask_of((frames, frames * 2 // 3, frames // 3))
    written = []
    for model in (make_stock(), switched("sinpos")):
        torch.manual_seed(0)
        written.append(model.generate(inputs, attention_mask=mask, **WAYS[way]))
    torch.testing.assert_close(*written, rtol=0, atol=0)


def test_three_updates_equal_stock_with_frozen_sinusoids():
    stock, cape = make_stock(dropout=0.1), switched("sinpos", dropout=0.1)
    same_updates(stock, cape, {"input_features": WHOLE, "labels": LABELS})
    missing = stock.state_dict().keys() - cape.state_dict().keys()
    assert missing == {"model.encoder.embed_positions.weight"}


def test_changed_sinusoids_are_told():
    stock = make_stock().to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_models.switch(copy.deepcopy(stock), {"type": "cape"})  # rounding is no change
    stock.model.encoder.embed_positions.weight += 0.1
    with pytest.warns(UserWarning, match=r"sinusoids of the encoder were changed.*up to 0\.1"):
        hf_models.switch(stock, {"type": "cape"})


@pytest.mark.parametrize("settings", TYPES)
def test_recording_alone_equals_itself_in_a_batch(settings):
    model = switched(settings, decoder=settings, natural_length=True)
    together = model(RAGGED, attention_mask=MASK, labels=LABELS).logits
    for i, length in enumerate(LENGTHS):
        alone = model(RAGGED[i : i + 1, :, :length], labels=LABELS[i : i + 1]).logits
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=2e-5)


def test_masks_are_an_option_whose_default_follows_the_type():
    for settings, natural, masked in (
        ("sinpos", None, False),
        ("cape", None, True),
        ("sinpos", True, True),
        ("cape", False, False),
    ):
        model = switched(settings, natural_length=natural)
        with_mask = model(RAGGED, attention_mask=MASK, labels=LABELS).logits
        without = model(RAGGED, labels=LABELS).logits
        assert model.config.at_natural_length is masked
        assert torch.equal(with_mask, without) is not masked


@pytest.mark.parametrize("layer_sum", [False, True])
def test_classifier_does_not_count_padding(layer_sum):
    model = switched(model=WhisperForAudioClassification, use_weighted_layer_sum=layer_sum)
    together = model(RAGGED, attention_mask=MASK).logits
    for i, length in enumerate(LENGTHS):
        alone = model(RAGGED[i : i + 1, :, :length]).logits
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sinpos", *types_whose(attrgetter("in_attention"))])
def test_time_counts_not_frames(name):
    model = switched(name, natural_length=True)
    encoder, computed = model.get_encoder(), []
    source = encoder.stack_positions or encoder.positions
    hook = source.register_forward_hook(lambda *parts: computed.append(parts[2]))
    encoder(WHOLE, hop_nanoseconds=5_000_000)  # the same time in half the steps
    encoder(WHOLE[:, :, : SEGMENT // 2])
    hook.remove()
    fine, coarse = (getattr(positions, "key", positions) for positions in computed)
    torch.testing.assert_close(fine[:, ::2], coarse)
    apart = model(WHOLE, hop_nanoseconds=torch.full((3,), 10_000_000), labels=LABELS).logits
    torch.testing.assert_close(apart, model(WHOLE, labels=LABELS).logits)


def test_training_draws_and_evaluation_does_not():
    model = switched("cape", "cape").train()
    first, second = (model(WHOLE, labels=LABELS).loss for _ in range(2))
    assert first != second
    written = model.generate(WHOLE, **WAYS["greedy"])
    model.eval()
    assert torch.equal(model(WHOLE, labels=LABELS).loss, model(WHOLE, labels=LABELS).loss)
    assert torch.equal(model.generate(WHOLE, **WAYS["greedy"]), written)


def test_relative_embeddings_of_zero_add_nothing():
    """Stock attention scales its queries before it calls a function of attention."""
    relative, absent = switched("relpos", "relpos"), switched("nopos", "nopos")
    for name, table in relative.named_parameters():
        if ".relative." in name:
            table.data.zero_()
    outputs = [model(WHOLE, labels=LABELS).logits for model in (relative, absent)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


def gradients(model, call):
    model.zero_grad()
    torch.manual_seed(0)
    call(RAGGED, attention_mask=MASK, labels=LABELS).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("settings", ["cape", *IN_ATTENTION])
def test_checkpointing_repeats_masks_and_draws(settings):
    model = switched(settings, settings).train()
    expected = gradients(model, model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, gradients(model, model), expected))


@pytest.mark.slow
def test_compiled_model_has_the_same_gradients():
    model = switched("cape", "cape", encoder_layers=1, decoder_layers=1).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled), gradients(model, model))


def test_wrong_inputs_are_refused():
    model = switched()
    with pytest.raises(ValueError, match=r"input_features has shape \(3, 5, 50\).*8, frames"):
        model(RAGGED[:, :5], labels=LABELS)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 9\).*\(3, 50\)"):
        model(RAGGED, attention_mask=MASK[:, :9], labels=LABELS)
    for mask in (MASK.flip(1), MASK.roll(1, 1)):
        with pytest.raises(ValueError, match=r"padding before frames.*padding_side='right'"):
            model(RAGGED, attention_mask=mask, labels=LABELS)
    with pytest.raises(ValueError, match="input_features has 9 bins, and the last is no mask"):
        model(torch.cat((RAGGED, RAGGED[:, :1]), dim=1), labels=LABELS)
    with pytest.raises(ValueError, match=r"one_piece=True.*natural_length=True"):
        switched("sinpos").generate(WHOLE, one_piece=True)
    with pytest.raises(ValueError, match="timestamps end at 30 s"):
        model.generate(features(1, 200), one_piece=True, return_timestamps=True)


@pytest.mark.parametrize(
    "settings", [{"natural_length": "no"}, {"hop_seconds": "x"}, {"hop_seconds": 0}]
)
def test_wrong_settings_are_refused(settings):
    (text,) = (f"{name}={value!r} is not allowed" for name, value in settings.items())
    with pytest.raises(StrictDataclassClassValidationError, match=text):
        hf_models.CapeWhisperConfig(**settings)


@pytest.mark.parametrize(
    ("way", "limit"),
    [({"language": "en", "return_timestamps": False}, 100), (WAYS["words"], SEGMENT // 2)],
)
def test_recordings_in_segments_or_in_one_piece(way, limit):
    """Each recording gets the text that it gets alone. Without timestamps, a recording is encoded
    once, as a whole."""
    model, texts, lengths = switched(), [], (200, 131, 60)

    def write(inputs, **mask):
        written = model.generate(inputs, **mask, **way, max_new_tokens=15)
        texts.append(written["sequences"] if isinstance(written, dict) else written)

    inputs = features(3, 200)
    sizes = encoder_sizes(model, lambda: write(inputs, attention_mask=mask_of(lengths)))
    assert max(sizes) == limit
    for i, length in enumerate(lengths):
        write(inputs[i : i + 1, :, :length])
        together, alone = texts[0][i], texts[-1][0]
        width = min(len(together), len(alone))
        assert torch.equal(together[:width], alone[:width])
        assert (together[width:] == SPECIAL["pad_token_id"]).all()
    assert model.config.max_source_positions == SEGMENT // 2
    assert model.config.max_target_positions == SIZES["max_target_positions"]


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("decoder", ["abspos", "cape", *IN_ATTENTION])
def test_generation_is_teacher_forcing_beyond_the_table(decoder, cache):
    model = switched("cape", decoder)
    count = SIZES["max_target_positions"] + 10
    ways = {"language": "en", "max_new_tokens": count, "min_new_tokens": count, **cache}
    ways |= {"return_dict_in_generate": True, "output_logits": True}
    written = model.generate(RAGGED, attention_mask=MASK, **ways)
    tokens = written.sequences
    forced = model(RAGGED, attention_mask=MASK, decoder_input_ids=tokens[:, :-1]).logits
    steps = torch.stack(written.logits, dim=1)
    assert steps.shape[1] == count
    torch.testing.assert_close(steps, forced[:, -count:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("decoder", IN_ATTENTION)
def test_beams_with_a_cache_are_those_without(decoder):
    model, ways = switched("cape", decoder), {"num_beams": 3, "language": "en"}
    ways |= {"attention_mask": MASK, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(RAGGED, use_cache=False, **ways)
    assert torch.equal(model.generate(RAGGED, **ways), expected)


def test_spec_augment_leaves_the_shortest_recordings_alone():
    """Stock recordings have 3000 frames; one of fewer than a span cannot be masked."""
    masks = {"apply_spec_augment": True, "mask_time_prob": 0.5, "mask_time_length": 10}
    model, seen = switched("cape", **masks).train(), []
    model.model.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for frames in (8, 40):
        inputs = features(1, frames)
        model(inputs.clone(), decoder_input_ids=torch.ones(1, 3, dtype=torch.long))
        assert torch.equal(seen[-1], inputs) == (frames < 10)


@pytest.mark.parametrize("where", ["keyword", "argument", "model"])
def test_timestamps_need_frames_of_10_ms(where):
    """Asked for by keyword, by a configuration of generation, or by the model's own."""
    model = switched("cape")
    config = copy.deepcopy(model.generation_config)
    asked = {"keyword": {"return_timestamps": True}, "argument": {"generation_config": config}}
    if where != "keyword":
        (config if where == "argument" else model.generation_config).return_timestamps = True
    call = {"attention_mask": MASK, "hop_nanoseconds": 5_000_000, "language": "en"}
    with pytest.raises(ValueError, match=r"return_timestamps=True.*need frames of 10 ms"):
        model.generate(RAGGED, **call, **asked.get(where, {}))
