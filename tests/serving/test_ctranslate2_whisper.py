"""Whisper as a folder for CTranslate2: the same states and texts, at natural length, by
faster-whisper and by the engine alone."""

import json
import re

import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoProcessor, WhisperForConditionalGeneration

import hf_models
from hf_models.convert import convert
from tests.support.engines import export, program_of, run_program
from tests.support.whisper import save_with_processor
from tests.support.whisper_full import learn

pytest.importorskip("ctranslate2")
pytest.importorskip("faster_whisper")
import ctranslate2
import faster_whisper

from hf_models.serving import ctranslate2_whisper as exporter

TEXTS = ("cat", "dogs", "seven", "rain", "go", "night")
ROWS = 2000  # positions of 20 ms, beyond the 30 s of the stock model
NATURAL = {
    "cape": {"type": "cape", "mean_normalize": False},
    "nopos": {"type": "nopos"},
    "abspos": {"type": "abspos"},
    "relpos": {"type": "relpos", "relative_context": 4, "relative_beyond": "zero"},
}
NATURAL["cape+relative"] = {**NATURAL["cape"], "relative_context": 3, "relative_values": True}


def recording(number):
    """A tone, less than a second."""
    time = np.arange(9600 + 640 * number) / 16000
    return (0.3 * np.sin(2 * np.pi * 300 * (number + 1) * time)).astype(np.float32)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper") / "stock"
    save_with_processor(folder)
    return folder


@pytest.fixture(scope="module")
def trained(stock):
    """A cape_whisper at natural length that knows six recordings by heart."""
    folder = stock.parent / "trained"
    convert(str(stock), folder, NATURAL["cape"])
    learn(folder, [recording(number) for number in range(len(TEXTS))], list(TEXTS), steps=180)
    return folder


@pytest.fixture(scope="module")
def exported(trained):
    return export("ctranslate2", trained, trained.parent / "out", "--max-source-tokens", ROWS)


@pytest.fixture(scope="module")
def endless(stock):
    """An untrained cape_whisper whose texts never end."""
    folder = stock.parent / "endless"
    model = convert(str(stock), folder, NATURAL["cape"])
    model.generation_config.suppress_tokens = [model.config.eos_token_id]
    model.generation_config.save_pretrained(folder)
    return folder


@pytest.fixture
def check(tmp_path):
    """Options for a check."""
    soundfile.write(tmp_path / "recording.wav", recording(1), 16000)
    return ("--check", tmp_path / "recording.wav")


def with_positions(stock, folder, settings):
    torch.manual_seed(1)
    convert(str(stock), folder, settings)
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(folder).eval()
    return exporter.Recognition(model, AutoProcessor.from_pretrained(folder).tokenizer)


def view(features):
    return ctranslate2.StorageView.from_array(np.ascontiguousarray(features.numpy()))


def noise(frames):
    return torch.randn(1, 80, frames, generator=torch.Generator().manual_seed(frames))


def difference(recognition, engine, frames):
    """The largest, of the states of the model and of the engine for noise."""
    with torch.no_grad():
        states = recognition.model.get_encoder()(noise(frames)).last_hidden_state
    encoded = torch.from_numpy(np.array(engine.encode(view(noise(frames)))))
    assert encoded.shape[1] == states.shape[1]
    return (states - encoded).abs().max()


@pytest.mark.parametrize("name", NATURAL)
def test_states_equal_the_model_at_natural_length(name, stock, tmp_path, export_of):
    recognition = with_positions(stock, tmp_path / "model", NATURAL[name])
    out = export_of("ctranslate2", tmp_path / "model", "--max-source-tokens", ROWS)
    engine = ctranslate2.models.Whisper(str(out))
    for frames in (2, 130, 2 * ROWS):
        assert difference(recognition, engine, frames) < 1e-5, frames
    with pytest.raises(ValueError, match="Invalid input features shape|position"):
        engine.encode(view(noise(2 * ROWS + 2)))


def read(folder, number):
    """Features of a recording, and what the model hears in them by beam search."""
    processor = AutoProcessor.from_pretrained(folder)
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(folder).eval()
    inputs = processor.feature_extractor(
        recording(number), sampling_rate=16000, return_tensors="pt"
    )
    ids = model.generate(
        **inputs, language="en", task="transcribe", num_beams=5, early_stopping=True
    )
    return inputs["input_features"], processor.tokenizer.decode(ids[0], skip_special_tokens=True)


def test_texts_equal_generate(trained, exported):
    tokenizer = AutoProcessor.from_pretrained(trained).tokenizer
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(trained)
    prompt = exporter.prompt_of(exporter.Recognition(model, tokenizer))
    engine = ctranslate2.models.Whisper(str(exported))
    texts = set()
    for number in range(len(TEXTS)):
        features, text = read(trained, number)
        assert features.shape[-1] % 2 == 0
        (result,) = engine.generate(view(features), [prompt], beam_size=5, suppress_blank=False)
        assert tokenizer.decode(result.sequences_ids[0]) == text
        texts.add(text)
    assert len(texts) >= 4


def greedy(model, features, prompt, eos):
    """The most likely token at each step, without EOS, with every token allowed."""
    ids = torch.tensor([prompt])
    encoded = model.get_encoder()(features)
    for _ in range(64):
        logits = model(encoder_outputs=encoded, decoder_input_ids=ids).logits
        token = logits[:, -1:].argmax(-1)
        if token.item() == eos:
            break
        ids = torch.cat((ids, token), dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_the_program_of_the_readme_runs_with_the_engine_alone(trained, exported, check):
    told = run_program(program_of(exported), exported, check[-1])
    assert told.strip() == read(trained, 1)[1].strip()


def test_faster_whisper_transcribes_what_the_model_would(trained, exported):
    """In segments that are padded to 30 s; the kind of features stands in the file that it reads,
    which newer processors do not write."""
    settings = json.loads((exported / "preprocessor_config.json").read_text("utf-8"))
    assert settings["hop_length"] == 160
    loaded = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(trained).eval()
    tokenizer = AutoProcessor.from_pretrained(trained).tokenizer
    model = faster_whisper.WhisperModel(str(exported), device="cpu")
    options = {"beam_size": 1, "temperature": 0, "without_timestamps": True, "max_new_tokens": 20}
    free = {"suppress_tokens": [], "suppress_blank": False, "no_speech_threshold": None}
    prompt = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])
    audio = recording(1)
    (segment,) = model.transcribe(audio, **options, **free)[0]
    features = torch.from_numpy(model.feature_extractor(audio)[None, :, :-1])
    padded = torch.nn.functional.pad(features, (0, 3000 - features.shape[-1]))
    with torch.no_grad():
        expected = greedy(loaded, padded, prompt, tokenizer.eos_token_id)
    # without what stands behind a timestamp
    assert segment.tokens == expected[: len(segment.tokens)]
    assert len(segment.tokens) > 2


def test_centred_positions_fit_recordings_of_one_length(stock, tmp_path, export_of):
    recognition = with_positions(stock, tmp_path / "model", {"type": "cape"})
    out = export_of("ctranslate2", tmp_path / "model")
    readme = (out / "README.md").read_text("utf-8")
    assert "the table is for 3000 frames, 30 seconds" in readme
    assert "model.transcribe(recording" in readme
    engine = ctranslate2.models.Whisper(str(out))
    for frames in (3000, 1000):
        assert (difference(recognition, engine, frames) < 1e-5) == (frames == 3000)


def test_check_compares_a_text_that_does_not_end(endless, check, export_of, capsys):
    export_of("ctranslate2", endless, *check)
    assert re.search(r"check: 64 of 64 tokens of \d\.\d s of the", capsys.readouterr().out)


@pytest.mark.parametrize("wrong", ["encoder", "decoder"])
def test_check_refuses_other_positions(wrong, trained, check, refusal_of, monkeypatch):
    """Of the decoder, though the encoder is right."""
    table = exporter.RecognitionLoader.table

    def one_row_off(loader, stack, side):
        return table(loader, stack, side).roll(int(side == wrong), dims=0)

    monkeypatch.setattr(exporter.RecognitionLoader, "table", one_row_off)
    assert "has not been written" in refusal_of("ctranslate2", trained, *check)


def test_the_program_writes_texts_as_long_as_the_model_does(endless, check, export_of, monkeypatch):
    out = export_of("ctranslate2", endless, "--max-target-tokens", 448)
    monkeypatch.setattr("sys.argv", ["program", str(out), str(check[-1])])
    names = {}
    exec(program_of(out), names)
    assert len(names["result"].sequences_ids[0]) == 448 - 4  # tokens before the text


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"type": "randpos", "random_evaluation": True}, "the same positions in each call"),
        ({"type": "rope"}, "rope is not allowed for ctranslate2, which turns queries and keys"),
    ],
)
def test_positions_that_the_engine_does_not_have_are_refused(
    settings, told, stock, tmp_path, refusal_of
):
    with_positions(stock, tmp_path / "model", settings)
    assert told in refusal_of("ctranslate2", tmp_path / "model")


def test_decoder_whose_positions_the_engine_would_leave_out_is_refused(stock, tmp_path, refusal_of):
    settings = {"type": "sinpos"}
    model = hf_models.switch(
        WhisperForConditionalGeneration.from_pretrained(stock),
        settings,
        decoder_position_embedding={**settings, "relative_context": 2},
    )
    AutoProcessor.from_pretrained(stock).save_pretrained(tmp_path / "model")
    error = refusal_of("ctranslate2", model)
    assert "relative_context=2 beside position embedding 'sinpos' is not allowed" in error


@pytest.mark.parametrize(
    ("task", "told"),
    [("ConditionalGeneration", "processor.save"), ("AudioClassification", "export onnx")],
)
def test_classifiers_and_models_without_processor_are_refused(task, told, trained, refusal_of):
    model = getattr(hf_models, f"CapeWhisperFor{task}").from_pretrained(trained)
    assert told in refusal_of("ctranslate2", model)
