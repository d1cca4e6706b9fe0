"""``cape-plugins export onnx``: graphs of images, recordings and texts at sizes that the export has
not seen, and greedy tokens with a cache, in a process without torch."""

import numpy as np
import onnxruntime
import pytest
import torch

from hf_models.serving import onnx
from tests.support.engines import program_of, run_program
from tests.support.hf import EOS, PAD, sentences
from tests.support.onnx_graphs import assert_close, export_saved, greedy, run, small, up_to
from tests.support.whisper import GENERATION, LENGTHS, MASK, RAGGED, SPECIAL, switched

pytestmark = pytest.mark.slow
STEPS = 50
SENTENCES = (3, 1, 9, 30, 17, 90, 2, 25, 12, 44)


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Its weights stand beside the graph, as large ones do."""
    model = small("vit", "cape+relative")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx, "ONE_FILE", 0)
        return model, export_saved(model, tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def ctc(tmp_path_factory):
    model = small("speech_ctc", "cape")
    return model, export_saved(model, tmp_path_factory.mktemp("ctc"))


def test_images_of_any_size(vit):
    model, out = vit
    assert {path.name for path in out.iterdir()} == {"README.md", "model.onnx", "model.onnx.data"}
    for number, size in enumerate(((8, 8), (8, 40), (9, 17), (97, 50), (128, 128))):
        images = torch.randn(1 + 2 * (number % 2), 3, *size)
        with torch.no_grad():
            expected = model(images).logits
        assert_close(run(out, "model", pixel_values=images)["logits"], expected)
        assert expected.abs().max() > 0.1


@pytest.mark.parametrize("frames", [1, 7, 300])
def test_recordings_of_any_length(ctc, frames):
    """Alone and in a batch with padding, at the hop of each."""
    model, out = ctc
    features, hop = torch.randn(3, frames, 8), torch.tensor([10_000_000, 12_500_000, 8_000_000])
    lengths = torch.tensor([frames, max(1, frames - 5), max(1, frames // 2)])
    mask = (torch.arange(frames) < lengths[:, None]).long()
    inputs = {"input_features": features, "attention_mask": mask, "hop_nanoseconds": hop}
    for rows in (3, 1):
        inputs = {name: value[:rows] for name, value in inputs.items()}
        with torch.no_grad():
            expected = model(**inputs).logits
        actual = run(out, "model", **inputs)
        assert_close(actual["logits"], expected)
        assert actual["lengths"].tolist() == [-(-int(n) // 3) for n in lengths[:rows]]
    if frames > 1:
        other = run(out, "model", **{**inputs, "hop_nanoseconds": hop[1:2]})
        assert (other["logits"] - actual["logits"]).abs().max() > 1e-3


def test_programs_of_the_readme_need_nothing_but_the_engine(vit, ctc, tmp_path):
    model, out = vit
    image = np.random.default_rng(1).normal(size=(3, 24, 56)).astype(np.float32)
    np.save(tmp_path / "image.npy", image)
    printed = run_program(program_of(out), tmp_path / "image.npy", cwd=out)
    with torch.no_grad():
        assert int(printed) == model(torch.from_numpy(image)[None]).logits.argmax().item()
    model, out = ctc
    frames = np.random.default_rng(1).normal(size=(1, 61, 8)).astype(np.float32)
    np.save(tmp_path / "frames.npy", frames)
    printed = run_program(program_of(out), tmp_path / "frames.npy", cwd=out)
    with torch.no_grad():
        best = model(torch.from_numpy(frames)).logits[0].argmax(-1)
    best = [token for token in torch.unique_consecutive(best).tolist() if token != 0]
    assert best
    assert [int(token) for token in printed.split()] == best
    assert run_program(program_of(out), cwd=out)  # as it stands


def test_frames_of_any_length_enter_an_encoder_with_a_stock_front_end(tmp_path):
    encoder, _ = onnx.graphs(small("speech_to_text", "cape").eval())
    onnx.write(encoder, tmp_path / "encoder.onnx", 20)
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx")
    assert "in 12 batches" in onnx.compared(encoder, session, [encoder.sample, *encoder.others])


def test_plain_exporter_takes_a_model_with_relative_positions(tmp_path):
    """By torch.onnx.export, which transformers.exporters call as well."""
    model, path = small("bert", {"type": "relpos", "relative_context": 3}), tmp_path / "model.onnx"
    inputs = sentences(True, (27, 12))
    sizes = {name: {0: "batch", 1: "length"} for name in inputs}
    torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, dynamic_shapes=sizes)
    session = onnxruntime.InferenceSession(path)
    for lengths in ((1,), (90, 7, 30)):
        inputs = sentences(True, lengths)
        (actual, *_) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        with torch.no_grad():
            assert_close(torch.from_numpy(actual), model(**inputs).logits)


@pytest.fixture(scope="module")
def translation(tmp_path_factory):
    """A table of 40 rows with relative keys and values, both traced at a length that they cover,
    and a BOS hint; scores that differ clearly, and hypotheses of which many end by themselves."""
    settings = {"type": "abspos", "relative_context": 3, "relative_values": True}
    model = small("marian", {**settings, "source_bos": True}, seed=3, init_std=0.5)
    with torch.no_grad():
        model.final_logits_bias[0, EOS] = 6.0
    model.generation_config.update(forced_eos_token_id=None, bad_words_ids=[[PAD]])
    return model, export_saved(model, tmp_path_factory.mktemp("marian"))


def generated(model, steps=STEPS, **inputs):
    tokens = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=steps)
    return [up_to(row[1:], EOS) for row in tokens.tolist()]


@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy_translations_equal_the_model(translation, side):
    """Of a batch with padding, and of some of its sentences alone: the table begins anew, and
    distances go on."""
    model, out = translation
    inputs = sentences(side == "left", SENTENCES)
    expected = generated(model, **inputs)
    assert greedy(out, inputs, [PAD], EOS, STEPS, never=[PAD]) == expected
    assert len({*map(tuple, expected)}) > 8
    assert sum(0 < len(tokens) < STEPS for tokens in expected) > 4  # ended by themselves
    assert max(map(len, expected)) > 40
    for number in (1, 5) if side == "left" else ():
        ids, mask = (values[number] for values in inputs.values())
        tokens, ids = expected[number], ids[mask.bool()][None]
        alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert greedy(out, alone, [PAD], EOS, STEPS, never=[PAD]) == [tokens]


def test_program_of_the_readme_translates_with_the_engine_alone(translation):
    model, out = translation
    for length in SENTENCES[:2]:
        inputs = sentences(lengths=(length,))
        (expected,) = generated(model, 256, **inputs)
        printed = run_program(program_of(out), *inputs["input_ids"][0].tolist(), cwd=out)
        assert up_to([int(token) for token in printed.split()], EOS) == expected
    assert run_program(program_of(out), cwd=out)  # as it stands
    files = {"README.md", "decoder.onnx", "encoder.onnx", "generation_config.json"}
    assert {path.name for path in out.iterdir()} == files


def test_greedy_transcripts_equal_the_model(tmp_path):
    """Of recordings with padding, at their natural length, and of one by the README's program."""
    model = switched("cape", encoder_layers=1, decoder_layers=1, init_std=1.0)
    settings = model.generation_config
    settings.language, settings.task, settings.max_length = "en", "transcribe", None
    settings._from_model_config = False  # else what Whisper alone has is not loaded
    out = export_saved(model, tmp_path, "--check")
    end, pad = SPECIAL["eos_token_id"], SPECIAL["pad_token_id"]
    tokens = model.generate(
        RAGGED, attention_mask=MASK, return_timestamps=False, num_beams=1, max_new_tokens=12
    )
    expected = [up_to(row, pad) for row in tokens.tolist()]
    assert len({*map(len, expected)}) > 1  # some ended by themselves
    hop = torch.full((len(LENGTHS),), 10_000_000)
    inputs = {"input_features": RAGGED, "attention_mask": MASK, "hop_nanoseconds": hop}
    prompt = [57, GENERATION["lang_to_id"]["<|en|>"], GENERATION["task_to_id"]["transcribe"], 60]
    assert greedy(out, inputs, prompt, end, 12) == expected
    np.save(tmp_path / "frames.npy", RAGGED[1:2, :, : LENGTHS[1]].numpy())
    printed = run_program(program_of(out), tmp_path / "frames.npy", cwd=out)
    assert up_to([int(token) for token in printed.split()], end)[:12] == expected[1]


def test_texts_go_on_as_the_model_does(tmp_path):
    """Of a batch that is padded on the left, and of one text by the README's program."""
    model = small("llama", "cape")
    out = export_saved(model, tmp_path)
    inputs = sentences(True, (9, 6, 1))
    expected = [tokens[8:] for tokens in generated(model, 20, **inputs)]
    assert len({*map(tuple, expected)}) == 3
    session = onnxruntime.InferenceSession(out / "model.onnx")
    names = [output.name for output in session.get_outputs()]
    new, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = dict.fromkeys(("past_0_key", "past_0_value"), torch.zeros(3, 2, 0, 8))
    seen, chosen = mask[:, :0], []
    for _ in range(20):
        state = {"input_ids": new, "attention_mask": mask, "cache_mask": seen, **cache}
        values = session.run(None, {name: value.numpy() for name, value in state.items()})
        output = dict(zip(names, map(torch.from_numpy, values), strict=True))
        cache = {name: output[name.replace("past", "present")] for name in cache}
        new = output["logits"][:, -1:].argmax(-1)
        seen, mask = torch.cat((seen, mask), 1), torch.ones_like(new)
        chosen.append(new)
    assert [up_to(row, EOS) for row in torch.cat(chosen, 1).tolist()] == expected
    printed = run_program(program_of(out), *inputs["input_ids"][0].tolist(), cwd=out)
    assert up_to([int(token) for token in printed.split()], EOS)[:20] == expected[0]
