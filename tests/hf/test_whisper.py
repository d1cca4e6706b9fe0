"""Whisper: stock models bit for bit, recordings of any length, generation, features, conversion."""

import copy
import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForAudioClassification,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForAudioClassification,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperProcessor,
    WhisperTokenizer,
    pipeline,
)

import hf_models
from cape_plugins import TYPES
from hf_models.convert import convert

BINS, SEGMENT = 8, 80  # mel bins; frames of a segment of the stock model
LENGTHS = (50, 31, 20)
SPECIAL = {"pad_token_id": 59, "bos_token_id": 58, "eos_token_id": 58, "decoder_start_token_id": 57}
SIZES = {
    "vocab_size": 120,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": BINS,
    "max_source_positions": SEGMENT // 2,
    "max_target_positions": 20,
    "begin_suppress_tokens": None,
    "init_std": 0.2,
    "classifier_proj_size": 16,
    "num_labels": 3,
    **SPECIAL,
}
# language, task and timestamps, from token 61 on
GENERATION = {
    "no_timestamps_token_id": 60,
    "lang_to_id": {"<|en|>": 52, "<|de|>": 53},
    "task_to_id": {"transcribe": 54, "translate": 55},
    "is_multilingual": True,
    "prev_sot_token_id": 56,
    "alignment_heads": [[0, 0], [1, 1]],
    "max_initial_timestamp_index": 10,
    "max_length": 20,
}


def make_stock(model=WhisperForConditionalGeneration, **changes):
    torch.manual_seed(0)
    built = model(WhisperConfig(**{**SIZES, **changes})).eval()
    for name, value in GENERATION.items() if model is WhisperForConditionalGeneration else ():
        setattr(built.generation_config, name, value)
    return built


def switched(settings="cape", decoder=None, model=WhisperForConditionalGeneration, **changes):
    fields = {"decoder_position_embedding": {"type": decoder}} if decoder else {}
    names = ("natural_length", "hop_seconds")
    fields |= {name: changes.pop(name) for name in names if name in changes}
    return hf_models.switch(make_stock(model, **changes), {"type": settings}, **fields)


def features(batch, frames, seed=0):
    return torch.randn(batch, BINS, frames, generator=torch.Generator().manual_seed(seed))


def mask_of(lengths):
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


WHOLE = features(3, SEGMENT)
RAGGED, MASK = features(3, max(LENGTHS)), mask_of(LENGTHS)
LABELS = torch.arange(21).view(3, 7) % 50


# ---- stock, bit for bit --------------------------------------------------------------------------


@pytest.mark.parametrize("natural", [None, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stock_types_equal_stock(dtype, natural):
    stock, own = make_stock().to(dtype), switched("sinpos", natural_length=natural).to(dtype)
    inputs = WHOLE.to(dtype)
    expected = stock(inputs, labels=LABELS, output_hidden_states=True)
    output = own(inputs, labels=LABELS, output_hidden_states=True)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)
    for side in ("encoder_hidden_states", "decoder_hidden_states"):
        for mine, theirs in zip(getattr(output, side), getattr(expected, side), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("model", [WhisperModel, WhisperForAudioClassification])
def test_other_models_equal_stock(model):
    stock, own = make_stock(model), switched("sinpos", model=model)
    inputs = {"decoder_input_ids": LABELS} if model is WhisperModel else {}
    with torch.no_grad():
        assert torch.equal(own(WHOLE, **inputs)[0], stock(WHOLE, **inputs)[0])


WAYS = {
    "greedy": {"max_new_tokens": 8, "language": "en", "task": "transcribe"},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
    "timestamps": {"return_timestamps": True, "condition_on_prev_tokens": True},
    "words": {"return_timestamps": True, "return_token_timestamps": True},
    "prompt": {"max_new_tokens": 8, "prompt_ids": torch.tensor([56, 3, 4, 5])},
    "fallback": {
        "return_timestamps": True,
        "temperature": (0.0, 0.2),
        "logprob_threshold": -0.1,
        "compression_ratio_threshold": 1.2,
        "no_speech_threshold": 0.2,
    },
}


def equal(mine, theirs):
    if isinstance(mine, dict):
        return all(equal(mine[key], theirs[key]) for key in theirs)
    return torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("way", "frames"),
    [*((way, 200) for way in WAYS), ("greedy", SEGMENT), ("greedy", 50)],
)
def test_stock_types_generate_what_stock_does(way, frames):
    inputs = features(3, frames)
    mask = mask_of((frames, frames * 2 // 3, frames // 3))
    written = []
    for model in (make_stock(), switched("sinpos")):
        torch.manual_seed(0)
        written.append(model.generate(inputs, attention_mask=mask, **WAYS[way]))
    assert equal(written[1], written[0])


def updated(model, steps=3):
    torch.manual_seed(1)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(WHOLE, labels=LABELS).loss.backward()
        optimizer.step()
    return model.state_dict()


def test_three_updates_are_those_of_stock_with_frozen_sinusoids():
    stock, own = updated(make_stock(dropout=0.1)), updated(switched("sinpos", dropout=0.1))
    assert stock.keys() - own.keys() == {"model.encoder.embed_positions.weight"}
    assert all(torch.equal(value, stock[name]) for name, value in own.items())


# ---- natural length ------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", TYPES.keys() - {"rope"})
def test_recording_alone_equals_itself_in_a_batch(settings):
    model = switched(settings, decoder=settings, natural_length=True)
    together = model(RAGGED, attention_mask=MASK, labels=LABELS).logits
    for i, length in enumerate(LENGTHS):
        alone = model(RAGGED[i : i + 1, :, :length], labels=LABELS[i : i + 1]).logits
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=2e-5)


def test_masks_are_an_option_whose_default_follows_the_type():
    for settings, natural, masked in (
        ("sinpos", None, False),
        ("cape", None, True),
        ("sinpos", True, True),
        ("cape", False, False),
    ):
        model = switched(settings, natural_length=natural)
        with_mask = model(RAGGED, attention_mask=MASK, labels=LABELS).logits
        without = model(RAGGED, labels=LABELS).logits
        assert model.config.at_natural_length is masked
        assert torch.equal(with_mask, without) is not masked


@pytest.mark.parametrize("layer_sum", [False, True])
def test_classifier_does_not_count_padding(layer_sum):
    model = switched(model=WhisperForAudioClassification, use_weighted_layer_sum=layer_sum)
    together = model(RAGGED, attention_mask=MASK).logits
    for i, length in enumerate(LENGTHS):
        alone = model(RAGGED[i : i + 1, :, :length]).logits
        torch.testing.assert_close(together[i], alone[0], rtol=0, atol=1e-5)


def test_time_counts_not_frames():
    model = switched("sinpos", natural_length=True)
    encoder, added = model.get_encoder(), []
    hook = encoder.positions.register_forward_hook(lambda *parts: added.append(parts[2]))
    encoder(WHOLE, hop_nanoseconds=5_000_000)  # the same time in half the steps
    encoder(WHOLE[:, :, : SEGMENT // 2])
    hook.remove()
    torch.testing.assert_close(added[0][:, ::2], added[1])
    apart = model(WHOLE, hop_nanoseconds=torch.full((3,), 10_000_000), labels=LABELS).logits
    torch.testing.assert_close(apart, model(WHOLE, labels=LABELS).logits)


def test_training_draws_and_evaluation_does_not():
    model = switched("cape", "cape").train()
    first, second = (model(WHOLE, labels=LABELS).loss for _ in range(2))
    assert first != second
    written = model.generate(WHOLE, max_new_tokens=8, language="en")
    model.eval()
    assert torch.equal(model(WHOLE, labels=LABELS).loss, model(WHOLE, labels=LABELS).loss)
    assert torch.equal(model.generate(WHOLE, max_new_tokens=8, language="en"), written)


@pytest.mark.parametrize("settings", ["cape", "relpos"])
def test_checkpointing_repeats_masks_and_draws(settings):
    model = switched(settings, settings).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(0)
        model(RAGGED, attention_mask=MASK, labels=LABELS).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_compiles_without_breaks():
    model = switched("cape", "cape", encoder_layers=1, decoder_layers=1).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = {"attention_mask": MASK, "labels": LABELS}
    losses = []
    for call in (model, compiled):
        torch.manual_seed(0)
        losses.append(call(RAGGED, **inputs).loss)
    losses[1].backward()
    assert torch.equal(*losses)
    model.eval()
    torch.testing.assert_close(compiled(RAGGED, **inputs).logits, model(RAGGED, **inputs).logits)


def test_wrong_inputs_are_refused():
    model = switched()
    with pytest.raises(ValueError, match=r"input_features has shape \(3, 5, 50\).*8, frames"):
        model(RAGGED[:, :5], labels=LABELS)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(3, 9\).*\(3, 50\)"):
        model(RAGGED, attention_mask=MASK[:, :9], labels=LABELS)
    with pytest.raises(ValueError, match=r"one_piece=True.*natural_length=True"):
        switched("sinpos").generate(WHOLE, one_piece=True)
    with pytest.raises(ValueError, match="timestamps end at 30 s"):
        model.generate(features(1, 200), one_piece=True, return_timestamps=True)
    with pytest.raises(ValueError, match="need 10 ms"):
        model.generate(WHOLE, hop_nanoseconds=5_000_000, return_timestamps=True)


# ---- generation ----------------------------------------------------------------------------------


def encoder_sizes(model, call):
    sizes = []
    hook = model.get_encoder().register_forward_hook(
        lambda module, given, output: sizes.append(output.last_hidden_state.shape[1])
    )
    call()
    hook.remove()
    return sizes


def test_segments_are_not_padded():
    inputs = {"attention_mask": MASK, "max_new_tokens": 4, "language": "en"}
    for settings, size in (("cape", max(LENGTHS) // 2), ("sinpos", SEGMENT // 2)):
        model = switched(settings)
        sizes = encoder_sizes(model, partial(model.generate, RAGGED, **inputs))
        assert set(sizes) == {size}


@pytest.mark.parametrize(
    "way",
    [
        {"language": "en", "return_timestamps": False},
        {"num_beams": 2, "return_timestamps": False},
        {"return_timestamps": True},
        {"return_timestamps": True, "return_token_timestamps": True},
        {"return_timestamps": True, "cache_implementation": "static"},
    ],
)
def test_recordings_in_segments_or_in_one_piece(way):
    """Each as it is alone; those without timestamps are encoded once, as a whole."""
    model = switched()
    lengths = (200, 131, 60)
    inputs, mask = features(3, 200), mask_of(lengths)
    way = {**way, "max_new_tokens": 15}
    sizes = encoder_sizes(model, lambda: model.generate(inputs, attention_mask=mask, **way))
    limit = SEGMENT // 2 if way["return_timestamps"] else 100
    assert max(sizes) == limit
    together = model.generate(inputs, attention_mask=mask, **way)
    for i, length in enumerate(lengths):
        alone = model.generate(inputs[i : i + 1, :, :length], **way)
        if isinstance(alone, dict):
            together_, alone = together["sequences"], alone["sequences"]
        else:
            together_ = together
        width = min(together_.shape[1], alone.shape[1])
        assert torch.equal(together_[i, :width], alone[0, :width])
        assert (together_[i, width:] == SPECIAL["pad_token_id"]).all()
    assert model.config.max_source_positions == SEGMENT // 2
    assert model.config.max_target_positions == SIZES["max_target_positions"]


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("decoder", ["abspos", "cape", "relpos"])
def test_generation_is_teacher_forcing_beyond_the_table(decoder, cache):
    model = switched("cape", decoder)
    count = SIZES["max_target_positions"] + 10
    written = model.generate(
        RAGGED,
        attention_mask=MASK,
        language="en",
        max_new_tokens=count,
        min_new_tokens=count,
        return_dict_in_generate=True,
        output_logits=True,
        **cache,
    )
    tokens = written.sequences
    forced = model(RAGGED, attention_mask=MASK, decoder_input_ids=tokens[:, :-1]).logits
    steps = torch.stack(written.logits, dim=1)
    assert steps.shape[1] == count
    torch.testing.assert_close(steps, forced[:, -count:], rtol=0, atol=2e-5)


def test_long_labels_train():
    labels = torch.arange(40)[None] % 50
    assert switched()(WHOLE[:1], labels=labels).loss.isfinite()
    with pytest.raises(ValueError, match="cannot exceed"):
        switched("sinpos")(WHOLE[:1], labels=labels)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stock checkpoint with its processor, which writes letters."""
    place = tmp_path_factory.mktemp("whisper") / "stock"
    alphabet = sorted(ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>"]
    special += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
    special += ["<|notimestamps|>"]
    stamps = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    ids = {token: i for i, token in enumerate([*alphabet, *special, *stamps])}
    tokenizer = WhisperTokenizer(vocab=ids, merges=[], language="english", task="transcribe")
    tokenizer.pad_token = special[0]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens([AddedToken(stamp) for stamp in stamps])
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(place)
    end = ids["<|endoftext|>"]
    model = make_stock(
        vocab_size=len(ids),
        num_mel_bins=80,
        max_source_positions=1500,
        max_target_positions=448,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    generation = model.generation_config
    generation._from_model_config = False
    generation.no_timestamps_token_id = ids["<|notimestamps|>"]
    generation.lang_to_id = {name: ids[name] for name in ("<|en|>", "<|de|>")}
    generation.task_to_id = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    generation.prev_sot_token_id = ids["<|startofprev|>"]
    generation.max_length = 448
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def cape_folder(folder):
    convert(str(folder), folder.parent / "cape", {"type": "cape"})
    return folder.parent / "cape"


def wave(seconds, seed=0):
    samples = np.random.default_rng(seed).standard_normal(int(16000 * seconds))
    return (0.1 * samples).astype(np.float32)


def test_stock_checkpoints_load_whole(folder):
    own = hf_models.CapeWhisperForConditionalGeneration
    for settings, new in (("sinpos", 0), ("cape", 0), ("nopos", 0), ("abspos", 1), ("relpos", 2)):
        model, report = own.from_pretrained(
            folder, position_embedding={"type": settings}, output_loading_info=True
        )
        assert len(report.pop("missing_keys")) == new
        assert not any(report.values())
        assert model.config.decoder_position_embedding["type"] == "abspos"
    stock = WhisperForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(
        torch.equal(value, stock[k]) for k, value in model.state_dict().items() if k in stock
    )


def test_auto_classes(folder, cape_folder):
    for auto, name in (
        (AutoModel, "Model"),
        (AutoModelForSpeechSeq2Seq, "ForConditionalGeneration"),
        (AutoModelForAudioClassification, "ForAudioClassification"),
    ):
        for place, given in ((folder, {"position_embedding": {"type": "cape"}}), (cape_folder, {})):
            loaded = auto.from_pretrained(place, **given)
            assert type(loaded).__name__ == f"CapeWhisper{name}"
    assert type(AutoTokenizer.from_pretrained(cape_folder)) is WhisperTokenizer
    extractors = (
        AutoFeatureExtractor.from_pretrained(cape_folder),
        (AutoProcessor.from_pretrained(cape_folder).feature_extractor),
    )
    assert {type(row) for row in extractors} == {hf_models.CapeWhisperFeatureExtractor}
    again = pickle.loads(pickle.dumps(loaded.eval()))
    inputs = torch.randn(2, 80, 50)
    assert torch.equal(again(inputs).logits, loaded(inputs).logits)


def test_conversion_both_ways(folder, tmp_path, capsys):
    convert(str(folder), tmp_path / "same", {"type": "sinpos"})
    assert "computes what the one it comes from does" in capsys.readouterr().out
    convert(str(folder), tmp_path / "cape", {"type": "cape"}, neutral=True)
    assert "padding: masked where a mask is given" in capsys.readouterr().out
    stock = WhisperForConditionalGeneration.from_pretrained(folder)
    for source, natural in (("same", False), ("cape", True)):
        saved = json.loads((tmp_path / source / "processor_config.json").read_text())
        name = "CapeWhisperFeatureExtractor" if natural else "WhisperFeatureExtractor"
        assert saved["feature_extractor"]["feature_extractor_type"] == name
        convert(str(tmp_path / source), tmp_path / f"{source}-stock", None)
        back = WhisperForConditionalGeneration.from_pretrained(tmp_path / f"{source}-stock")
        assert back.generation_config.no_timestamps_token_id
        weights = back.state_dict()
        assert all(torch.equal(v, weights[name]) for name, v in stock.state_dict().items())
        extractor = AutoProcessor.from_pretrained(tmp_path / f"{source}-stock").feature_extractor
        assert type(extractor) is WhisperFeatureExtractor


# ---- features and pipeline -----------------------------------------------------------------------


def test_features_are_those_of_stock_without_the_silence():
    own, stock = hf_models.CapeWhisperFeatureExtractor(), WhisperFeatureExtractor()
    waves = [wave(seconds) for seconds in (1.5, 0.97, 0.01)]
    given = {"sampling_rate": 16000, "return_tensors": "pt"}
    batch = own(waves, **given)
    full = stock(waves, return_attention_mask=True, **given)
    assert batch.attention_mask.sum(-1).tolist() == [150, 97, 1]
    for i, recording in enumerate(waves):
        alone = own(recording, **given).input_features
        for among_others in (batch, full):
            frames = among_others.input_features[i, :, : alone.shape[-1]]
            torch.testing.assert_close(alone[0], frames, rtol=0, atol=1e-6)
    same = own(waves, padding="max_length", **given)
    assert torch.equal(same.input_features, full.input_features)
    assert own(wave(31), **given).input_features.shape[-1] == 3100


def test_features_of_any_hop_and_padded_later():
    extractor = hf_models.CapeWhisperFeatureExtractor()
    waves = [wave(0.5), wave(0.2)]
    fine = extractor(waves, sampling_rate=16000, hop_seconds=0.005, return_tensors="pt")
    assert fine.input_features.shape == (2, 80, 100)
    assert fine.hop_nanoseconds.tolist() == [5_000_000] * 2
    items = [
        {"input_features": extractor(w, sampling_rate=16000)["input_features"][0]} for w in waves
    ]
    batch = extractor.pad(items, return_tensors="pt")
    assert batch.input_features.shape == (2, 80, 50)
    assert batch.attention_mask.sum(-1).tolist() == [50, 20]
    with pytest.raises(ValueError, match=r"hop_seconds=1e-06.*at least one sample"):
        extractor(waves, hop_seconds=1e-6)
    with pytest.raises(ValueError, match=r"shape \(0,\).*at least one"):
        extractor([wave(0)])


def test_pipeline(cape_folder):
    recognise = pipeline("automatic-speech-recognition", model=str(cape_folder))
    options = {"max_new_tokens": 6, "num_beams": 1}
    encoder = recognise.model.get_encoder()
    short = lambda: recognise(wave(0.5), generate_kwargs=options)  # noqa: E731
    assert set(encoder_sizes(recognise.model, short)) == {25}
    for stamps in (True, "word"):
        recognise.model.generation_config.alignment_heads = [[0, 0], [1, 1]]
        chunks = recognise(wave(0.5), return_timestamps=stamps, generate_kwargs=options)["chunks"]
        assert all(len(chunk["timestamp"]) == 2 for chunk in chunks)
    one = {**options, "one_piece": True}
    sizes = encoder_sizes(
        recognise.model, lambda: recognise(wave(30.5), generate_kwargs={**one, "language": "en"})
    )
    assert sizes == [1525]
    assert encoder is recognise.model.get_encoder()


# ---- training ------------------------------------------------------------------------------------


class Collator:
    """Pads features and labels as the recognition example of transformers does."""

    def __init__(self, processor, start):
        self.processor, self.start = processor, start

    def __call__(self, items):
        inputs = [{"input_features": item["input_features"]} for item in items]
        batch = self.processor.feature_extractor.pad(inputs, return_tensors="pt")
        labels = [{"input_ids": item["labels"]} for item in items]
        labels = self.processor.tokenizer.pad(labels, return_tensors="pt")
        ids = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        batch["labels"] = ids[:, 1:] if (ids[:, 0] == self.start).all() else ids
        return batch


@pytest.fixture(scope="module")
def recordings(cape_folder):
    processor = AutoProcessor.from_pretrained(cape_folder)
    return [
        {
            "input_features": processor.feature_extractor(
                wave(0.2 + 0.05 * i, i), sampling_rate=16000, return_attention_mask=False
            )["input_features"][0],
            "labels": processor.tokenizer("ab" * (i + 1)).input_ids,
        }
        for i in range(4)
    ]


def make_trainer(model, place, recordings, processor, steps):
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(place),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=2,
            lr_scheduler_type="constant",
            learning_rate=1e-3,
            predict_with_generate=True,
            generation_max_length=12,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=100,
        ),
        train_dataset=recordings,
        eval_dataset=recordings,
        processing_class=processor.feature_extractor,
        data_collator=Collator(processor, model.config.decoder_start_token_id),
    )


def test_trainer_resumes_and_generates(cape_folder, recordings, tmp_path):
    processor = AutoProcessor.from_pretrained(cape_folder)
    load = AutoModelForSpeechSeq2Seq.from_pretrained
    whole = make_trainer(load(cape_folder), tmp_path / "whole", recordings, processor, 4)
    whole.train()
    half = make_trainer(load(cape_folder), tmp_path / "half", recordings, processor, 2)
    half.train()
    rest = make_trainer(load(cape_folder), tmp_path / "half", recordings, processor, 4)
    rest.train(resume_from_checkpoint=True)
    expected, resumed = whole.model.state_dict(), rest.model.state_dict()
    before = load(cape_folder).state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in expected.items())
    assert not all(torch.equal(value, before[name]) for name, value in expected.items())
    model = whole.model
    written = []
    sizes = encoder_sizes(model, lambda: written.append(whole.predict(recordings, max_length=9)))
    assert max(sizes) <= 20
    assert written[0].predictions.shape[0] == len(recordings)


def test_lora_trains():
    model = get_peft_model(switched(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    model.train()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model(input_features=RAGGED, attention_mask=MASK, labels=LABELS).loss.backward()
    optimizer.step()
    changed = {k for k, value in model.state_dict().items() if not torch.equal(value, before[k])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert model.generate(input_features=RAGGED, attention_mask=MASK).shape[0] == len(LENGTHS)
