"""Batches of recordings for the Trainer: padded ones of similar duration, and without padding; the
models of the paper; a Whisper padded to 30 s and at natural length."""

import copy
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("transformers")
import soundfile
import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, skip_first_batches
from torch.utils.data import BatchSampler
from transformers import Seq2SeqTrainingArguments, TrainerControl, TrainerState

from cape_plugins import PositionConfig
from cape_plugins.speech.batching import PaddingFreeBatches
from cape_plugins.speech.features import log_mel
from cape_plugins.speech.manifest import Utterance
from hf_models import CapeSpeechConfig, CapeSpeechFeatureExtractor, CapeSpeechForCTC
from recipes.asr import distil, whisper
from recipes.asr import finetune_hf as asr
from recipes.asr.data import Collator, DurationSampler, Labelled, Recordings, SpeechTrainer
from recipes.lab.hf_checkpoints import make_config
from recipes.lab.steps import CommandError
from tests.support.tables import read_csv


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
    assert list(sampler) != first
    batches = seconds[np.array(first[:200]).reshape(-1, 8)]
    longest = batches.max(1)
    assert (longest[:, None] - batches).sum() < 0.3 * batches.sum()
    assert not np.array_equal(np.argsort(longest), np.arange(25)), "batches come in random order"


@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_training_goes_on_with_the_batches_of_its_epoch(processes, tmp_path):
    """As accelerate shares padded batches out, and skips those that are done."""
    config = CapeSpeechConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1)
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    items = [Utterance("0", None, "a", 1 + n / 7) for n in range(24)]
    data = Labelled(Recordings(items), [[1]] * 24)
    args = Seq2SeqTrainingArguments(**common, per_device_train_batch_size=2)
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
    """Frames equal the frames of each recording alone at its hop, without the skipped ones."""
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
        frame_numbers = ((times[row] * 1e-9 - 0.0125) / hop.seconds).round().long()
        torch.testing.assert_close(features[row], alone[frame_numbers])
    again = collate([data[hop] for hop in hops])
    assert torch.equal(again["frame_nanoseconds"], times)


def test_preset_is_the_model_of_appendix_c2(tmp_path, monkeypatch):
    """Sizes, table and positions (tests/hf/test_speech.py), but for what `--model-config` says."""
    built = []

    def stop(path, settings, sizes, tokenizer, seq2seq):
        built.append((make_config(CapeSpeechConfig, sizes), settings))
        raise CommandError("enough")

    monkeypatch.setattr(asr, "build_model", stop)
    data = Recordings([Utterance("0", None, "a", 1.0)])
    monkeypatch.setattr(asr, "synthetic", lambda: {"train": data, "test": data})
    words = ["--preset", "tedlium3", "--model-config", '{"encoder_layers": 30}']
    with pytest.raises(CommandError, match="enough"):
        asr.main([*words, "--compare", "cape", "--output", str(tmp_path / "out")])
    ((config, settings),) = built
    assert (config.encoder_layers, config.d_model, config.encoder_layerdrop) == (30, 768, 0.1)
    positions = PositionConfig.from_dict(settings, "audio")
    assert (positions.max_global_scale, positions.max_global_shift) == (2, 30)


TINY = json.dumps({"max_source_positions": 100, "d_model": 16, "num_mel_bins": 8})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tones of 0.3 to 0.5 s, each with its text."""
    words_folder = tmp_path_factory.mktemp("words")
    for number in range(12):
        times = np.arange(4800 + 300 * number) / 16000
        tone = 0.3 * np.sin(2 * np.pi * 200 * (1 + number % 3) * times)
        soundfile.write(words_folder / f"{number}.wav", tone, 16000)
        (words_folder / f"{number}.txt").write_text(["low", "middle", "high"][number % 3])
    return words_folder


def test_texts_belong_to_what_is_joined():
    # constants tell what was joined
    pool = Recordings(
        Utterance(str(n), np.full(int(16000 * seconds), n, np.float32), f"word{n}", seconds)
        for n, seconds in enumerate((0.5, 0.3, 0.9, 1.7), 1)
    )
    strings = whisper.join(pool, 20, 1.0, 2.0, seed=0)
    assert len(strings) == 20
    for index, item in enumerate(strings.items):
        wave = strings[index]
        assert 1.0 <= item.seconds <= 2.0
        assert len(wave) == round(16000 * item.seconds)
        spoken = [f"word{int(n)}" for n in torch.unique(wave)]
        assert spoken == sorted({*item.text.split()})
        assert wave[0] == int(item.text.split()[0].removeprefix("word"))


def test_padded_models_read_30_seconds_and_others_what_there_is(tmp_path):
    """Batches of the distillation hold both."""
    processor = whisper.make_processor(tmp_path / "processor", ["one"], whisper.SIZES)
    recognisers = [whisper.Recogniser(processor, padded) for padded in (False, True)]
    samples = [(torch.randn(16000), [3], None), (torch.randn(8000), [3, 4], None)]
    natural, padded = (row.collate(samples)["input_features"] for row in recognisers)
    assert (natural.shape, padded.shape) == ((2, 24, 50), (2, 24, 1500))
    both = distil.TwoLengths(recognisers[0].processor.feature_extractor)(samples)
    assert torch.equal(both["input_features"], natural)
    assert torch.equal(both[distil.PADDED_FEATURES], padded)


def test_variants_begin_with_the_same_weights(tmp_path):
    tokenizer = whisper.make_processor(tmp_path / "p", ["one"], whisper.SIZES).tokenizer
    models = []
    for settings in ({}, {"type": "cape"}):
        torch.manual_seed(1)
        model = whisper.build_stock(None, whisper.SIZES, tokenizer)
        if settings:
            whisper.hf_models.switch(model, settings, natural_length=True)
        models.append(model.state_dict())
    shared = models[0].keys() & models[1].keys()
    assert models[0].keys() - shared == {"model.encoder.embed_positions.weight"}
    assert all(torch.equal(models[0][name], models[1][name]) for name in shared)


@pytest.mark.slow
def test_the_comparison_of_a_folder_is_written_and_taken_up_again(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(whisper, "STRINGS", {"train": 40, "timed": 240})
    words = ["--dataset", str(folder), "--model-config", TINY, "--limit", "2", "--seeds", "1"]
    words += ["--max_steps", "2", "--train-seconds", "0.8", "2", "--output", str(tmp_path)]
    words += ["--compare", "cape"]
    whisper.main(words)
    said = capsys.readouterr().out
    assert "train_runtime" in said
    rows, times = (read_csv(tmp_path / f"{name}.csv") for name in ("scores", "times"))
    assert {row["variant"] for row in rows} == {"cape", "padded"}
    assert {row["duration"] for row in rows} == {*whisper.durations(0.8, 2.0)}
    assert {row["work"] for row in times} == {"training", "recognition"}
    assert all(float(row["ratio"]) == 1 for row in times if row["variant"] == "padded")
    assert (tmp_path / "scores.png").stat().st_size > 1000 < (tmp_path / "times.png").stat().st_size
    page = (tmp_path / "scores.md").read_text()
    assert "an epoch of training, and recognition, of 8 recordings of 4." in page
    assert "**In training**: 0.8-2 s" in page
    whisper.main(words)
    assert "train_runtime" not in capsys.readouterr().out
    load = transformers.AutoModelForSpeechSeq2Seq.from_pretrained
    config, stock = load(tmp_path / "cape-seed1").config, load(tmp_path / "padded-seed1")
    assert config.position_embedding["type"] == config.decoder_position_embedding["type"] == "cape"
    assert config.hop_seconds == pytest.approx(0.15)
    assert type(stock) is transformers.WhisperForConditionalGeneration


@pytest.mark.slow
def test_a_padded_model_is_distilled_from_its_own_states(folder, tmp_path, monkeypatch, capsys):
    """Without updates, by the texts, and by the states of the decoder, which train all layers."""
    monkeypatch.setattr(whisper, "STRINGS", {"train": 40, "timed": 240})
    words = ["--dataset", str(folder), "--limit", "2", "--train-seconds", "0.8", "1.4", "2"]
    words += ["--compare", "sinpos", "--warmup_steps", "0"]
    first = [*words, "--model-config", TINY, "--max_steps", "1", "--output", str(tmp_path / "a")]
    whisper.main(first)
    words += ["--model", str(tmp_path / "a" / "padded"), "--switch-updates", "0", "2"]
    whisper.main([*words, "--output", str(tmp_path / "b")])
    rows = read_csv(tmp_path / "b/scores.csv")
    assert {row["duration"] for row in rows} == {*whisper.durations(0.8, 1.4, 2.0)}
    names = [f"{name}, {n} updates" for name in ("sinpos", "padded") for n in (0, 2)]
    names.append("sinpos distilled, 2 updates")
    assert [*dict.fromkeys(row["variant"] for row in rows)] == names
    page = (tmp_path / "b" / "scores.md").read_text()
    for name in ("sinpos", "sinpos distilled"):
        line = rf"^\* {name}, 2 updates: .* \(against padded, 2 updates\), \d+ s of training$"
        assert re.search(line, page, re.MULTILINE)
    assert "| 0.8-1.4 s (training) | 1.4-2 s (training) | 2-4 s |" in page
    load = transformers.AutoModelForSpeechSeq2Seq.from_pretrained
    (distilled,) = (tmp_path / "b").glob("sinpos*distilled*")
    before, after = load(tmp_path / "a" / "padded").state_dict(), load(distilled).state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert {".".join(name.split(".")[1:3]) for name in changed} >= {
        "encoder.layers",
        "decoder.layers",
    }


def test_a_recording_of_30_seconds_has_the_states_of_the_padded_model(tmp_path):
    """Its length is the padded length; after a shorter one the padded model attends to silence."""
    processor = whisper.make_processor(tmp_path / "processor", ["one"], whisper.SIZES)
    teacher = whisper.build_stock(None, whisper.SIZES, processor.tokenizer).eval()
    # a position for each 20 ms, as in the stock sinusoids, whatever the hop of the features
    settings = {"type": "sinpos"}
    model = whisper.hf_models.switch(copy.deepcopy(teacher), settings, natural_length=True)
    recogniser, errors = whisper.Recogniser(processor, False), []
    collate = distil.TwoLengths(recogniser.processor.feature_extractor)
    for seconds in (30, 20):
        batch = collate([(torch.randn(16000 * seconds), [3, 4], None)])
        trainer = SimpleNamespace(teacher=teacher)
        errors.append(distil.DistillingTrainer.compute_loss(trainer, model, batch).item())
    assert errors[0] < 1e-6 < 1e-4 < errors[1]


def test_states_are_compared_over_texts_only():
    """A student that computes the teacher's states has no error, whatever is on its padding."""
    targets = torch.randn(2, 5, 4)
    states, valid = targets.clone(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]).bool()
    states[1, 2:] = torch.nan
    assert distil.state_error(states, targets, valid) == 0
    states[0, 0] += 2
    torch.testing.assert_close(distil.state_error(states, targets, valid), torch.tensor(4 / 7))


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ("2", r"--train-seconds 2: allowed: two numbers or more"),
        ("2 1", r"--train-seconds 2 1: the numbers must increase"),
        ("0.1 0.2", r"recordings of 0\.3 s and more cannot be joined"),
    ],
)
def test_durations_that_cannot_be_made_are_refused(seconds, message, folder, tmp_path):
    words = ["--dataset", str(folder), "--output", str(tmp_path / "out"), "--train-seconds"]
    with pytest.raises(CommandError, match=message):
        whisper.main([*words, *seconds.split()])
    assert not (tmp_path / "out").exists()
