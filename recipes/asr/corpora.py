"""Recordings and texts of LibriSpeech, TED-LIUM 3, WSJ, or any folder, as sets of utterances:
``train``, ``valid``, test sets."""

import codecs
import contextlib
import csv
import io
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from cape_plugins.speech.audio import AudioError, audio_seconds, read_segment
from cape_plugins.speech.manifest import Utterance
from recipes.asr.manifest import DAMAGED, ToWrite, ascii_words, files_below, write_audio
from recipes.lab.data import read_text
from recipes.lab.steps import CommandError

Sets = dict[str, list[Utterance]]
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
FEW = 10  # in a text, at most one byte in FEW may be 0; binary files have more
TEXT_COLUMNS = ("text", "transcription", "transcript", "sentence")  # of a metadata file
# Speech of espeak-ng: number of training recordings and most words in one of them; number of test
# recordings by range of words
TRAIN_STRINGS, TRAIN_WORDS = 6000, 6
TEST_WORDS = {(2, 4): 160, (4, 8): 120, (8, 16): 80, (16, 32): 40, (32, 64): 30, (64, 96): 20}


def read_transcripts(path: Path) -> str:
    """Returns the content of a text file about recordings. Bytes 0 become DAMAGED if there are few,
    so a table of thousands of lines loses only its damaged lines."""
    data = path.read_bytes()
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if 0 < data.count(0) <= len(data) // FEW and not marked:
        with contextlib.suppress(UnicodeDecodeError):  # the error below names its line
            return data.replace(b"\0", DAMAGED.encode()).decode("utf-8-sig")
    return read_text(path)


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in read_transcripts(path).split("\n")]


def gathered(read: Callable[[Path], Iterable[Utterance]], sets: Mapping[str, list[Path]]) -> Sets:
    return {name: [item for path in paths for item in read(path)] for name, paths in sets.items()}


LIBRISPEECH_VALID = "dev-clean"
LIBRISPEECH_TESTS = ("dev-other", "test-clean", "test-other")


def librispeech(source: Path, train: Sequence[str] = ()) -> Sets:
    """LibriSpeech: ``SUBSET/SPEAKER/CHAPTER/*.flac`` with the texts of a chapter in one file.

    `source` is the folder of the subsets, or its parent; by default all training subsets are used.
    """
    folders = (source, source / "LibriSpeech")
    subsets = {
        path.name: path
        for folder in folders
        for path in sorted(folder.glob("*-*"))
        if path.is_dir() and path.name.startswith(("train-", "dev-", "test-"))
    }
    if not subsets:
        tried = f"folders such as train-clean-100, dev-clean in {' and '.join(map(str, folders))}"
        raise CommandError(f"{source}: no LibriSpeech; looked for {tried}")
    train = list(dict.fromkeys(train)) or [name for name in subsets if name.startswith("train-")]
    missing = [name for name in (*train, LIBRISPEECH_VALID) if name not in subsets]
    if missing or not train:
        lacking = ", ".join(missing) or "every train-*"
        raise CommandError(f"{source}: lacks {lacking}; it has {', '.join(subsets)}")
    sets = {"train": [subsets[name] for name in train], "valid": [subsets[LIBRISPEECH_VALID]]}
    for subset in LIBRISPEECH_TESTS:
        name = subset.replace("-", "_")
        if subset in subsets:
            sets[name] = [subsets[subset]]
        else:
            print(f"{subset} does not exist, so {name}.tsv is not made", flush=True)
    return gathered(_chapters, sets)


def _chapters(subset: Path) -> Iterator[Utterance]:
    transcripts = sorted(subset.rglob("*.trans.txt"))
    if not transcripts:
        raise CommandError(f"{subset}: no transcript; looked for SPEAKER/CHAPTER/*.trans.txt")
    for path in transcripts:
        lines = (line.partition(" ") for line in read_lines(path) if line)
        texts = {id: ascii_words(text) for id, _, text in lines}
        # also counts recordings that the transcript does not list
        for id in sorted({*texts, *(audio.stem for audio in path.parent.glob("*.flac"))}):
            yield Utterance(id, path.parent / f"{id}.flac", texts.get(id, ""))


TEDLIUM_SETS = {"train": "train", "valid": "dev", "test": "test"}
# The transcripts write "it 's" and "don 't". Other words that begin with an apostrophe, such as
# 'em, stay separate words.
TEDLIUM_SUFFIX = re.compile(r" '(?=(?:s|t|d|m|re|ve|ll)(?: |$))")


def tedlium_words(text: str) -> str:
    """The words of a segment, without label, unknown words and noises; suffixes are joined to their
    words.

    >>> tedlium_words("<o,f0,male> <unk> so it 's(2) [noise] what i don 't {UH} know <sil>")
    "so it's what i don't know"
    """
    text = re.sub(r"<[^>]*>|\{[^}]*\}|\[[^]]*\]|\(\d+\)", " ", text)
    return TEDLIUM_SUFFIX.sub("'", ascii_words(text))


def tedlium(source: Path) -> Sets:
    """TED-LIUM 3, the partition "legacy". Segments are cut out of the recordings of talks.

    `source` is ``TEDLIUM_release-3``, or its parent folder. Training talks may lie in ``data``
    alone; ``legacy/train`` of the release links to ``data``.
    """
    folders = (source, source / "TEDLIUM_release-3")
    root = next((folder for folder in folders if (folder / "legacy").is_dir()), None)
    if root is None:
        tried = " and ".join(map(str, folders))
        raise CommandError(f"{source}: no TED-LIUM 3; looked for the folder legacy in {tried}")
    talks = {}
    for name, part in TEDLIUM_SETS.items():
        options = [root / "legacy" / part, *([root / "data"] if name == "train" else [])]
        present = (sorted(p.glob("stm/*.stm")) for p in options if (p / "sph").is_dir())
        talks[name] = next(filter(None, present), None)
        if not talks[name]:
            tried = " and ".join(map(str, options))
            raise CommandError(f"{root}: no {part} data; looked for sph and stm/*.stm in {tried}")
    # the folder data may also hold the talks of dev and test
    held_out = {path.stem for path in (*talks["valid"], *talks["test"])}
    talks["train"] = [path for path in talks["train"] if path.stem not in held_out]
    return gathered(_segments, talks)


def _segments(transcript: Path) -> Iterator[Utterance]:
    """Segments of a talk, from lines ``talk channel speaker start end <label> text``; the label may
    be missing."""
    recordings = transcript.parent.parent / "sph"
    for number, line in enumerate(read_lines(transcript), 1):
        if not line or line.startswith(";;"):
            continue
        cells = line.split(None, 5)
        try:
            talk, _, _, start, end = cells[:5]
            start, end = float(start), float(end)
        except ValueError:
            raise CommandError(
                f"{transcript}: line {number} is not 'talk channel speaker start end <label> text'"
            ) from None
        text = cells[5] if len(cells) > 5 else ""
        if "ignore_time_segment_in_scoring" in text:
            continue
        id = f"{talk}-{number:04}"
        cut = partial(_cut, recordings / f"{talk}.sph", start, end)
        yield Utterance(id, ToWrite(f"{id}.flac", cut), tedlium_words(text))


def _cut(source: Path, start: float, end: float, target: Path) -> None:
    """Copies the samples from `start` to `end`, in seconds."""
    samples, rate = read_segment(source, start, end)
    write_audio(target, samples, rate)


WSJ_TRAIN = ("wsj0/si_tr_s", "wsj1/si_tr_s")  # si284
# valid (nov93dev) and test (nov92), with prompts from 20000 or 5000 words
WSJ_TESTS = {"20k": ("wsj1/si_dt_20", "wsj0/si_et_20"), "5k": ("wsj1/si_dt_05", "wsj0/si_et_05")}
# Indices list the recordings of a folder that make up the set; si_et_* has two readings of the
# texts, with and without spoken punctuation.
WSJ_INDICES = {
    "wsj0/si_tr_s": "train/tr_s_wv1.ndx",
    "wsj1/si_tr_s": "si_tr_s.ndx",
    "wsj1/si_dt_20": "h1_p0.ndx",
    "wsj1/si_dt_05": "h2_p0.ndx",
    "wsj0/si_et_20": "nvp/si_et_20.ndx",
    "wsj0/si_et_05": "nvp/si_et_05.ndx",
}
WSJ_SUFFIXES = (".flac", ".wav", ".wv1")  # in order of preference; .wv2 is a second microphone


def wsj_words(text: str) -> str:
    r"""Words of a detailed transcript. Spoken punctuation is a word; marks and noises are dropped.

    >>> wsj_words(r"[<breath] <the> *U.* S. DOLLAR\'S ,COMMA . TWENTY-ONE fif(ty) %PERCENT ~")
    "the u s dollar's comma twenty one fifty percent"
    """
    text = re.sub(r"\[[^]]*\]|<NOISE>", " ", text.replace("`", "'"), flags=re.IGNORECASE)
    # a backslash escapes; the other signs mark deleted, wrong, stressed, long and unfinished words
    return ascii_words(re.sub(r"[\\<>*!:()]", "", text))


def wsj(source: Path, vocabulary: str = "20k") -> Sets:
    """WSJ0 (LDC93S6A) and WSJ1 (LDC94S13A), found by the names of files and folders.

    The usual sets: si284 with 37416 recordings; nov93dev with 503 (5k: 513), nov92 with 333 (330).
    `source` holds the discs of WSJ0 and WSJ1, at any depth.
    """
    paths = sorted(files_below(source), key=lambda path: str(path).lower())
    files = {str(path).lower(): path for path in paths}  # discs differ in letter case
    subsets = {}
    for subset in (*WSJ_TRAIN, *WSJ_TESTS[vocabulary]):
        subsets[subset] = list(_wsj_subset(subset, files))
        if not subsets[subset]:
            raise CommandError(
                f"{source}: no {subset}; looked for {subset}/SPEAKER/*.wv1 (or .wav, .flac) at any "
                "depth, upper or lower case"
            )
    *train, valid, test = subsets.values()
    return {"train": [line for subset in train for line in subset], "valid": valid, "test": test}


def _wsj_subset(subset: str, files: Mapping[str, Path]) -> Iterator[Utterance]:
    recordings = {
        path.stem.lower(): path
        for suffix in reversed(WSJ_SUFFIXES)
        for name, path in files.items()
        if f"/{subset}/" in name and name.endswith(suffix)
    }
    # the texts are in another tree, such as wsj0/transcrp/dots/si_tr_s
    texts, folder = {}, subset.partition("/")[2]
    # .dot has a detailed transcript, .lsn the text that a recogniser should write; .dot is
    # preferred
    for suffix in (".lsn", ".dot"):
        for name, path in files.items():
            if name.endswith(suffix) and f"/{folder}/" in name:
                texts |= _wsj_texts(path)
    listed = [path for name, path in files.items() if name.endswith("/" + WSJ_INDICES[subset])]
    ids = {id for path in listed for id in _wsj_index(path, subset)}
    if recordings and not ids:
        print(
            f"{WSJ_INDICES[subset]} does not exist: all recordings of {subset} are used", flush=True
        )
    for id in sorted(ids or recordings):
        name, audio = f"{id[:3]}-{id}", recordings.get(id)
        if audio is None:
            audio = Path(f"{subset}/{id[:3]}/{id}.wv1")
        elif _is_compressed(audio):
            audio = ToWrite(f"{name}.flac", partial(_uncompress, audio))
        yield Utterance(name, audio, texts.get(id, ""))


def _wsj_texts(path: Path) -> dict[str, str]:
    """Reads texts by id from lines ``text (id)``."""
    matches = (re.fullmatch(r"(.*)\((\w+)\)", line) for line in read_lines(path))
    return {match[2].lower(): wsj_words(match[1]) for match in matches if match}


def _wsj_index(path: Path, subset: str) -> Iterator[str]:
    """Yields the ids of an index with lines such as ``11_13_1:wsj0/si_et_20/440/440c0401``."""
    for line in read_lines(path):
        line = line.lower()
        # the usual si284 does not have this speaker
        if f"{subset}/" in line and not line.startswith((";", "11_2_1:wsj0/si_tr_s/401")):
            yield line.rpartition("/")[2].removesuffix(".wv1")


def _is_compressed(path: Path) -> bool:
    """Whether a NIST SPHERE file is compressed by shorten, as on the discs; some copies of the
    discs are not compressed."""
    with open(path, "rb") as file:
        header = file.read(1024)
    return header.startswith(b"NIST_1A") and b"embedded-shorten" in header


def _uncompress(source: Path, target: Path) -> None:
    commands = {
        "sph2pipe": ("-f", "wav", "-c", "1", source),
        "ffmpeg": ("-nostdin", "-v", "error", "-y", "-i", source, "-c:a", "pcm_s16le"),
    }
    tool = next(filter(shutil.which, commands), None)
    if tool is None:
        raise CommandError(
            f"{source} is compressed by shorten, which needs sph2pipe (of the LDC) or ffmpeg: "
            f"install one of them, or put {source.stem}.wav or .flac beside each .wv1"
        )
    with tempfile.TemporaryDirectory() as folder:
        wav = Path(folder, "uncompressed.wav")
        done = subprocess.run([tool, *commands[tool], wav], capture_output=True, check=False)
        if done.returncode or not wav.is_file():
            reason = done.stderr.decode(errors="replace").strip()
            raise AudioError(
                f"{source}: {tool} failed ({reason}); repair the file, or leave it out."
            )
        _cut(wav, 0, audio_seconds(wav), target)


def split_folder(folder: Path, names: Mapping[str, Sequence[str]]) -> Sets:
    """Audio files with their texts, from one folder, or from a subfolder for each set. `names`
    lists the names that the subfolder of a set may have.

    The texts stand in ``metadata.csv`` or ``metadata.jsonl`` with the columns file_name and text,
    or in a file beside each recording, ``one.txt`` beside ``one.wav``. A tenth of the training
    data, at most 1000 recordings, is split off for each missing set.
    """
    parts = {
        split: next((folder / name for name in allowed if (folder / name).is_dir()), None)
        for split, allowed in names.items()
    }
    if any(parts.values()) and not parts["train"]:
        others = ", ".join(part.name for part in parts.values() if part)
        raise CommandError(f"{folder}: no folder train beside {others}")
    parts["train"] = parts["train"] or folder
    sets = {split: utterances_in(part) for split, part in parts.items() if part}
    missing = [split for split in names if split not in sets]
    recordings = [utterance for utterance in sets["train"] if utterance.text]
    # recordings without a text, which are reported
    others = [utterance for utterance in sets["train"] if not utterance.text]
    size = min(1000, max(1, len(recordings) // 10))
    if len(recordings) <= size * len(missing):
        why = f"{len(recordings)} recordings are too few to split off {', '.join(missing)}"
        raise CommandError(f"{folder}: {why}")
    order = np.random.default_rng(0).permutation(len(recordings))
    drawn = np.split(order, [size * (n + 1) for n in range(len(missing))])
    for split, rows in zip((*missing, "train"), drawn, strict=True):
        sets[split] = [recordings[n] for n in sorted(rows)]
    sets["train"] += others
    return sets


def recordings_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES)


def utterances_in(folder: Path) -> list[Utterance]:
    tables = (folder / "metadata.csv", folder / "metadata.jsonl")
    if table := next(filter(Path.is_file, tables), None):
        rows = _metadata(table)
        column = next((name for name in TEXT_COLUMNS if rows and name in rows[0]), None)
        if column is None or "file_name" not in rows[0]:
            names = ", ".join(TEXT_COLUMNS)
            raise CommandError(f"{table}: needs the columns file_name and one of {names}")
        pairs = [(folder / row["file_name"], row[column] or "") for row in rows]
    else:
        recordings = recordings_in(folder)
        pairs = [(path, text_beside(path)) for path in recordings]
        described = sum(bool(text) for _, text in pairs)
        if described < 2:
            raise CommandError(
                f"{folder} holds {len(recordings)} recordings ({', '.join(AUDIO_SUFFIXES)}), "
                f"{described} of them with a text; at least 2 are needed. Give metadata.csv with "
                "the columns file_name and text, or a text file beside each recording, such as "
                "one.txt beside one.wav"
            )
    return [Utterance(_id(path, folder), path, text.strip()) for path, text in pairs]


def text_beside(recording: Path) -> str:
    """The text in the file beside a recording; empty if there is no such file."""
    path = recording.with_suffix(".txt")
    return read_transcripts(path) if path.is_file() else ""


def _id(path: Path, folder: Path) -> str:
    relative = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
    return re.sub(r"\s", "_", "-".join(relative.with_suffix("").parts))


def _metadata(table: Path) -> list[dict[str, str]]:
    text = read_transcripts(table)
    if table.suffix == ".csv":
        # a carriage return ends no line; within quotes it is a part of the text
        reader = csv.DictReader(io.StringIO(text, newline="\n"))
        try:
            return list(reader)
        except csv.Error as error:
            line, why = reader.reader.line_num, str(error).partition(" - ")[0]
            remedy = "put the cell into quotes"
            raise CommandError(f"{table}, line {line} is not csv ({why}); {remedy}") from None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise CommandError(
                f"{table}, line {number} is not JSON ({error}); repair the line"
            ) from None
    return rows
