"""whisper.cpp writes the texts of transformers at natural length, from the exported file."""

import numpy as np
import pytest
import soundfile
from transformers import AutoProcessor

import hf_models
from hf_models.convert import convert
from hf_models.serving.ggml_file import special_tokens
from tests.support.engines import export, program_of
from tests.support.whisper_full import TOKENS, learn, save_full

pytest.importorskip("pywhispercpp")
import _pywhispercpp
from pywhispercpp.model import Model

TEXTS = ("cat", "dogs", "seven", "rain", "go", "night", "one two", "three four five")
OPTIONS = {"language": "en", "no_timestamps": True, "single_segment": True, "n_threads": 1}
OPTIONS |= {"suppress_blank": False, "temperature_inc": 0.0, "print_progress": False}


def recording(number):
    """A tone of 1.1 to 2.5 s."""
    time = np.arange(18000 + 3200 * number) / 16000
    return (0.3 * np.sin(2 * np.pi * 300 * (number + 1) * time)).astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    save_full(folder / "stock")
    convert(str(folder / "stock"), folder / "trained", {"type": "cape", "mean_normalize": False})
    learn(folder / "trained", [recording(number) for number in range(len(TEXTS))], list(TEXTS))
    return folder / "trained"


@pytest.fixture(scope="module")
def exported(trained):
    return export("ggml", trained, trained.parent / "out")


def texts_of_host(folder):
    processor = AutoProcessor.from_pretrained(folder)
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(folder).eval()
    texts = []
    for number in range(len(TEXTS)):
        inputs = processor.feature_extractor(
            recording(number), sampling_rate=16000, return_tensors="pt"
        )
        ids = model.generate(**inputs, language="en", task="transcribe", return_timestamps=False)
        texts.append(processor.tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    return texts


def texts_of_engine(folder, audio_ctx, **context):
    file, context = str(folder / "ggml-model.bin"), {"use_gpu": False, **context}
    model, texts = Model(file, redirect_whispercpp_logs_to=None, context_params=context), []
    for audio in map(recording, range(len(TEXTS))):
        segments = model.transcribe(audio, audio_ctx=audio_ctx(audio), **OPTIONS)
        texts.append("".join(segment.text for segment in segments).strip())
    return texts


def natural(audio):
    return -(-len(audio) // 320)


def test_texts_at_natural_length_equal_transformers(trained, exported):
    expected = texts_of_host(trained)
    assert expected == list(TEXTS)
    assert texts_of_engine(exported, natural, flash_attn=False) == expected


def test_padding_and_flash_attention_change_texts_as_the_readme_warns(exported):
    """If this fails, the engine has changed, and docs/serving.md tells too much."""
    assert texts_of_engine(exported, natural, flash_attn=True) != list(TEXTS)
    assert texts_of_engine(exported, lambda audio: 0, flash_attn=False) != list(TEXTS)


def test_the_program_of_the_readme_runs(exported, tmp_path, monkeypatch, capsys):
    path = tmp_path / "recording.wav"
    soundfile.write(path, recording(7), 16000, subtype="PCM_16")
    monkeypatch.setattr("sys.argv", ["program", str(exported), str(path)])
    exec(program_of(exported), {})
    assert capsys.readouterr().out.strip() == TEXTS[7]


def test_the_engine_finds_special_tokens_where_the_export_expects_them(exported):
    parameters = _pywhispercpp.whisper_context_default_params()
    context = _pywhispercpp.whisper_init_from_file_with_params(
        str(exported / "ggml-model.bin"), parameters
    )
    names = ("eot", "sot", "translate", "transcribe", "not")
    found = [getattr(_pywhispercpp, f"whisper_token_{name}")(context) for name in names]
    expected = special_tokens(TOKENS)
    del expected["<|en|>"]
    assert found == list(expected.values())
    _pywhispercpp.whisper_free(context)
