"""Tiny corpora in the layouts of the real ones."""

import numpy as np
import soundfile

from recipes.asr import prepare
from recipes.asr.manifest import read_manifest

RATE = 16000


def write(path, seconds=0.5, rate=RATE, format=None, seed=0):
    """A recording of noise; returns its samples, int16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(seed).integers(-3000, 3000, round(seconds * rate), np.int16)
    soundfile.write(path, samples, rate, subtype="PCM_16", format=format)
    return samples


def write_text(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def run(*words):
    prepare.main([str(word) for word in words])


def texts(folder, name):
    return {utterance.id: utterance.text for utterance in read_manifest(folder / f"{name}.tsv")}


def rows(path):
    return [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]


def make_librispeech(folder):
    """Six subsets of one speaker with two chapters of two utterances; returns `folder`."""
    root = folder / "LibriSpeech"
    for subset, speaker in {
        "train-clean-100": 19,
        "train-other-500": 20,
        "dev-clean": 84,
        "dev-other": 116,
        "test-clean": 61,
        "test-other": 367,
    }.items():
        lines = []
        for chapter in (198, 227):
            chapter_folder = root / subset / str(speaker) / str(chapter)
            for n in range(2):
                id = f"{speaker}-{chapter}-{n:04}"
                write(chapter_folder / f"{id}.flac", 0.3 + 0.1 * n)
                lines.append(f"{id} CHAPTER {'TWO' if chapter == 227 else 'ONE'} IT'S {speaker}")
            write_text(chapter_folder / f"{speaker}-{chapter}.trans.txt", *lines[-2:])
    return folder


STM = {
    "train": (
        "AaronHuey_2010X",
        ";; comment",
        "AaronHuey_2010X 1 AaronHuey_2010X 0.50 1.25 <o,f0,male> i 'm here <unk> to(2) talk",
        "AaronHuey_2010X 1 AaronHuey_2010X 1.25 1.75 <o,f0,male> <unk>",
        "AaronHuey_2010X 1 AaronHuey_2010X 2.00 2.40 <unk> without a label",
        "AaronHuey_2010X 1 AaronHuey_2010X 9.00 9.40 <o,f0,male> beyond the end",
    ),
    "dev": (
        "AlGore_2009",
        "AlGore_2009 1 inter_segment_gap 0 1.0 <o,f0,> ignore_time_segment_in_scoring",
        "AlGore_2009 1 AlGore_2009 1.0 2.0 <o,f0,male> last year i don 't know",
        "AlGore_2009 1 AlGore_2009 2.0 2.5 <o,f0,male> what 's that",
    ),
    "test": ("BillGates_2010", "BillGates_2010 1 BillGates_2010 0.1 0.9 <NA> energy and climate"),
}


def make_tedlium(folder):
    """A talk of 3 s in each set; returns the folder of the release."""
    root = folder / "TEDLIUM_release-3"
    for part, (talk, *lines) in STM.items():
        write(root / "legacy" / part / "sph" / f"{talk}.sph", 3.0, format="NIST", seed=len(talk))
        write_text(root / "legacy" / part / "stm" / f"{talk}.stm", *lines)
    return root


def make_digits(folder):
    """Takes 0 to 11 of each digit by two speakers; their constant tells speaker, digit, take."""
    folder.mkdir()
    for speaker, digit, index in np.ndindex(2, 10, 12):
        value = 1000 * (1 + speaker) + 100 * digit + index
        samples = np.full(800 + 40 * digit, value, np.int16)
        soundfile.write(folder / f"{digit}_{('ann', 'bo')[speaker]}_{index}.wav", samples, 8000)
    return folder
