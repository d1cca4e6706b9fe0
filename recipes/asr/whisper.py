"""Compares a small Whisper that pads recordings to 30 s, as stock models do, with models that read
recordings at their natural length.

    python -m recipes.asr.whisper --seeds 1 2 3                           # digits of espeak-ng
    python -m recipes.asr.whisper --dataset FOLDER --train-seconds 5 10   # short recordings
    python -m recipes.asr.whisper --dataset FOLDER --model openai/whisper-tiny --max_steps 2000
    python -m recipes.asr.whisper --model results/whisper/padded --switch-updates 0 10%

Recordings are joined into longer recordings. The stock model is trained on recordings padded to 30
s. Models with the compared types of position embedding are trained on recordings at their natural
length. ``--switch-updates`` makes the padded model of ``--model`` work at natural length: by a
training on the texts, and by a training on the states of its decoder (``distilled``,
:mod:`recipes.asr.distil`). Tables and figures show word error rates by duration, and the time of
training and of recognition.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

import hf_models
from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.manifest import Utterance
from recipes.asr.data import (
    Collator,
    Labelled,
    Recordings,
    SpeechTrainer,
    add_recording_args,
    given_recordings,
)
from recipes.asr.distil import DistillingTrainer, TwoLengths
from recipes.asr.finetune_hf import at_natural_length, labels_of
from recipes.asr.report import METRICS, Text, rates
from recipes.lab.command_line import add_shared, check_increasing, number, settings_to_compare
from recipes.lab.data import fingerprint, has_data
from recipes.lab.figures import draw_bars, new_figure, write_figure
from recipes.lab.hf_checkpoints import make_config, read_beside, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.steps import OTHER_OUTPUT, CommandError, progress, run_main, step
from recipes.lab.synthesis import make_speech
from recipes.lab.tables import Row, pivot, seed_table, write_csv

PADDED = "padded"  # the stock model
COMPARED = ("sinpos", "cape")  # without and with augmentation
LONGEST = 30.0  # seconds to which stock models pad
TIMED = 5.0  # lowest length in seconds of the recordings for timing
STRINGS = {"train": 3000, "timed": 240}  # numbers of joined recordings
TEST_STRINGS = 60  # joined recordings of each test
RECOGNISED = 16  # batch size of recognition
# numbers of recordings of single digits, from which strings are joined
DIGITS = {"train": 400, "test": 100}
SIDE = {"layers": 2, "attention_heads": 2, "ffn_dim": 256}
SIZES = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
SIZES |= {"d_model": 64, "init_std": 0.1, "begin_suppress_tokens": None, "suppress_tokens": None}
SIZES |= {"num_mel_bins": 24, "max_source_positions": 750}  # of 30 s: frames are 20 ms apart
TRAINING = (
    "--num_train_epochs 2 --per_device_train_batch_size 4 --learning_rate 2e-3 "
    "--warmup_steps 100 --lr_scheduler_type cosine --weight_decay 0.01"
)
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>")


class Joined(Recordings):
    """Joined recordings from the pool `rows`; the audio of an item is a list of indices into the
    pool."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([self.rows[row] for row in self.items[index].audio])


def join(pool: Recordings, count: int, low: float, high: float, seed: int) -> Joined:
    """Strings of random recordings, `low` to `high` seconds long; empty if no such string can be
    made."""
    rng, items = np.random.default_rng(seed), []
    seconds = np.array([item.seconds for item in pool.items])
    short = np.flatnonzero(seconds <= high)
    for _ in range(20 * count if len(short) else 0):
        drawn = rng.choice(short, 1 + int(high / seconds[short].min()))
        fitting = np.searchsorted(seconds[drawn].cumsum(), rng.uniform(low, high), side="right")
        rows = drawn[: max(1, fitting)]
        if low <= (total := sum(seconds[rows].tolist())) <= high and len(items) < count:
            text = " ".join(pool.items[row].text for row in rows)
            items.append(Utterance(str(len(items)), rows, text, total))
    return Joined(items, pool)


def spoken_digits() -> dict[str, Recordings]:
    """Single digits in many voices; no recording is in both training and test."""
    sets = {}
    for seed, (split, count) in enumerate(DIGITS.items()):
        parts = [(part.waveform, part.text) for part in make_speech(seed, count, (1, 1))]
        items = (Utterance("", wave, text, len(wave) / SAMPLING_RATE) for wave, text in parts)
        sets[split] = Recordings(items)
    return sets


def durations(low: float, *more: float) -> dict[str, tuple[float, float]]:
    """Durations of the tests: shorter than in training, as in training, and longer. Numbers between
    the shortest and the longest duration of training divide the tests."""
    high = more[-1]
    numbers = (low / 3, low, *more, 2 * high, 4 * high, 8 * high)
    ends = [end for end in numbers if end < LONGEST]
    return {f"{start:.2g}-{end:.2g} s": (start, end) for start, end in pairwise(ends)}


def make_strings(args: argparse.Namespace, pools: Mapping[str, Recordings]) -> dict[str, Joined]:
    """Strings for training ("train"), for timing ("timed"), and for each test."""
    low, *_, high = args.train_seconds
    longest, tests = max(TIMED, high), args.limit
    parts = {
        "train": (pools["train"], STRINGS["train"], low, high),
        "timed": (pools["train"], min(STRINGS["timed"], 4 * tests), 0.9 * longest, longest),
    }
    tested = durations(*args.train_seconds)
    parts |= {name: (pools["test"], tests, *ends) for name, ends in tested.items()}
    strings = {name: join(*part, seed) for seed, (name, part) in enumerate(parts.items())}
    if not all(len(strings[name]) for name in STRINGS):
        shortest = min(item.seconds for item in pools["train"].items)
        raise CommandError(
            f"--train-seconds {low:g} {high:g}: recordings of {shortest:.1f} s and more cannot be "
            f"joined to these durations; give larger numbers, up to {LONGEST:g}, or shorter "
            "recordings"
        )
    return {name: part for name, part in strings.items() if len(part)}


def make_processor(folder: Path, texts: Sequence[str], sizes: Mapping[str, Any]) -> Any:
    """Makes a processor with the stock features of 30 s and subwords of the training text."""

    def make(partial: Path) -> None:
        tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
        special = {"pad_token": SPECIAL[0], "additional_special_tokens": SPECIAL[1:]}
        vocabulary = {token: number for number, token in enumerate(tokens)}
        letters = transformers.WhisperTokenizer(vocab=vocabulary, merges=[], **special)
        tokenizer = letters.train_new_from_iterator(texts, 512, show_progress=False)
        hop = round(LONGEST * SAMPLING_RATE / 2 / positions)
        extractor = transformers.WhisperFeatureExtractor(bins, hop_length=hop)
        WhisperProcessor(extractor, tokenizer).save_pretrained(partial)

    bins, positions = (sizes[name] for name in ("num_mel_bins", "max_source_positions"))
    made_of = {"bins": bins, "positions": positions, "text": fingerprint(texts)}
    return WhisperProcessor.from_pretrained(step(folder, made_of, make, remedy=OTHER_OUTPUT))


def build_stock(model: str | None, sizes: Mapping[str, Any], tokenizer: Any) -> Any:
    """The stock model, of ``--model`` or from scratch."""
    if model:
        return WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    end, start, no_timestamps = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), end)
    token_fields = {"vocab_size": len(tokenizer), "decoder_start_token_id": start, **ends}
    built = WhisperForConditionalGeneration(make_config(WhisperConfig, {**sizes, **token_fields}))
    generation = {"no_timestamps_token_id": no_timestamps, "is_multilingual": False}
    built.generation_config.update(**generation)
    return built


class Recogniser:
    """Gives recordings to a model: padded to 30 s with the stock extractor, or at natural
    length."""

    def __init__(self, processor: WhisperProcessor, padded: bool) -> None:
        self.padded = padded
        self.processor = processor if padded else at_natural_length(copy.copy(processor), None)
        self.collate = Collator(self.processor.feature_extractor)
        if padded:
            self.collate.more = {"padding": "max_length"}

    def transcribe(self, model: Any, waveforms: Sequence[Any], **limits: Any) -> list[str]:
        """The hypothesis of `model` for each waveform; passes `limits` to ``generate``."""
        batch = self.collate.features(waveforms).to(model.device)
        # a stored max_length must not compete with max_new_tokens
        written = model.generate(**batch, **limits, max_length=None)
        return [text.strip() for text in self.processor.batch_decode(written, True)]


def recognise(model: Any, recogniser: Recogniser, test: Labelled) -> dict[str, Any]:
    """Error rates of a test; a text that does not end is cut at twice the longest text."""
    limit = min(2 * max(map(len, test.labels)), model.config.max_target_positions // 2)

    def run(rows: Sequence[int]) -> list[str]:
        waveforms = [test.recordings[row] for row in rows]
        return recogniser.transcribe(model, waveforms, max_new_tokens=limit)

    hypotheses = share(batches(test.seconds, RECOGNISED), run, "recognise", len(test))
    items = zip(test.recordings.items, hypotheses, strict=True)
    return rates([Text(item.seconds, item.text, text) for item, text in items])


def take_time(
    models: Mapping[str, tuple[SpeechTrainer, Recogniser]], data: Labelled, batch_size: int
) -> list[Row]:
    """Seconds of training and of recognition on all of `data`, and the speed of each model relative
    to the first padded model. The models take turns, batch by batch, so other jobs of the machine
    slow all models down alike."""
    spent = {(name, work): 0.0 for name in models for work in ("training", "recognition")}
    padded = next(name for name, (_, recogniser) in models.items() if recogniser.padded)
    learners = {name: copy.deepcopy(trainer.model).train() for name, (trainer, _) in models.items()}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in learners.items()}
    tokens = max(map(len, data.labels))  # tokens that every model writes
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "min_length": None}
    work = batches(data.seconds, RECOGNISED)
    for turn, rows in enumerate(progress([work[0], *work], "take time")):
        samples = [data[row] for row in rows]
        for name, (trainer, recogniser) in models.items():
            model = trainer.model
            started = time.perf_counter()
            for first in range(0, len(samples), batch_size):
                batch = trainer.data_collator(samples[first : first + batch_size])
                batch = {key: part.to(model.device) for key, part in batch.items()}
                trainer.compute_loss(learners[name], batch).backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            trained = time.perf_counter()
            recogniser.transcribe(model, [waveform for waveform, *_ in samples], **limits)
            if turn:  # the first batch of all is slow, and not counted
                spent[name, "training"] += trained - started
                spent[name, "recognition"] += time.perf_counter() - trained
    return [
        {"variant": name, "work": work, "seconds": seconds, "ratio": spent[padded, work] / seconds}
        for (name, work), seconds in spent.items()
    ]


def trainings(
    compared: Mapping[str, Mapping[str, Any]],
    args: argparse.Namespace,
    training: Any,
    make_trainer: Callable[..., SpeechTrainer],
    data: str,
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Trains the compared types and the padded model; with ``--switch-updates`` also each type on
    the states of the padded model. See :func:`~recipes.lab.hf_training.train_all`."""
    more = {"data": data, "first_name": PADDED}
    yield from train_all({**compared, PADDED: {}}, args, training, make_trainer, **more)
    updates = [text for text in args.switch_updates or () if text.strip("0%")]
    if updates:  # without updates nothing is distilled: the trainings above have this model
        changes = {"switch_updates": updates, "switch_scratch": False}
        args = argparse.Namespace(**{**vars(args), **changes})
        distilled = {f"{name} distilled": settings for name, settings in compared.items()}
        make_trainer = partial(make_trainer, distils=True)
        yield from train_all(distilled, args, training, make_trainer, **more)


def write_results(args: Any, rows: Sequence[Row], times: Sequence[Row], timed: Joined) -> None:
    """Tables and figures of error rates and of times."""
    seconds, ratios = (pivot(times, "variant", "work", column) for column in ("seconds", "ratio"))
    mean = np.mean([item.seconds for item in timed.items])
    work = f"an epoch of training, and recognition, of {len(timed)} recordings of {mean:.1f} s"
    more = {
        f"Seconds for {work}": seed_table(seconds, "variant"),
        f"Times as fast as the padded model: {work}": seed_table(ratios, "variant", 1),
    }
    write_csv(args.output / "times.csv", times)
    figure, ((axes,),) = new_figure(6, 3.5)
    draw_bars(axes, ratios)
    axes.set_ylabel("times as fast as padded to 30 s")
    axes.legend(fontsize="small")
    write_figure(args.output / "times.png", figure)
    trained = list(durations(*args.train_seconds))[1 : len(args.train_seconds)]
    title = "Whisper at natural length"
    report(args, title, rows, "duration", METRICS, trained=trained, more=more)


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "audio", COMPARED, "results/whisper")
    add_recording_args(parser)
    add_shared(parser, "limit", note="of each duration", default=TEST_STRINGS)
    parser.add_argument(
        "--train-seconds",
        type=number(0.1, LONGEST),
        nargs="+",
        metavar="SECONDS",
        default=[0.5, 3.0],
        help="shortest and longest duration of joined training recordings; numbers between them "
        "divide the tests (default: 0.5 3)",
    )
    return parser


def check_train_seconds(seconds: Sequence[float]) -> None:
    """Refuses durations that do not increase, and a single duration."""
    check_increasing(seconds, "--train-seconds")
    if len(seconds) < 2:
        raise CommandError(
            f"--train-seconds {seconds[0]:g}: allowed: two numbers or more; give the shortest and "
            "the longest duration"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_options()
    builtin = not has_data(parser.parse_known_args(argv)[0])
    args, training = parse(parser, TRAINING.split(), argv)
    if builtin:
        torch.set_num_threads(1)  # more threads do not speed up such a small model
    check_train_seconds(args.train_seconds)
    compared = settings_to_compare(args, "audio", COMPARED)
    sizes = {**SIZES, **(args.model_config or {})}
    if args.model:
        read_config(args.model, WhisperConfig)
    strings = make_strings(args, spoken_digits() if builtin else given_recordings(args))
    if args.model:
        processor = read_beside(WhisperProcessor, args.model)
    else:
        texts = [f" {item.text}" for item in strings["train"].items]
        with training.main_process_first():  # which writes files for the others
            processor = make_processor(args.output / "processor", texts, sizes)
    sets = {  # in Whisper's subwords every word begins with a space, including the first
        name: Labelled(part, [labels_of(processor, f" {item.text}") for item in part.items])
        for name, part in strings.items()
    }
    recognisers = {padded: Recogniser(processor, padded) for padded in (True, False)}
    hop = processor.feature_extractor.hop_length / SAMPLING_RATE

    def make_trainer(
        settings: Mapping[str, Any], run_args: Any, distils: bool = False
    ) -> SpeechTrainer:
        model = build_stock(args.model, sizes, processor.tokenizer)
        teacher = copy.deepcopy(model).eval().requires_grad_(False) if distils else None
        recogniser = recognisers[not settings]
        if settings:  # the decoder gets the type as well, unless it has a trained table
            text = None if args.model else {"type": settings["type"]}
            fields = {"hop_seconds": hop, "decoder_position_embedding": text}
            hf_models.switch(model, settings, natural_length=True, **fields)
        more = {"processing_class": recogniser.processor}
        if teacher is None:
            return SpeechTrainer(model, run_args, recogniser.collate, sets["train"], **more)
        collate = TwoLengths(recogniser.processor.feature_extractor)
        trainer = DistillingTrainer(model, run_args, collate, sets["train"], **more)
        trainer.teacher = teacher.to(run_args.device)
        return trainer

    rows: list[Row] = []
    models: dict[int, dict[str, Any]] = {}
    made_of = strings["train"].fingerprint()
    for columns, trainer in trainings(compared, args, training, make_trainer, made_of):
        variant, seed = columns.values()
        trainer.optimizer = trainer.lr_scheduler = None  # frees their memory
        pads = type(trainer.model) is WhisperForConditionalGeneration
        models.setdefault(seed, {})[variant] = trainer, recognisers[pads]
        for name in [*sets][len(STRINGS) :]:
            scores = recognise(trainer.model, recognisers[pads], sets[name])
            rows.append({**columns, "duration": name, **scores})
    size, times = training.per_device_train_batch_size, []
    for seed, trained in models.items():
        times += [{**row, "seed": seed} for row in take_time(trained, sets["timed"], size)]
    write_results(args, rows, times, strings["timed"])


if __name__ == "__main__":
    run_main(main)
