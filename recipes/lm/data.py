"""Data of the language models: tasks with one right answer at any length, and texts.

The tasks come from Kazemnejad et al., "The Impact of Positional Encoding on Length Generalization
in Transformers" (2023), who train decoders. Ruoss et al. (2023) also have reversal and addition.
"""

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from recipes.lab.data import read_text
from recipes.lab.steps import CommandError

IGNORED = -100  # label of tokens that are not predicted
HELD_OUT = 10  # the last 1 / HELD_OUT of the text is the test, if there is no validation file
TEXT_SIZE, DOCUMENT_SIZE = 1_000_000, 1500  # characters of the built-in text
LEXICON, TOPIC = 400, 12  # words of the built-in text, and of one of its documents


class Exercise(NamedTuple):
    question: str
    answer: str


def copy_letters(rng: random.Random, length: int) -> Exercise:
    """``>abc=`` and ``abc``; the first character marks the beginning."""
    letters = "".join(rng.choices(string.ascii_lowercase, k=length))
    return Exercise(f">{letters}=", letters)


def reverse_letters(rng: random.Random, length: int) -> Exercise:
    """``>abc=`` and ``cba``."""
    question, letters = copy_letters(rng, length)
    return Exercise(question, letters[::-1])


def add_numbers(rng: random.Random, length: int) -> Exercise:
    """``>110+011=`` and ``1001``: 3 + 6 = 9 for binary numbers of `length` digits, lowest first."""

    def written(number: int, digits: int) -> str:
        return f"{number:0{digits}b}"[::-1]

    first, second = (rng.randrange(2**length) for _ in range(2))
    question = f">{written(first, length)}+{written(second, length)}="
    return Exercise(question, written(first + second, length + 1))


class Task(NamedTuple):
    """A row of :data:`TASKS`.

    Attributes:
        summary: One line of the help text.
        make: Function that makes an exercise of a length; None for texts.
        train_length: Length of the longest training exercise; for texts, number of tokens of a
            block.
        times: Tested lengths, as multiples of `train_length`.
        training: Flags of the Trainer.
        samples: Number of training exercises.
    """

    summary: str
    make: Callable[[random.Random, int], Exercise] | None
    train_length: int
    times: Sequence[float]
    training: str
    samples: int = 0


_TIMES = (0.6, 1, 1.6, 2, 3, 4)
_SHORT = "--max_steps 1000 --per_device_train_batch_size 32"
TASKS = {
    "copy": Task("letters again", copy_letters, 5, _TIMES, _SHORT, 50_000),
    "reverse": Task("letters backwards", reverse_letters, 5, _TIMES, _SHORT, 50_000),
    "addition": Task("sums of binary numbers", add_numbers, 4, _TIMES, _SHORT, 50_000),
    "text": Task(
        "loss by position",
        None,
        64,
        (1, 2, 4, 8),
        "--max_steps 600 --per_device_train_batch_size 8",
    ),
}


def exercises(task: Task, lengths: Sequence[int], count: int, seed: str) -> Iterator[Exercise]:
    """`count` exercises with lengths drawn from `lengths`; the same seed gives the same
    exercises."""
    rng = random.Random(seed)
    for _ in range(count):
        yield task.make(rng, rng.choice(lengths))


def encode(work: Sequence[Exercise], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Tokens of exercises; the labels are the tokens of the answers and the ends of the answers."""

    def tokens(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]

    questions, answers = map(tokens, map(list, zip(*work, strict=True)))
    samples = []
    for question, answer in zip(questions, answers, strict=True):
        ended = [*answer, tokenizer.eos_token_id]
        samples.append({"input_ids": question + ended, "labels": [IGNORED] * len(question) + ended})
    return samples


def built_in_text(size: int = TEXT_SIZE, seed: int = 0) -> str:
    """Sentences of made-up words. Each document has a topic: words that are more frequent in this
    document. A model that has read more of a document can therefore predict more."""
    rng = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    lexicon = ["".join(rng.choices(syllables, k=rng.choice((1, 2, 2, 3)))) for _ in range(LEXICON)]
    frequencies = [1 / rank for rank in range(1, LEXICON + 1)]  # Zipf
    documents: list[str] = []
    written = 0
    while written < size:
        topic, document = rng.sample(lexicon, TOPIC), ""
        while len(document) < DOCUMENT_SIZE:
            general = rng.choices(lexicon, frequencies, k=rng.randint(3, 9))
            words = [rng.choice(topic) if rng.random() < 0.7 else word for word in general]
            document += " ".join(words) + ". "
        documents.append(document.rstrip() + "\n")
        written += len(documents[-1])
    return "".join(documents)


def read_texts(files: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Texts of the splits train and test. If there are no files for the test, the end of the
    training text is the test."""
    if not files["train"]:
        texts = {"train": built_in_text()}
    else:
        texts = {split: "".join(map(_read, paths)) for split, paths in files.items() if paths}
    if "test" not in texts:
        whole = texts["train"]
        test_start = len(whole) - len(whole) // HELD_OUT
        texts = {"train": whole[:test_start], "test": whole[test_start:]}
    return texts


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}; give files of text") from None


def blocks(tokens: Sequence[Any], length: int, split: str) -> list[Sequence[Any]]:
    """Tokens of a text in blocks of one length; a shorter last block is dropped."""
    if len(tokens) < length:
        raise CommandError(
            f"the {split} text has {len(tokens)} tokens, a block has {length}; give more text, or "
            "smaller --train-length and --test-lengths"
        )
    return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
