"""Batches of recordings for the Trainer: padded ones of similar duration, and without padding; the
models of the paper."""

import numpy as np
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("transformers")
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, skip_first_batches
from torch.utils.data import BatchSampler
from transformers import Seq2SeqTrainingArguments, TrainerControl, TrainerState

from cape_plugins import PositionConfig
from cape_plugins.speech.batching import PaddingFreeBatches
from cape_plugins.speech.features import log_mel
from cape_plugins.speech.manifest import Utterance
from hf_models import CapeSpeechConfig, CapeSpeechFeatureExtractor, CapeSpeechForCTC
from recipes.asr import finetune_hf as asr
from recipes.asr.data import Collator, DurationSampler, Labelled, Recordings, SpeechTrainer
from recipes.lab.hf_checkpoints import make_config
from recipes.lab.steps import CommandError


@pytest.mark.parametrize(("ratio", "mixed"), [(1.36, False), (1.3, True)])
def test_durations_are_perturbed_by_15_percent(ratio, mixed):
    """As in CAPE Appendix C.3, by U(0.85, 1.15)."""
    sampler, pairs = DurationSampler([1.0, 1.0, ratio, ratio], 2, seed=0), set()
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        order = list(sampler)
        pairs |= {frozenset(order[:2]), frozenset(order[2:])}
    assert (pairs != {frozenset((0, 1)), frozenset((2, 3))}) == mixed


def test_batches_hold_similar_durations_in_another_order_each_epoch():
    seconds = np.random.default_rng(0).uniform(0.5, 20, 203)
    sampler = DurationSampler(seconds, 8, seed=3)
    first = list(sampler)
    assert sorted(first) == list(range(203))
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    assert {frozenset(second[i : i + 8]) for i in range(0, 200, 8)} != {
        frozenset(first[i : i + 8]) for i in range(0, 200, 8)
    }
    batches = np.array(first[:200]).reshape(-1, 8)
    longest = seconds[batches].max(1)
    padding = (longest[:, None] - seconds[batches]).sum() / seconds[batches].sum()
    shuffled = np.random.default_rng(1).permutation(200).reshape(-1, 8)
    unsorted = (seconds[shuffled].max(1)[:, None] - seconds[shuffled]).sum()
    assert padding < 0.3 < unsorted / seconds[shuffled].sum()
    order = np.argsort(longest)
    assert not np.array_equal(order, np.arange(25)), "batches come in random order"


@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_training_goes_on_with_the_batches_of_its_epoch(processes, tmp_path):
    """As accelerate shares padded batches out, and skips those that are done."""
    config = CapeSpeechConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1)
    place = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    items = [Utterance("0", None, "a", 1 + n / 7) for n in range(24)]
    data = Labelled(Recordings(items), [[1]] * 24)
    args = Seq2SeqTrainingArguments(**place, per_device_train_batch_size=2)
    trainer = SpeechTrainer(CapeSpeechForCTC(config), args, train_dataset=data)
    sampler = trainer._get_train_sampler()
    whole = BatchSampler(sampler, 2, drop_last=False)
    shard = BatchSamplerShard(whole, processes, processes - 1) if processes > 1 else whole
    loader = skip_first_batches(DataLoaderShard(data, batch_sampler=shard), 2)
    state = TrainerState(epoch=3.2)
    trainer.callback_handler.on_epoch_begin(args, state, TrainerControl())
    loader.set_epoch(3)
    expected = DurationSampler(data.seconds, 2, args.seed)
    expected.set_epoch(3)
    batches = np.array([*expected]).reshape(-1, processes, 2)[2:, -1]
    assert np.array_equal([*loader.batch_sampler], batches)


def test_batch_without_padding_has_the_frames_of_each_recording():
    """Frames are those of the recordings alone at their hops, without the skipped ones."""
    seconds = [1.0, 0.9, 0.8]
    rng = np.random.default_rng(1)
    waves = [rng.normal(0, 0.1, int(16000 * s)).astype("f") for s in seconds]
    items = [Utterance("0", wave, "a", s) for wave, s in zip(waves, seconds, strict=True)]
    data = Labelled(Recordings(items), [[1]] * 3)
    (hops,) = PaddingFreeBatches(seconds, 10)
    collate = Collator(CapeSpeechFeatureExtractor(8))
    batch = collate([data[hop] for hop in hops])
    features, times = batch["input_features"], batch["frame_nanoseconds"]
    assert features.shape[:2] == times.shape
    assert "attention_mask" not in batch
    for row, hop in enumerate(hops):
        alone = log_mel(torch.from_numpy(waves[hop.index]), 16000, 8, hop.seconds)
        kept = ((times[row] * 1e-9 - 0.0125) / hop.seconds).round().long()
        torch.testing.assert_close(features[row], alone[kept])
    again = collate([data[hop] for hop in hops])
    assert torch.equal(again["frame_nanoseconds"], times)


def test_recordings_are_told_from_others():
    """By texts and durations, which a test that is split off leaves fewer of."""
    rows = [Utterance(str(n), None, text, 1.0) for n, text in enumerate("abc")]
    others = ([*rows[:-1], rows[-1]._replace(text="d")], rows[:-1])
    others += ([*rows[:-1], rows[-1]._replace(seconds=1.001)],)
    assert Recordings(rows).fingerprint() == Recordings(rows[:]).fingerprint()
    assert len({Recordings(items).fingerprint() for items in (rows, *others)}) == 4


@pytest.mark.parametrize(("preset", "rate", "scale"), [("wsj", 0.4, 1.1), ("tedlium3", 0.1, 2.0)])
def test_preset_is_the_model_of_appendix_c2(preset, rate, scale, tmp_path, monkeypatch):
    """Sizes, dropout, table and positions, but for what `--model-config` changes."""
    built = []

    def stop(path, settings, sizes, tokenizer, seq2seq):
        built.append((make_config(CapeSpeechConfig, sizes), settings))
        raise CommandError("enough")

    monkeypatch.setattr(asr, "build_model", stop)
    data = Recordings([Utterance("0", None, "a", 1.0)])
    monkeypatch.setattr(asr, "synthetic", lambda: {"train": data, "test": data})
    words = ["--preset", preset, "--model-config", '{"encoder_layers": 30}', "--compare", "cape"]
    with pytest.raises(CommandError, match="enough"):
        asr.main([*words, "--output", str(tmp_path / "out")])
    ((config, settings),) = built
    assert (config.encoder_layers, config.d_model, config.encoder_ffn_dim) == (30, 768, 3072)
    assert (config.attention_dropout, config.activation_dropout, config.dropout) == (rate, rate, 0)
    assert (config.encoder_layerdrop, config.max_position_embeddings) == (rate, 460)
    positions = PositionConfig.from_dict(settings, "audio")
    assert (positions.max_global_scale, positions.max_global_shift) == (scale, 30)
