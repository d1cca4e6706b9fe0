"""Speech models: time, hops, padding, lengths and generation."""

import re

import pytest
import torch

from cape_plugins import PositionConfig
from cape_plugins.speech.batching import frame_nanoseconds
from hf_models import CapeSpeechConfig
from tests.support.hf import AUDIO, batch, frames, make, seam, targets

each_family = pytest.mark.parametrize("family", ["speech_ctc", "speech_to_text"])


@each_family
@pytest.mark.parametrize("name", AUDIO)
def test_batch_equals_its_samples(name, family):
    """What stands on padding does not matter, either."""
    model, inputs = make(family, name), frames()
    junk, ids = dict(inputs), targets(3, 5) % 40
    pads = inputs["attention_mask"].eq(0)[..., None]
    junk["input_features"] = inputs["input_features"].masked_fill(pads, 7.0)

    @torch.no_grad()
    def logits(rows, **inputs):
        decoder = {} if family == "speech_ctc" else {"decoder_input_ids": ids[rows]}
        return model(**inputs, **decoder).logits

    batches = [logits(slice(3), **batch) for batch in (inputs, junk)]
    for row, length in enumerate((50, 41, 22)):
        alone = logits([row], input_features=inputs["input_features"][[row], :length])[0]
        outputs = -(-length // 3) if family == "speech_ctc" else 5
        assert len(alone) == outputs
        for together in batches:
            torch.testing.assert_close(together[row, :outputs], alone, atol=2e-5, rtol=1e-4)


def coordinates(**hop):
    """Of the frames of a batch, in the encoder of a model for CTC."""
    model, seen = make("speech_ctc", "sinpos"), []
    encoding = seam(model).encoding
    for method in ("forward", "grid"):
        stock = getattr(type(encoding), method)
        setattr(encoding, method, lambda c, stock=stock: (seen.append(c), stock(encoding, c))[1])
    model(**frames(), **hop)
    return seen[0].reshape(-1, seen[0].shape[-2]) if seen[0].dim() == 3 else seen[0].T


def test_positions_are_the_centres_of_frames_in_seconds():
    """Convolutions of stride 3; window of 25 ms."""
    times = coordinates()
    torch.testing.assert_close(times[0], 0.0125 + 0.03 * torch.arange(17.0))
    times = coordinates(hop_nanoseconds=20_000_000)
    torch.testing.assert_close(times[0], 0.0125 + 0.06 * torch.arange(17.0))
    hops = torch.tensor([10_000_000, 12_000_000, 20_000_000])
    times = coordinates(hop_nanoseconds=hops)
    torch.testing.assert_close(times, 0.0125 + 3e-9 * hops[:, None] * torch.arange(17.0))


def test_loss_is_ctc_over_true_lengths():
    model, inputs = make("speech_ctc", "cape"), frames()
    labels = targets(3, 4) % 11 + 1
    labels[2, 2:] = -100
    with torch.no_grad():
        out = model(**inputs, labels=labels)
    lengths, sizes = torch.tensor([17, 14, 8]), torch.tensor([4, 4, 2])
    expected = torch.nn.functional.ctc_loss(
        out.logits.log_softmax(-1).transpose(0, 1), labels.clamp(min=0), lengths, sizes,
        blank=0, zero_infinity=True,
    )  # fmt: skip
    torch.testing.assert_close(out.loss, expected)
    frame_counts = torch.tensor([50, 41, 22])
    assert model._get_feat_extract_output_lengths(frame_counts).tolist() == lengths.tolist()


@each_family
@pytest.mark.parametrize("name", AUDIO)
def test_batch_without_padding_equals_its_samples(name, family):
    """Irregular times, no mask; the loss, too, equals the loss of the samples one by one."""
    model, features = make(family, name), frames((40, 40, 40))["input_features"]
    frame_numbers = torch.stack([torch.randperm(55)[:40].sort().values for _ in range(3)])
    inputs = {
        "input_features": features,
        "frame_nanoseconds": frame_nanoseconds(frame_numbers, [0.009, 0.01, 0.0112]),
    }
    labels = targets(3, 4) % 11 + 1
    with torch.no_grad():
        labelled = {**inputs, "labels": labels}
        batch = model(**labelled)
        alone = [model(**{k: value[[row]] for k, value in labelled.items()}) for row in range(3)]
        other = model(input_features=features, labels=labels)
    logits = torch.cat([output.logits for output in alone])
    torch.testing.assert_close(batch.logits, logits, atol=2e-5, rtol=1e-4)
    losses = torch.stack([output.loss for output in alone])
    torch.testing.assert_close(batch.loss, losses.mean())
    encoding = model.config.position_config.encoding
    timed = encoding.in_attention or (encoding.adds and not encoding.counts)
    assert timed == (not torch.allclose(batch.logits, other.logits, atol=1e-4)), "times matter"


PAPER_RATES = {"wsj": (0.4, 1.1), "tedlium3": (0.1, 2.0)}  # dropout, scale of the positions


@pytest.mark.parametrize("corpus", PAPER_RATES)
def test_presets_are_the_models_of_the_paper(corpus, tmp_path):
    """CAPE Appendix C.2: dropout and layer drop in the layers, 0.3 after the convolution, none on
    residual branches; a table of 13.8 s in steps of 30 ms."""
    rate, scale = PAPER_RATES[corpus]
    config = CapeSpeechConfig.preset(corpus, vocab_size=29)
    assert (config.encoder_layers, config.d_model, config.encoder_ffn_dim) == (36, 768, 3072)
    assert (config.encoder_attention_heads, config.layer_norm) == (4, "post")
    layers = (config.attention_dropout, config.activation_dropout, config.encoder_layerdrop)
    assert layers == (rate, rate, rate)
    assert (config.dropout, config.feature_dropout) == (0.0, 0.3)
    assert (config.conv_kernel_size, config.conv_stride) == (7, 3)
    assert (config.max_position_embeddings, config.vocab_size) == (460, 29)
    assert config.position_config == PositionConfig("cape", "audio", max_global_scale=scale)
    config.save_pretrained(tmp_path)
    assert CapeSpeechConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    other = CapeSpeechConfig.preset(corpus, position_embedding={"type": "abspos"})
    assert other.position_config.type == "abspos"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="preset='timit' is unknown; allowed: wsj, tedlium3"):
        CapeSpeechConfig.preset("timit")
    model = make("speech_ctc", "cape")
    with pytest.raises(ValueError, match=r"no frame.*at least one"):
        model(torch.zeros(1, 0, 8))
    with pytest.raises(ValueError, match=r"label 12.*0 to 11"):
        model(**frames(), labels=torch.full((3, 2), 12))


HOPS = [
    (0.01, "hop_nanoseconds=0.01 "),
    (True, "hop_nanoseconds=True "),
    (torch.tensor([1e7, 1e7, 1e7]), "hop_nanoseconds has dtype torch.float32"),
    (torch.tensor([10_000_000, 10_000_000]), "hop_nanoseconds has shape (2,)"),
    (torch.tensor(20_000_000_000), "hop_nanoseconds holds 20000000000;"),
]


@pytest.mark.parametrize(("hop", "message"), HOPS, ids=[message[:40] for _, message in HOPS])
def test_hop_that_is_no_number_of_nanoseconds_is_refused(hop, message):
    with pytest.raises(ValueError, match=re.escape(message) + ".*10_000_000 for 10 ms"):
        make("speech_ctc", "sinpos")(**batch("speech_ctc"), hop_nanoseconds=hop)


@each_family
@pytest.mark.parametrize("columns", [49, 51])
def test_mask_of_another_width_than_the_features_is_refused(family, columns):
    inputs = {**batch(family), "attention_mask": torch.ones(3, columns, dtype=torch.long)}
    with pytest.raises(ValueError, match=rf"attention_mask has shape \(3, {columns}\).*\(3, 50\)"):
        make(family, "sinpos")(**inputs)
