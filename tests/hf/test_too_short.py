"""The programs of docs/too_short.md, on tiny stock checkpoints with the tables of the real ones:
inputs are longer than the limit of the stock model, and the models accept these inputs."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    AutoModelForVideoClassification,
)

from tests.support.stock_checkpoints import save_named

PAGE = (Path(__file__).resolve().parents[2] / "docs/too_short.md").read_text("utf-8")
# the program of each section, by its heading; empty if it has none
SECTIONS = {
    section.partition("\n")[0]: section.partition("```python\n")[2].partition("```\n")[0]
    for section in PAGE.split("\n## ")[1:]
}
TABLES = {"BERT": 512, "BART": 1024, "Translation": 512}  # rows of the real checkpoints
FRAMES = 1500  # of 20 ms: a segment of Whisper


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program of a section, which may warn of nothing; returns its variables."""

    def run(section):
        (code,) = [code for title, code in SECTIONS.items() if title.startswith(section)]
        save_named(code, tmp_path)
        monkeypatch.chdir(tmp_path)
        variables = {}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            # of releases on which `python -m tests.families` has not run
            warnings.filterwarnings("ignore", "the family of .* has not been shown", UserWarning)
            # of the stock extractor of AST, where torchaudio is missing
            warnings.filterwarnings("ignore", "At least one mel filter", UserWarning)
            exec(compile(code, section, "exec"), variables)
        return variables

    return run


def encoder_states(model, inputs):
    return model.get_encoder()(**inputs).last_hidden_state


@pytest.mark.parametrize("section", TABLES)
def test_a_text_longer_than_the_stock_table_is_read(run, section):
    variables = run(section)
    length = len(variables["tokenizer"](variables["text"])["input_ids"])
    assert length > TABLES[section]
    assert variables["model"].config.max_position_embeddings == TABLES[section]
    assert variables["model"].config.position_embedding["type"] == "relpos"
    if section == "BERT":
        assert variables["scores"].isfinite().all()
    else:
        (tokens,) = [variables[name] for name in ("summary", "translation") if name in variables]
        assert tokens.shape[1] > 1


def test_a_text_longer_than_a_table_of_a_generated_family_is_read(run):
    variables = run("RoBERTa")
    assert variables["scores"].shape[1] > 512
    assert variables["scores"].isfinite().all()


def test_a_longer_table_reads_a_text_up_to_the_new_limit(run):
    variables = run("A longer")
    assert len(variables["tokenizer"](variables["text"])["input_ids"]) > 2000
    assert variables["scores"].shape[1] == 2000
    assert variables["model"].config.max_position_embeddings > 2000
    assert variables["scores"].isfinite().all()


def test_a_caption_longer_than_the_table_is_embedded(run):
    """Words far behind the table change the embedding."""
    variables = run("CLIP")
    model, tokenizer, text = (variables[name] for name in ("model", "tokenizer", "text"))
    other = tokenizer(text[:-6] + "two. ", return_tensors="pt")
    assert other["input_ids"].shape[1] > 77
    captions = [variables["caption"], model.get_text_features(**other)]
    first, second = (getattr(caption, "pooler_output", caption) for caption in captions)
    assert first.isfinite().all()
    assert not torch.allclose(first, second)


def test_a_short_recording_is_not_padded_to_30_seconds(run):
    variables = run("Whisper under")
    assert encoder_states(variables["model"], variables["inputs"]).shape[1] == 5 * FRAMES // 30
    assert variables["tokens"].shape[1] > 1


def test_a_long_recording_is_encoded_as_a_whole(run):
    variables = run("Whisper over")
    assert encoder_states(variables["model"], variables["inputs"]).shape[1] == 40 * FRAMES // 30
    assert variables["tokens"].shape[1] > 1


def test_a_sound_longer_than_the_table_is_classified(run):
    variables = run("Audio spectrogram")
    features = variables["extractor"](variables["sound"], sampling_rate=16_000, return_tensors="pt")
    assert features["input_values"].shape == (1, 3000, 128)
    assert variables["scores"].isfinite().all()
    stock = AutoModelForAudioClassification.from_pretrained(variables["path"])
    with pytest.raises(RuntimeError, match="size of tensor"):
        stock(**features)


def test_a_video_of_more_frames_is_classified(run):
    """The frames behind the sixteenth change the scores."""
    variables = run("VideoMAE")
    model, video, scores = (variables[name] for name in ("model", "video", "scores"))
    assert model.config.num_frames == 16
    assert scores.isfinite().all()
    assert not torch.allclose(model(video.index_fill(1, torch.arange(16, 32), 0.0)).logits, scores)
    stock = AutoModelForVideoClassification.from_pretrained(variables["path"])
    with pytest.raises(RuntimeError, match="size of tensor"):
        stock(video)


def test_another_image_size_is_the_stock_model_with_its_flag(run):
    variables = run("ViT")
    stock = AutoModelForImageClassification.from_pretrained(variables["path"])
    with pytest.raises(ValueError, match="doesn't match"):
        stock(variables["images"])
    expected = stock(variables["images"], interpolate_pos_encoding=True).logits
    torch.testing.assert_close(variables["scores"], expected, rtol=0, atol=0)
