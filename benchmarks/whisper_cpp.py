"""Word errors and the cost of a call of whisper.cpp, which reads files of `cape-plugins export
ggml`, against transformers."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pywhispercpp.model import Model
from transformers import AutoProcessor

import hf_models
from benchmarks import whisper_models
from benchmarks.measure import Setup, interleave
from benchmarks.report import Report, legend_below, variant_table
from benchmarks.serving import export
from cape_plugins.speech.features import SAMPLING_RATE
from recipes.asr.report import Text, rates
from recipes.asr.whisper import Joined, Recogniser, join, spoken_digits
from recipes.lab.figures import draw_bars
from recipes.lab.steps import progress
from recipes.lab.tables import pivot

SECONDS = 60.0
UPDATES = 1200
TRAINED = (1.0, 3.0)  # seconds
TESTED = {"1-3 s": TRAINED, "3-6 s": (3.0, 6.0)}
TRAIN_STRINGS, TEST_STRINGS = 3000, 60
TIMED = (2, 5, 10)  # seconds of recordings
TOKENS = 10  # written in each timed call
TRANSFORMERS = "transformers, natural length"
ENGINE = {  # arguments of `engine`
    "whisper.cpp, natural length": (True, False),
    "whisper.cpp, natural length, flash attention": (True, True),
    "whisper.cpp, 30 s": (False, False),
    "whisper.cpp, 30 s, flash attention": (False, True),
}
POSITION = 320  # samples
OPTIONS = {
    "language": "en",
    "no_timestamps": True,
    "single_segment": True,
    "suppress_blank": False,
    "temperature_inc": 0.0,
    "print_progress": False,
}
TEXT = (
    f"""\
A small Whisper (2L-2L, 64/256, 2 heads, `sinpos`) has learned strings of digits of {TRAINED[0]:g}
to {TRAINED[1]:g} s, spoken by espeak-ng, at natural length, in {{updates}} updates of
{whisper_models.BATCH} strings. `cape-plugins export ggml` has written it for whisper.cpp, with
matrices in float16. `natural length` is an `audio_ctx` of samples / {POSITION}, rounded up; `30 s`
is none: whisper.cpp adds silence, which the model has not seen in training. Flash attention is the
default of pywhispercpp. The test has other recordings of the digits than the training;
{TEST_STRINGS} strings of each duration, one a call, with greedy search. Strings of 3 to 6 s are
longer than any in training.""",
    f"""\
The calls that are timed write {TOKENS} tokens for a recording of noise, with a model in the size of
whisper-tiny (4L-4L, 384/1536, 6 heads) with random weights; features count. The reference is
`{TRANSFORMERS}`.""",
)
IN_PARENTHESES = (
    f"texts that equal the texts of `{TRANSFORMERS}`, of {TEST_STRINGS}; time as a multiple of the "
    "reference's; the .csv has the intervals of times"
)

Way = Callable[[torch.Tensor, int], str]  # writes at most so many tokens for a waveform


def run(setup: Setup) -> Report:
    """Counts wrong words, then times calls."""
    report = Report("Whisper in whisper.cpp", TEXT, in_parentheses=IN_PARENTHESES)
    updates = 2 if setup.quick else UPDATES
    report.text = [TEXT[0].format(updates=updates), *TEXT[1:]]
    pools = spoken_digits()
    strings = join(pools["train"], 32 if setup.quick else TRAIN_STRINGS, *TRAINED, seed=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whisper_models.save_trained(folder / "trained", strings, updates)
        ways = all_ways(folder / "trained")
        for seed, (duration, ends) in enumerate(TESTED.items(), start=1):
            test = join(pools["test"], 2 if setup.quick else TEST_STRINGS, *ends, seed)
            report.rows += [{"duration": duration, **row} for row in word_errors(ways, test)]
        sizes = whisper_models.SMALL if setup.quick else whisper_models.TINY
        whisper_models.save_random(folder / "random", sizes)
        add_times(report, all_ways(folder / "random"), setup)
    words, times = ([row for row in report.rows if key in row] for key in ("wer", "ratio"))
    report.tables = tables(words, times)
    report.plot = partial(plot, words, times)
    return report


# ---- ways to write a text ------------------------------------------------------------------------


def all_ways(folder: Path) -> dict[str, Way]:
    """transformers on a saved model, and whisper.cpp on its export."""
    exported = folder.with_name(f"{folder.name}-ggml")
    export("ggml", folder, exported)
    models = {
        flash: Model(
            str(exported / "ggml-model.bin"),
            context_params={"flash_attn": flash, "use_gpu": False},
            redirect_whispercpp_logs_to=None,
        )
        for flash in (False, True)
    }
    engines = {
        name: partial(call_engine, models[flash], natural)
        for name, (natural, flash) in ENGINE.items()
    }
    model = hf_models.CapeWhisperForConditionalGeneration.from_pretrained(folder).eval()
    recogniser = Recogniser(AutoProcessor.from_pretrained(folder), padded=False)
    return {TRANSFORMERS: partial(call_transformers, model, recogniser), **engines}


def call_transformers(
    model: Any, recogniser: Recogniser, waveform: torch.Tensor, tokens: int
) -> str:
    options = {"language": "en", "task": "transcribe", "return_timestamps": False}
    (text,) = recogniser.transcribe(model, [waveform], max_new_tokens=tokens, **options)
    return text


def call_engine(model: Model, natural: bool, waveform: torch.Tensor, tokens: int) -> str:
    """whisper.cpp with as many threads as torch."""
    segments = model.transcribe(
        waveform.numpy(),
        audio_ctx=-(-len(waveform) // POSITION) if natural else 0,
        max_tokens=tokens - 1,  # after the first
        n_threads=torch.get_num_threads(),
        greedy={"best_of": 1},
        **OPTIONS,
    )
    return "".join(segment.text for segment in segments).strip()


# ---- measurements --------------------------------------------------------------------------------


def word_errors(ways: Mapping[str, Way], test: Joined) -> list[dict[str, Any]]:
    """A row for each way; a text that does not end is cut at twice the longest text."""
    limit = 2 * max(len(item.text) for item in test.items)
    waveforms = [test[number] for number in range(len(test))]
    texts = {
        name: [way(waveform, limit) for waveform in progress(waveforms, name)]
        for name, way in ways.items()
    }
    rows = []
    for name, written in texts.items():
        pairs = zip(test.items, written, strict=True)
        same = sum(map(str.__eq__, written, texts[TRANSFORMERS]))
        scores = rates([Text(item.seconds, item.text, text) for item, text in pairs])
        rows.append({"variant": name, **scores, "same": same})
    return rows


def add_times(report: Report, ways: Mapping[str, Way], setup: Setup) -> None:
    """Adds a row for each way and duration of a recording."""
    for seconds in (1,) if setup.quick else TIMED:
        noise = 0.1 * torch.randn(seconds * SAMPLING_RATE)
        steps = {name: partial(way, noise, TOKENS) for name, way in ways.items()}
        timings = interleave(steps, setup, setup.seconds(SECONDS), f"{seconds} s")
        report.add({"duration": f"{seconds} s"}, timings)


# ---- report --------------------------------------------------------------------------------------


def tables(words: list[dict], times: list[dict]) -> dict[str, list[str]]:
    """Ways by durations."""
    return {
        "Word error rate in %, by duration of the recording (texts as in transformers)": (
            variant_table(words, "duration", lambda row: f"{row['wer']:.1f} ({row['same']})")
        ),
        "Seconds of a call (times the reference)": variant_table(
            times,
            "duration",
            lambda row: f"{row['milliseconds'] / 1000:.2f} ({row['ratio']:.2f})",
        ),
    }


def plot(words: list[dict], times: list[dict], figure: Any) -> None:
    """Word error rates, and seconds of a call."""
    left, right = figure.subplots(1, 2)
    draw_bars(left, pivot(words, "duration", "variant", "wer"))
    left.set_ylabel("word error rate, %")
    draw_bars(right, pivot(times, "duration", "variant", "milliseconds"))
    right.set_ylabel("milliseconds of a call")
    legend_below(figure, left, columns=3)
