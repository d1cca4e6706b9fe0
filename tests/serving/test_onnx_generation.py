"""``cape-plugins export onnx`` of an encoder with a decoder: greedy tokens with a cache are those
of the model, in translation and in Whisper."""

import numpy as np
import pytest
import torch

from tests.support.engines import engine_python, program_of, run_program
from tests.support.hf import EOS, PAD, sentences
from tests.support.onnx_graphs import assert_close, export, greedy, run, small, up_to
from tests.support.whisper import GENERATION, LENGTHS, MASK, RAGGED, SPECIAL, switched

pytestmark = pytest.mark.slow
STEPS = 40
SENTENCES = (3, 1, 9, 30, 17, 60, 2, 25, 12, 44)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return engine_python(tmp_path_factory.mktemp("engine"), "onnxruntime")


def translator(settings):
    """Scores that differ clearly, and hypotheses of which many end by themselves."""
    model = small("marian", settings, init_std=0.5)
    with torch.no_grad():
        model.final_logits_bias[0, EOS] = 6.0
    model.generation_config.update(forced_eos_token_id=None, bad_words_ids=[[PAD]])
    return model


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    model = translator("cape")
    return model, export(model, tmp_path_factory.mktemp("marian"))


def generated(model, steps=STEPS, **given):
    tokens = model.generate(**given, num_beams=1, do_sample=False, max_new_tokens=steps)
    return [up_to(row[1:], EOS) for row in tokens.tolist()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_translations_are_those_of_the_model(translation, side):
    """Of a batch with padding, and of its sentences alone."""
    model, out = translation
    given = sentences(side == "left", SENTENCES)
    expected = generated(model, **given)
    assert greedy(out, given, [PAD], EOS, STEPS, never=[PAD]) == expected
    assert len({*map(tuple, expected)}) > 8
    assert sum(0 < len(tokens) < STEPS for tokens in expected) > 4  # ended by themselves
    for ids, mask, tokens in zip(*given.values(), expected, strict=True):
        ids = ids[mask.bool()][None]
        alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert greedy(out, alone, [PAD], EOS, STEPS, never=[PAD]) == [tokens]


def test_several_tokens_in_one_call_give_the_scores_of_one_after_the_other(translation):
    model, out = translation
    given, target = sentences(), torch.tensor([[PAD, 5, 9, 2]]).repeat(3, 1)
    states = run(out, "encoder", **given)
    cache = dict.fromkeys(("past_0_key", "past_0_value"), torch.zeros(3, 4, 0, 8))
    whole = run(out, "decoder", input_ids=target, **states, **cache)["logits"]
    with torch.no_grad():
        assert_close(whole, model(**given, decoder_input_ids=target).logits)
    steps = []
    for token in target.split(1, 1):
        output = run(out, "decoder", input_ids=token, **states, **cache)
        steps.append(output["logits"])
        cache = {name: output[name.replace("past", "present")] for name in cache}
    assert_close(torch.cat(steps, 1), whole)


def test_program_of_the_readme_translates_with_the_engine_alone(translation, python):
    model, out = translation
    lengths = set()
    for length in SENTENCES[:5]:
        given = sentences(lengths=(length,))
        (expected,) = generated(model, 256, **given)
        printed = run_program(python, program_of(out), *given["input_ids"][0].tolist(), cwd=out)
        assert up_to([int(token) for token in printed.split()], EOS) == expected
        lengths.add(len(expected))
    assert len(lengths) > 2
    assert run_program(python, program_of(out), cwd=out)  # as it stands
    files = {"README.md", "decoder.onnx", "encoder.onnx", "generation_config.json"}
    assert {path.name for path in out.iterdir()} == files


def test_table_begins_anew_and_distances_go_on(run_cli, tmp_path):
    """A table of 40 rows with relative keys and values, both traced at a length that they cover; by
    a command of its own."""
    settings = {"type": "abspos", "relative_context": 3, "relative_values": True}
    model, out = translator(settings), tmp_path / "out"
    model.save_pretrained(tmp_path / "source")
    command = ("python", "-m", "cape_plugins", "export", "onnx", tmp_path / "source", out)
    report = run_cli(*command, "--opset", "18", fresh=True).stdout
    assert "decoder.onnx: differs by at most" in report
    given = sentences(lengths=(90, 4))
    expected = generated(model, 60, **given)
    assert greedy(out, given, [PAD], EOS, 60, never=[PAD]) == expected
    assert max(map(len, expected)) > 40


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    model = switched("cape", encoder_layers=1, decoder_layers=1, init_std=1.0)
    settings = model.generation_config
    settings.language, settings.task, settings.max_length = "en", "transcribe", None
    settings._from_model_config = False  # else what Whisper alone has is not loaded
    return model, export(model, tmp_path_factory.mktemp("whisper"))


def test_greedy_transcripts_are_those_of_the_model(whisper, python, tmp_path):
    """Of recordings with padding, at their natural length, and of one by the README's program."""
    model, out = whisper
    end, pad = SPECIAL["eos_token_id"], SPECIAL["pad_token_id"]
    tokens = model.generate(
        RAGGED, attention_mask=MASK, return_timestamps=False, num_beams=1, max_new_tokens=12
    )
    expected = [up_to(row, pad) for row in tokens.tolist()]
    assert len({*map(len, expected)}) > 1  # some ended by themselves
    hop = torch.full((len(LENGTHS),), 10_000_000)
    given = {"input_features": RAGGED, "attention_mask": MASK, "hop_nanoseconds": hop}
    prompt = [57, GENERATION["lang_to_id"]["<|en|>"], GENERATION["task_to_id"]["transcribe"], 60]
    assert greedy(out, given, prompt, end, 12) == expected
    np.save(tmp_path / "frames.npy", RAGGED[1:2, :, : LENGTHS[1]].numpy())
    printed = run_program(python, program_of(out), tmp_path / "frames.npy", cwd=out)
    assert up_to([int(token) for token in printed.split()], end)[:12] == expected[1]


@pytest.mark.parametrize("frames", [1, 2, 51, 400])
def test_recordings_of_any_length_have_the_states_of_the_model(whisper, frames):
    """Keys of the first layer, with a hop of its own."""
    model, out = whisper
    features, hop = torch.randn(2, 8, frames), torch.tensor([10_000_000, 7_000_000])
    mask = torch.ones(2, frames, dtype=torch.long)
    mask[1, (frames + 1) // 2 :] = 0
    given = {"input_features": features, "attention_mask": mask, "hop_nanoseconds": hop}
    with torch.no_grad():
        output = model.get_encoder()(**given, return_dict=True)
        keys = model.get_decoder().layers[0].encoder_attn.k_proj(output.last_hidden_state)
    actual = run(out, "encoder", **given)
    assert_close(actual["cross_0_key"].transpose(1, 2).flatten(2), keys)
    assert torch.equal(actual["encoder_attention_mask"].bool(), output.attention_mask)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    model = small("llama", "cape")
    return model, export(model, tmp_path_factory.mktemp("llama"))


def test_texts_go_on_as_those_of_the_model(language_model, python):
    """Of a batch that is padded on the left, and of one text by the README's program."""
    model, out = language_model
    given = sentences(True, (9, 6, 1))
    expected = generated(model, 20, **given)
    expected = [tokens[8:] for tokens in expected]
    assert len({*map(tuple, expected)}) == 3
    new, mask = given["input_ids"], given["attention_mask"]
    cache = dict.fromkeys(("past_0_key", "past_0_value"), torch.zeros(3, 2, 0, 8))
    seen, chosen = mask[:, :0], []
    for _ in range(20):
        state = {"input_ids": new, "attention_mask": mask, "cache_mask": seen, **cache}
        output = run(out, "model", **state)
        cache = {name: output[name.replace("past", "present")] for name in cache}
        new = output["logits"][:, -1:].argmax(-1)
        seen, mask = torch.cat((seen, mask), 1), torch.ones_like(new)
        chosen.append(new)
    assert [up_to(row, EOS) for row in torch.cat(chosen, 1).tolist()] == expected
    printed = run_program(python, program_of(out), *given["input_ids"][0].tolist(), cwd=out)
    assert up_to([int(token) for token in printed.split()], EOS)[:20] == expected[0]
