"""From waveforms to text: feature extractor, processor and the speech recognition pipeline."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, Wav2Vec2CTCTokenizer, Wav2Vec2Processor, pipeline

from cape_plugins.features import log_mel
from hf_models import CapeSpeechConfig, CapeSpeechFeatureExtractor, CapeSpeechForCTC

LETTERS = ("<pad>", "|", "<unk>", *"abcdefghij")
RATE = 8000


@pytest.fixture
def folder(tmp_path):
    """A saved recogniser with all its parts."""
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(LETTERS)}))
    tokenizer = Wav2Vec2CTCTokenizer(
        str(tmp_path / "vocab.json"), unk_token="<unk>", pad_token="<pad>", word_delimiter_token="|"
    )
    features = CapeSpeechFeatureExtractor(feature_size=20, sampling_rate=RATE)
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 32, "num_mel_bins": 20}
    config = CapeSpeechConfig(**sizes, vocab_size=len(LETTERS), sampling_rate=RATE)
    CapeSpeechForCTC(config).save_pretrained(tmp_path)
    processor = Wav2Vec2Processor(feature_extractor=features, tokenizer=tokenizer)
    processor.save_pretrained(tmp_path)
    return tmp_path


def speech(seconds=1.0):
    return np.random.default_rng(0).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


def test_processor_comes_back(folder):
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor.feature_extractor) is CapeSpeechFeatureExtractor
    batch = processor([speech(), speech(0.6)], sampling_rate=RATE, return_tensors="pt")
    assert batch["input_features"].shape == (2, 98, 20)
    assert batch["attention_mask"].sum(1).tolist() == [98, 58]
    expected = log_mel(torch.from_numpy(speech(0.6)), RATE, 20)
    assert torch.equal(batch["input_features"][1, :58], expected)
    assert (batch["input_features"][1, 58:] == 0).all()
    labels = processor(text="abc j").input_ids
    assert processor.decode(labels, group_tokens=False) == "abc j"


def test_hop_of_each_recording_reaches_the_model(folder):
    processor = AutoProcessor.from_pretrained(folder)
    hops = [0.01, 0.02]
    batch = processor.feature_extractor(
        [speech(), speech()], sampling_rate=RATE, hop_seconds=hops, return_tensors="pt"
    )
    assert batch["attention_mask"].sum(1).tolist() == [98, 49]
    assert batch["hop_seconds"].tolist() == pytest.approx(hops)
    model = CapeSpeechForCTC.from_pretrained(folder).eval()
    with torch.no_grad():
        together = model(**batch).logits
        alone = model(batch["input_features"][1:, :49], hop_seconds=0.02).logits
        wrong = model(batch["input_features"][1:, :49]).logits
    torch.testing.assert_close(together[1, :17], alone[0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(wrong, alone, atol=1e-4)


def test_pipeline_on_arrays(folder):
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
    ([], {}, "samples"),
    (np.zeros(10, np.float32), {}, "10 samples.*at least 200"),
    (np.zeros(1000, np.float32), {"sampling_rate": 16000}, "sampling_rate=16000.*8000"),
    (np.zeros(1000, np.float32), {"hop_seconds": 0.0}, "hop_seconds=0.0"),
    ([np.zeros(1000, np.float32)] * 2, {"hop_seconds": [0.01]}, "1 numbers for 2 recordings"),
    (np.zeros((1, 2, 1000), np.float32), {}, "one channel"),
]


@pytest.mark.parametrize(("recording", "options", "message"), BAD, ids=lambda v: str(v)[:30])
def test_bad_recordings_are_refused(recording, options, message):
    features = CapeSpeechFeatureExtractor(sampling_rate=RATE)
    with pytest.raises(ValueError, match=message):
        features(recording, **options)
