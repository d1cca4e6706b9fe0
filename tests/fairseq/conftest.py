"""Data and checkpoints made once by fairseq's own commands, for all test processes together."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fairseq_models import CLI_VARIANTS, lm_words, run_here, train_words

SOURCE_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TARGET_WORDS = ("eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun", "zehn")
UPDATES = 40  # of a training, in its second epoch


class Corpus(NamedTuple):
    """Folders written by fairseq-preprocess, all with one joined dictionary."""

    binary: Path  # translation en-de
    raw: Path  # the same as text files
    lm: Path  # the target side for a language model
    text: Path  # the text files


def once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by whichever test process comes first; the others wait for it."""
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = Path(f"{folder}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory) -> Path:
    """A folder that all workers of pytest-xdist see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "fairseq-shared"
    folder.mkdir(exist_ok=True)
    return folder


def _write_text(folder: Path) -> None:
    """Numbers in words; the target reverses them and puts "und" before the last. A tenth are names
    that occur once, which the dictionary does not know."""
    rng = random.Random(0)
    counts = {"train": 384, "valid": 24, "test": 24}
    sizes = {split: [rng.randint(2, 8) for _ in range(count)] for split, count in counts.items()}
    for split, lengths in sizes.items():
        source, target = [], []
        for number, length in enumerate(lengths):
            digits = [rng.randrange(10) for _ in range(length)]
            names = {i: f"{split}{number}x{i}" for i in range(length) if rng.random() < 0.1}
            words = [names.get(i, SOURCE_WORDS[d]) for i, d in enumerate(digits)]
            reverse = [names.get(i, TARGET_WORDS[d]) for i, d in enumerate(digits)][::-1]
            source.append(" ".join(words))
            target.append(" ".join([*reverse[:-1], "und", reverse[-1]]))
        (folder / f"{split}.en").write_text("\n".join(source) + "\n", encoding="utf-8")
        (folder / f"{split}.de").write_text("\n".join(target) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def corpus(shared_folder) -> Corpus:
    def make(folder: Path) -> None:
        text = folder / "text"
        text.mkdir()
        _write_text(text)
        pair = [
            "fairseq-preprocess", "-s", "en", "-t", "de", "--trainpref", text / "train",
            "--validpref", text / "valid", "--testpref", text / "test",
        ]  # fmt: skip
        joined = ["--joined-dictionary", "--thresholdsrc", 5, "--destdir", folder / "binary"]
        run_here(*pair, *joined)
        words = folder / "binary" / "dict.en.txt"
        dictionaries = ["--srcdict", words, "--tgtdict", words]
        run_here(*pair, *dictionaries, "--dataset-impl", "raw", "--destdir", folder / "raw")
        run_here(
            "fairseq-preprocess", "--only-source", "--srcdict", words, "--destdir", folder / "lm",
            "--trainpref", text / "train.de", "--validpref", text / "valid.de",
            "--testpref", text / "test.de",
        )  # fmt: skip

    folder = once(shared_folder / "corpus", make)
    return Corpus(folder / "binary", folder / "raw", folder / "lm", folder / "text")


@pytest.fixture(scope="session")
def trained(shared_folder, corpus) -> Callable[[str], Path]:
    """Function ``trained(NAME)``: a checkpoint of one of the variants, "stock" or "lm" (cape)."""

    def checkpoint(name: str) -> Path:
        def make(folder: Path) -> None:
            if name == "stock":
                words = train_words(corpus.binary, folder, arch="transformer_tiny", updates=UPDATES)
            elif name == "lm":
                words = lm_words(corpus.lm, folder)
            else:
                updates = UPDATES if name in ("cape", "sinpos") else 20
                words = train_words(corpus.binary, folder, *CLI_VARIANTS[name], updates=updates)
            run_here(*words)

        return once(shared_folder / f"trained-{name}", make) / "checkpoint_last.pt"

    return checkpoint


@pytest.fixture(scope="session")
def test_data(shared_folder, corpus) -> Path:
    """Data for inference: dictionaries and test sets, no training data."""

    def make(folder: Path) -> None:
        for file in (*corpus.binary.glob("dict.*"), *corpus.binary.glob("test*")):
            shutil.copy(file, folder)

    return once(shared_folder / "test-data", make)
