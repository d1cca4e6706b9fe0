"""Prepares a corpus of speech: manifests ``train.tsv``, ``valid.tsv``, ``test.tsv`` in a folder.

    python -m recipes.asr.prepare librispeech SOURCE --output data/libri100 --train train-clean-100
    python -m recipes.asr.prepare tedlium3 SOURCE --output data/tedlium3
    python -m recipes.asr.prepare wsj SOURCE --output data/wsj
    python -m recipes.asr.prepare digits SOURCE --output data/digits    # wavs of single digits
    python -m recipes.asr.prepare folder SOURCE --output data/mine      # any recordings with texts
    python -m recipes.asr.prepare synthetic --output data/synthetic     # espeak-ng

Recordings that cannot be read, are shorter than a window or have no text are counted and left out;
left_out.txt in the output lists them.
A finished folder is reused, unless recordings or texts of SOURCE have changed since.
The format is described in recipes/asr/manifest.py.
"""

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from cape_plugins.speech.audio import audio_rate, read_audio
from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.manifest import LeftOut, Utterance, measured
from recipes.asr import corpora, manifest
from recipes.asr.corpora import TEST_WORDS, TRAIN_STRINGS, TRAIN_WORDS, Sets, split_folder
from recipes.asr.manifest import ToWrite, read_manifest, write_audio
from recipes.lab.command_line import add_shared, new_parser, positive
from recipes.lab.data import read_text
from recipes.lab.steps import RECORD, CommandError, recorded, run_main, write_lines
from recipes.lab.subwords import SentencePiece
from recipes.lab.synthesis import DIGITS, make_speech

TRAIN_DIGITS = (1, 6)  # fewest and most digits in a string of train and valid
TEST_DIGITS = ((1, 6), (7, 12), (13, 20), (21, 40))
SUBWORD_MODEL = "spm.model"  # the task cape_asr looks for it
SILENCE = (0.05, 0.2)  # seconds between two digits

# recordings of single digits, by speaker and digit
Takes = Mapping[str, Mapping[int, Sequence[Path]]]


def digits(source: Path, seed: int, test_takes: int, valid_takes: int, **strings: int) -> Sets:
    """Strings of digits by one speaker each, joined from recordings of single digits.

    The recordings are ``{digit}_{speaker}_{index}.wav``; the lowest indices are for the test, the
    next ones for validation. The test has `test_strings` strings for each length in
    :data:`TEST_DIGITS`.
    """
    bounds = {"test": test_takes, "valid": test_takes + valid_takes, "train": float("inf")}
    takes = _takes(source, bounds)
    if empty := [name for name in ("train", "valid", "test") if not takes[name]]:
        raise CommandError(
            f"{source}: no recording for {', '.join(empty)}; looked for "
            f"{{digit}}_{{speaker}}_{{index}}.wav, index below {test_takes} for test, below "
            f"{bounds['valid']} for valid, the others for train"
        )
    rng = np.random.default_rng(seed)
    lengths = {
        "train": [TRAIN_DIGITS] * strings["train_strings"],
        "valid": [TRAIN_DIGITS] * strings["valid_strings"],
        "test": np.repeat(TEST_DIGITS, strings["test_strings"], axis=0),
    }
    return {
        name: [_string(takes[name], bounds, rng, n) for n, bounds in enumerate(ranges)]
        for name, ranges in lengths.items()
    }


def _takes(source: Path, bounds: Mapping[str, float]) -> dict[str, Takes]:
    """Recordings of single digits, by set; `bounds` are the ends of the indices of each set."""
    takes = {name: defaultdict(lambda: defaultdict(list)) for name in bounds}
    left_out, total = LeftOut(), 0
    for path in sorted(source.rglob("*")):
        match = re.fullmatch(r"(\d)_(.+)_(\d+)\.wav", path.name, re.IGNORECASE)
        total += match is not None
        with left_out.counting():
            if match:
                measured(Utterance(path.stem, path, ""), texts=False)
                name = next(name for name, bound in bounds.items() if int(match[3]) < bound)
                takes[name][match[2]][int(match[1])].append(path)
    manifest.report_left_out("digits", left_out, total)
    return takes


def _string(takes: Takes, lengths: Sequence[int], rng: Any, number: int) -> Utterance:
    speaker = rng.choice(sorted(takes))
    by_digit = takes[speaker]
    spoken = rng.choice(sorted(by_digit), rng.integers(*lengths, endpoint=True))
    paths = [by_digit[digit][rng.integers(len(by_digit[digit]))] for digit in spoken]
    silences = rng.uniform(*SILENCE, len(paths) - 1)
    id, text = f"{speaker}-{number:05}", " ".join(DIGITS[digit] for digit in spoken)
    return Utterance(id, ToWrite(f"{id}.wav", partial(_join, paths, silences)), text)


def _join(paths: Sequence[Path], silences: Sequence[float], target: Path) -> None:
    """Writes recordings with `silences` (seconds) between them, at the rate of the first
    recording."""
    rate = audio_rate(paths[0])
    parts = []
    for path, seconds in zip(paths, (0, *silences), strict=True):
        parts += [np.zeros(round(seconds * rate), np.float32), _read(path, rate).numpy()]
    write_audio(target, np.concatenate(parts), rate)


_read = lru_cache(maxsize=10_000)(read_audio)  # many strings have the same recordings


def synthetic(seed: int, words: Sequence[str], **strings: int | None) -> Sets:
    """Random words spoken by espeak-ng: few words in a recording of train and valid, up to 96 in a
    recording of test.

    The test has `test_strings` recordings for each range of lengths (default: the numbers in
    :data:`TEST_WORDS`).
    """
    test_count = strings["test_strings"]
    plan = [
        ("train", (1, TRAIN_WORDS), strings["train_strings"]),
        *(("test", lengths, test_count or count) for lengths, count in TEST_WORDS.items()),
        ("valid", (1, TRAIN_WORDS), strings["valid_strings"]),
    ]
    sets = defaultdict(list)
    for number, (name, lengths, count) in enumerate(plan):
        # each range of each seed has its own random numbers
        for spoken in make_speech(seed * len(plan) + number, count, lengths, words):
            id = f"{name}-{len(sets[name]):05}"
            write = partial(write_audio, samples=spoken.waveform, sampling_rate=SAMPLING_RATE)
            sets[name].append(Utterance(id, ToWrite(f"{id}.wav", write), spoken.text))
    return sets


FOLDERS = {"train": ("train",), "valid": ("valid", "validation", "dev"), "test": ("test",)}


def folder(source: Path) -> Sets:
    """Recordings with texts beside them or in ``metadata.csv`` or ``.jsonl``."""
    sets = split_folder(source, FOLDERS)
    for utterances in sets.values():
        utterances[:] = [u._replace(text=manifest.unicode_words(u.text)) for u in utterances]
    return sets


CORPORA = {"librispeech": corpora.librispeech, "tedlium3": corpora.tedlium, "wsj": corpora.wsj}
CORPORA |= {"digits": digits, "synthetic": synthetic, "folder": folder}
# Numbers of recordings; in the test, the number for each range of lengths
STRINGS = {
    "digits": {"train": 4000, "valid": 300, "test": 150},
    "synthetic": {"train": TRAIN_STRINGS, "valid": 300, "test": None},
}


def absolute(path: str) -> Path:
    return Path(os.path.abspath(path))


def word_file(name: str) -> list[str]:
    try:
        words = manifest.ascii_words(read_text(Path(name))).split()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be read ({error})") from None
    if not words:
        raise argparse.ArgumentTypeError(f"{name} holds no words")
    return words


def write_word_units(folder: Path, texts: Sequence[str]) -> None:
    """Writes ``spm.model``, in which each word of `texts` is a unit, and one unit stands for all
    other words. The small decoders of the recipes work with words because their limits count units:
    attention covers 16 units, and decoding stops at 6 words a second."""
    words = {word for text in texts for word in text.split()}
    texts_file = folder / "texts"
    write_lines(texts_file, texts)
    SentencePiece.train([texts_file], folder / SUBWORD_MODEL, 1 + len(words), model_type="word")
    texts_file.unlink()


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    for name, function in CORPORA.items():
        title = function.__doc__.partition("\n")[0]
        command = commands.add_parser(name, help=title, description=title)
        if name != "synthetic":
            command.add_argument(
                "source", type=absolute, metavar="SOURCE", help="folder of the corpus"
            )
        add_shared(command, "output", type=absolute, required=True)
        command.add_argument(
            "--decode",
            action="store_true",
            help="read every recording to its end, not only its header; takes longer",
        )
        command.add_argument(
            "--word-units",
            action="store_true",
            help="make a model of subwords, spm.model, whose units are the words of train",
        )
    commands.choices["librispeech"].add_argument(
        "--train",
        nargs="+",
        default=[],
        metavar="SUBSET",
        help="subsets for training, such as train-clean-100 (default: all train-*)",
    )
    commands.choices["wsj"].add_argument(
        "--vocabulary",
        choices=corpora.WSJ_TESTS,
        default="20k",
        help="words in the prompts of validation and test (default: 20k)",
    )
    _add_string_options(commands.choices)
    return parser


def _add_string_options(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Adds options of the corpora that this module makes from strings of words."""
    for name, counts in STRINGS.items():
        add_shared(commands[name], "seed", default=0)
        for split, count in counts.items():
            text = f"number of {split} recordings"
            text += " for each range of lengths" if split == "test" else ""
            text += f" (default: {count})" if count else ""
            commands[name].add_argument(
                f"--{split}-strings", type=positive, default=count, metavar="N", help=text
            )
    commands["digits"].add_argument(
        "--test-takes",
        type=positive,
        default=5,
        metavar="N",
        help="recordings with an index below N are for the test (default: 5)",
    )
    commands["digits"].add_argument(
        "--valid-takes",
        type=positive,
        default=5,
        metavar="N",
        help="the next N indices are for validation (default: 5)",
    )
    commands["synthetic"].add_argument(
        "--words",
        type=word_file,
        default=[*DIGITS],
        metavar="FILE",
        help="text file of words to be spoken (default: zero to nine)",
    )


def main(argv: Sequence[str] | None = None) -> None:
    options = vars(make_parser().parse_args(argv))
    corpus, output, decode = (options.pop(name) for name in ("corpus", "output", "decode"))
    word_units = options.pop("word_units")
    source, finished = options.get("source"), (output / RECORD).is_file()
    if output.exists() and not finished and (output.is_file() or any(output.iterdir())):
        raise CommandError(f"--output {output} holds other files; give a new folder")

    def make(folder: Path) -> None:
        if source and not source.is_dir():
            raise CommandError(f"SOURCE {source}: no such folder; give the folder of the corpus")
        for name, utterances in CORPORA[corpus](**options).items():
            usable = manifest.collect(name, utterances, folder, decode)
            manifest.write_manifest(folder / f"{name}.tsv", usable)
            if word_units and name == "train":
                write_word_units(folder, [utterance.text for utterance in usable])

    settings = {"corpus": corpus, "decode": decode, "word_units": word_units, **options}
    manifest.make_folder(output, settings, make, source)
    tables = recorded(output)[manifest.SOURCES]["made"]  # the user may have added other tables
    names = (Path(name).stem for name in tables)
    names = sorted(names, key=lambda name: (("train", "valid", name).index(name), name))
    print(manifest.describe({name: read_manifest(output / f"{name}.tsv") for name in names}))


if __name__ == "__main__":
    run_main(main)
