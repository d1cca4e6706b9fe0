"""Phones with times: TIMIT's ``.PHN``, Praat's ``.TextGrid``, and the label of each frame."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cape_plugins.speech.features import HOP_SECONDS, WINDOW_SECONDS
from recipes.lab.data import read_text
from recipes.lab.steps import CommandError
from recipes.lab.synthesis import Phone

SILENCE = "sil"
# names of silence in TIMIT, in Praat, of the Montreal Forced Aligner, of MAUS and of espeak-ng
SILENT_NAMES = {"", "#", "_", "_:", "<p:>", "epi", "h#", "pau", "sil", "silence", "sp"}
PHONE_TIERS = ("phones", "phone", "phonemes", "phoneme", "segments", "segment", "mau")

# Praat reads texts in quotes, numbers and flags that stand free, and takes all else for comment
_TEXT_GRID_TOKEN = re.compile(
    r'(?<!\S)(?:"((?:[^"]|"")*)"|([-+]?[\d.]+(?:[eE][-+]?\d+)?)|(<\w+>))(?!\S)'
)
_INTERVALS = "IntervalTier"
_ROW_SIZES = {"TextTier": 2, _INTERVALS: 3}  # time, mark; start, end, text


class LabelError(ValueError):
    """Labels that cannot be used; the message says why."""


class Tier(NamedTuple):
    """An interval tier of a TextGrid."""

    name: str
    phones: list[Phone]


def read_labels(path: Path, sampling_rate: int, tier: str | None = None) -> list[Phone]:
    """The phones of a ``.phn`` or ``.TextGrid`` file, in order.

    Names of silence become "sil"; marks of stress go (``AH0`` is ``AH``).

    Args:
        sampling_rate: That of the recording in Hz, the unit of ``.phn``.
        tier: Name in a TextGrid; default one with a usual name, or the only one.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}") from None
    except CommandError:
        raise LabelError("no text") from None
    if path.suffix.lower() == ".phn":
        phones = parse_phn(text, sampling_rate)
    else:
        phones = choose_tier(parse_text_grid(text), tier).phones
    phones = sorted(Phone(start, end, _clean(name)) for start, end, name in phones)
    for number, phone in enumerate(phones):
        if phone.end < phone.start or (number and phone.start < phones[number - 1].end - 1e-3):
            raise LabelError(f"the phone {phone} ends before it starts or overlaps the one before")
    if not phones:
        raise LabelError("no phone in it")
    if phones[0].start < 0:
        raise LabelError(f"the phone {phones[0]} starts before the recording")
    return phones


def _clean(name: str) -> str:
    name = name.strip()
    return SILENCE if name.lower() in SILENT_NAMES else re.sub("^([A-Z]{2})[012]$", r"\1", name)


def parse_phn(text: str, sampling_rate: int) -> list[Phone]:
    """TIMIT's format: first sample, last sample and label in each line."""
    phones = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                start, end, name = line.split()
                phones.append(Phone(int(start) / sampling_rate, int(end) / sampling_rate, name))
        except ValueError:
            raise LabelError(
                f"line {number}, {line.strip()!r}, is not: first sample, last sample, label"
            ) from None
    return phones


def parse_text_grid(text: str) -> list[Tier]:
    """The interval tiers of Praat's long and short text formats."""
    tokens = (
        float(match[2]) if match[2] else match[3] or match[1].replace('""', '"')
        for match in _TEXT_GRID_TOKEN.finditer(text)
    )
    try:
        if (next(tokens), next(tokens)) != ("ooTextFile", "TextGrid"):
            raise LabelError("not a TextGrid in Praat's text format")
        next(tokens), next(tokens)  # times of the whole
        if next(tokens) != "<exists>":
            raise LabelError("a TextGrid without tiers")
        tiers = [_parse_tier(tokens) for _ in range(int(next(tokens)))]
    except LabelError:
        raise
    except StopIteration:
        raise LabelError("the TextGrid ends too early") from None
    except (TypeError, ValueError) as error:
        raise LabelError(f"a text or number is out of place in the TextGrid ({error})") from None
    return [tier for tier in tiers if tier is not None]


def _parse_tier(tokens: Iterator[str | float]) -> Tier | None:
    """The next tier; None for a tier of points."""
    tier_class, name, _, _, count = [next(tokens) for _ in range(5)]
    if tier_class not in _ROW_SIZES:
        raise LabelError(f"a tier of the unknown class {tier_class!r}")
    rows = []
    for _ in range(int(count)):
        row = [next(tokens) for _ in range(_ROW_SIZES[tier_class])]
        if tier_class == _INTERVALS and [isinstance(cell, str) for cell in row] != [
            False,
            False,
            True,
        ]:
            raise LabelError(f"tier {name!r}: {', '.join(map(repr, row))} is no interval")
        rows.append(row)
    return Tier(name, [Phone(*row) for row in rows]) if tier_class == _INTERVALS else None


def choose_tier(tiers: Sequence[Tier], name: str | None = None) -> Tier:
    """The tier of this name, else one with a usual name (also ``SPEAKER - phones``), else the only
    one."""
    wanted = [name.lower()] if name is not None else PHONE_TIERS
    chosen = [tier for tier in tiers if tier.name.lower() in wanted]
    if name is None:
        chosen = chosen or [tier for tier in tiers if tier.name.lower().endswith(" - phones")]
        chosen = chosen or list(tiers)
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(repr(tier.name) for tier in tiers) or "none"
    raise LabelError(
        f"{len(chosen) or 'no'} tiers are {name or 'for phones'!r}; the TextGrid has {names}: name "
        "one by --tier"
    )


def frame_labels(
    phones: Sequence[Phone],
    num_frames: int,
    hop: float = HOP_SECONDS,
    window: float = WINDOW_SECONDS,
) -> list[str]:
    """The phone, of some in order, at the centre of each frame, ``i * hop + window / 2`` seconds;
    "sil" where none is."""
    centres = np.arange(num_frames) * hop + window / 2
    places = np.searchsorted([phone.start for phone in phones], centres, side="right") - 1
    return [
        phones[place].name if place >= 0 and centre < phones[place].end else SILENCE
        for place, centre in zip(places, centres, strict=True)
    ]
