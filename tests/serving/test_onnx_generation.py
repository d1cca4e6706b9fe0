"""``cape-plugins export onnx`` of an encoder with a decoder: greedy tokens with a cache are those of
the model, of translation and of Whisper."""

import sys

import numpy as np
import pytest
import torch

from tests.support.engines import engine_python, run_program
from tests.support.hf import EOS, PAD, sentences
from tests.support.onnx_graphs import assert_close, export, greedy, program, run, up_to
from tests.support.whisper import LENGTHS, MASK, RAGGED, switched
from tests.serving.test_onnx import small

pytestmark = pytest.mark.slow
STEPS = 40


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return engine_python(tmp_path_factory.mktemp("engine"), "onnxruntime")


def ending(model):
    """The model with scores that differ clearly, and hypotheses that end by themselves."""
    with torch.no_grad():
        model.final_logits_bias[0, EOS] = 9.0
    model.generation_config.update(forced_eos_token_id=None, bad_words_ids=[[PAD]])
    return model


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    model = ending(small("marian", "cape"))
    return model, export(model, tmp_path_factory.mktemp("marian"))


def generated(model, steps=STEPS, **given):
    tokens = model.generate(**given, num_beams=1, do_sample=False, max_new_tokens=steps)
    return [up_to(row[1:], EOS) for row in tokens.tolist()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_translations_are_those_of_the_model(translation, side):
    """Of a batch with padding, and of its sentences alone."""
    model, out = translation
    lengths = (3, 1, 9, 30, 17, 60, 2, 25, 12, 44)
    given = sentences(side == "left", lengths)
    expected = generated(model, **given)
    assert greedy(out, given, [PAD], EOS, STEPS, never=[PAD]) == expected
    ended = [row for row in expected if row[-1] == EOS]
    assert len(ended) > 5
    assert len({*map(tuple, expected)}) > 7
    assert max(map(len, ended)) > 3
    for row, tokens in enumerate(expected):
        alone = given["input_ids"][row][given["attention_mask"][row].bool()][None]
        alone = {"input_ids": alone, "attention_mask": torch.ones_like(alone)}
        assert greedy(out, alone, [PAD], EOS, STEPS, never=[PAD]) == [tokens]


def test_several_tokens_in_one_call_give_the_scores_of_one_after_the_other(translation):
    model, out = translation
    given, target = sentences(), torch.tensor([[PAD, 5, 9, 2]]).repeat(3, 1)
    states = run(out, "encoder", **given)
    empty = torch.zeros(3, 4, 0, 8)
    cache = {"past_0_key": empty, "past_0_value": empty}
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
    for length in (4, 50):
        given = sentences(lengths=(length,))
        (expected,) = generated(model, 256, **given)
        printed = run_program(python, program(out), *given["input_ids"][0].tolist(), cwd=out)
        assert [int(token) for token in printed.split()] == expected
    assert run_program(python, program(out), cwd=out)  # as it stands
    assert sorted(path.name for path in out.iterdir()) == [
        *("README.md", "decoder.onnx", "encoder.onnx", "generation_config.json")
    ]


def test_table_begins_anew_and_relative_distances_go_on(tmp_path):
    """A table of 40 rows and relative keys, exported at a length within them; by a command of its
    own."""
    model = small("bart", "abspos").float()
    model = ending(model)
    out = export(model, tmp_path)
    given = sentences(lengths=(90, 4))
    prompt = [PAD, *([EOS] if model.generation_config.forced_bos_token_id is not None else [])]
    tokens = model.generate(**given, num_beams=1, do_sample=False, max_new_tokens=60)
    print(tokens, prompt, model.generation_config, file=sys.stderr)
    assert out


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    model = switched("cape", encoder_layers=1, decoder_layers=1)
    model.generation_config.update(language="en", task="transcribe", max_length=None)
    return model, export(model, tmp_path_factory.mktemp("whisper"))


def test_greedy_transcripts_are_those_of_the_model(whisper, python, tmp_path):
    model, out = whisper
    tokens = model.generate(
        RAGGED, attention_mask=MASK, return_timestamps=False, num_beams=1, max_new_tokens=12
    )
    print(tokens, file=sys.stderr)
    hop = torch.full((3,), 10_000_000)
    given = {"input_features": RAGGED, "attention_mask": MASK, "hop_nanoseconds": hop}
    actual = greedy(out, given, [57, 52, 54, 60], 58, 12)
    print(actual, LENGTHS, file=sys.stderr)
    np.save(tmp_path / "frames.npy", RAGGED[:1].numpy())
    print(run_program(python, program(out), tmp_path / "frames.npy", cwd=out), file=sys.stderr)
