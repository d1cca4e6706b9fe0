"""Waveforms to text: feature extractor, processor and the speech recognition pipeline."""

import json
import pickle

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import AutoProcessor, AutoTokenizer, Wav2Vec2CTCTokenizer, pipeline
from transformers import Wav2Vec2Processor as Processor

from cape_plugins.speech.features import log_mel
from hf_models import CapeSpeechConfig, CapeSpeechForCTC, CapeSpeechTokenizer
from hf_models import CapeSpeechFeatureExtractor as FeatureExtractor

LETTERS = ("<pad>", "|", "<unk>", *"abcdefghij")
RATE = 8000


@pytest.fixture
def folder(tmp_path):
    """A saved recogniser with all its parts."""
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(LETTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(
        str(tmp_path / "vocab.json"), unk_token="<unk>", pad_token="<pad>", word_delimiter_token="|"
    )
    features = FeatureExtractor(feature_size=20, sampling_rate=RATE)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 32, "num_mel_bins": 20}
    config = CapeSpeechConfig(**sizes, vocab_size=len(LETTERS), sampling_rate=RATE)
    CapeSpeechForCTC(config).save_pretrained(tmp_path)
    Processor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(tmp_path)
    return tmp_path


def speech(seconds=1.0):
    return np.random.default_rng(0).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


def test_processor_is_saved_and_loaded(folder):
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor.feature_extractor) is FeatureExtractor
    batch = processor([speech(), speech(0.6)], sampling_rate=RATE, return_tensors="pt")
    assert batch["input_features"].shape == (2, 98, 20)
    assert batch["attention_mask"].sum(1).tolist() == [98, 58]
    expected = log_mel(torch.from_numpy(speech(0.6)), RATE, 20)
    assert torch.equal(batch["input_features"][1, :58], expected)
    assert (batch["input_features"][1, 58:] == 0).all()
    labels = processor(text="abc j").input_ids
    assert processor.decode(labels, group_tokens=False) == "abc j"


@pytest.mark.parametrize("make", [np.array, torch.tensor, list])
def test_hops_may_be_arrays(make):
    extractor = FeatureExtractor(feature_size=20, sampling_rate=RATE)
    batch = extractor([speech(), speech()], hop_seconds=make([0.01, 0.02]))
    assert batch["attention_mask"].sum(1).tolist() == [98, 49]
    assert batch["hop_nanoseconds"].tolist() == [10_000_000, 20_000_000]


def test_padding_and_truncation_count_frames():
    extractor = FeatureExtractor(feature_size=20, sampling_rate=RATE)
    fifty = {"padding": "max_length", "max_length": 50, "truncation": True}
    cut = extractor([speech(), speech(0.3)], **fifty, return_tensors="pt")
    assert cut["input_features"].shape == (2, 50, 20)
    assert cut["attention_mask"].sum(1).tolist() == [50, 28]
    wide = extractor([speech()], pad_to_multiple_of=32, return_tensors="pt")
    assert wide["input_features"].shape == (1, 128, 20)


def test_pipeline_on_arrays_equals_the_model(folder):
    recogniser = pipeline("automatic-speech-recognition", model=str(folder))
    processor = AutoProcessor.from_pretrained(folder)
    batch = processor(speech(), sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        logits = CapeSpeechForCTC.from_pretrained(folder).eval()(**batch).logits
    expected = processor.batch_decode(logits.argmax(-1))[0]
    assert recogniser({"raw": speech(), "sampling_rate": RATE})["text"] == expected
    assert recogniser(speech())["text"] == expected
    long = recogniser({"raw": speech(7), "sampling_rate": RATE}, chunk_length_s=3)["text"]
    assert isinstance(long, str)


BAD = [
    ("speech.wav", {}, r"raw_speech holds 'speech.wav' \(str\).*soundfile.read"),
    (["a.wav", "b.wav"], {}, r"raw_speech holds .*a.wav.*soundfile.read"),
    ([], {}, "samples"),
    (np.zeros(10, np.float32), {}, "10 samples.*at least 200"),
    (np.zeros(1000, np.float32), {"sampling_rate": 16000}, "sampling_rate=16000.*8000"),
    ([np.zeros(1000, np.float32)] * 2, {"hop_seconds": [0.01]}, "1 numbers for 2 recordings"),
    ([np.zeros(1000, np.float32)] * 2, {"hop_seconds": np.ones((2, 2))}, "4 numbers for 2"),
    (np.zeros((1, 2, 1000), np.float32), {}, "one channel"),
]


@pytest.mark.parametrize(("recording", "options", "message"), BAD, ids=lambda v: str(v)[:30])
def test_bad_recordings_are_refused(recording, options, message):
    features = FeatureExtractor(sampling_rate=RATE)
    with pytest.raises(ValueError, match=message):
        features(recording, **options)


SENTENCES = ["one two three", "four five six", "seven eight nine", "zero one four seven"]


def train_subwords(folder, **special):
    (folder / "text").write_text("\n".join(SENTENCES * 5))
    files = {"input": str(folder / "text"), "model_prefix": str(folder / "spm")}
    options = {"vocab_size": 40, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(**files, **options, **special)
    return folder / "spm.model"


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    special = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1}
    return train_subwords(tmp_path_factory.mktemp("spm"), **special)


def test_subwords_are_encoded_and_decoded(spm, tmp_path):
    tokenizer = CapeSpeechTokenizer(str(spm))
    for text in SENTENCES:
        ids = tokenizer(text).input_ids
        assert ids == tokenizer.pieces.encode(text)
        assert tokenizer.decode(ids, group_tokens=False) == text
    assert tokenizer("one", return_tensors="pt").input_ids.shape[0] == 1
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is CapeSpeechTokenizer
    assert again.get_vocab() == tokenizer.get_vocab()
    assert len(again) == len(tokenizer) == tokenizer.pieces.get_piece_size()
    assert (again.pad_token_id, again.unk_token_id) == (0, 1)
    assert again(SENTENCES[0]).input_ids == tokenizer(SENTENCES[0]).input_ids
    assert pickle.loads(pickle.dumps(again))(SENTENCES[0]) == again(SENTENCES[0])


def test_subwords_collapse_repeats_and_blanks(spm):
    tokenizer = CapeSpeechTokenizer(str(spm))
    pieces = tokenizer("one two").input_ids
    outputs = [0, 0, *(output for piece in pieces for output in (piece, piece, 0))]
    assert tokenizer.decode(outputs) == "one two"
    assert tokenizer.batch_decode([outputs, [0]]) == ["one two", ""]
    twice = tokenizer.decode([pieces[0], 0, pieces[0]]).replace(" ", "")
    assert twice == tokenizer.decode(pieces[:1]) * 2
    decoded = tokenizer.decode(outputs, output_word_offsets=True)
    assert [word["word"] for word in decoded.word_offsets] == ["one", "two"]
    first, second = decoded.word_offsets
    assert first["start_offset"] == 2
    assert first["end_offset"] < second["start_offset"]
    assert second["end_offset"] == len(outputs) - 1


def test_subwords_need_a_blank(tmp_path):
    with pytest.raises(ValueError, match="no piece '<pad>' for the blank"):
        CapeSpeechTokenizer(str(train_subwords(tmp_path)))
