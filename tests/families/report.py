"""Writes docs/families.md, and hf_models/not_proved.json, from the results of all releases
in build/families."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from packaging.version import Version

from cape_plugins.checkpoints.generated import GENERATED
from cape_plugins.utils.files import writing
from hf_models.checks.in_attention import IN_ATTENTION
from hf_models.checks.packed import PACKED
from hf_models.releases import NOT_PROVED
from tests.families.reasons import reason_of
from tests.families.results import (
    FAILS,
    FOLDER,
    NO_ROW,
    NO_SEAM,
    NOT_RUN,
    PART,
    PROVED,
    ROOT,
    Row,
    read,
)

DOCUMENT = ROOT / "docs" / "families.md"
_REFUSED = re.compile(r"^.*? acts in attention, and ")  # the start of a refusal, alike for all
_REMEDY = re.compile(r"(; allowed|\. ).*$")
_RESULTS = (PROVED, NO_ROW, FAILS, NO_SEAM, PART, NOT_RUN)
_SHOWN = {
    "outputs": "with the stock type all outputs equal the outputs of the stock class bit for bit",
    "padding": "the same in batches with padding on the right and on the left, where the forward "
    "takes a mask; a model that counts from the first token equals the stock model on each sample "
    "alone",
    "packed texts": "where the stock model, or the family, keeps texts apart that `position_ids` "
    "pack in one sample: with the stock type outputs are equal bit for bit, with another type each "
    "text has the outputs that it has alone",
    "generation": "greedy steps with a cache, from texts with padding on the left: tokens and "
    "logits are equal",
    "updates": "three steps of SGD give equal parameters",
    "storage": "saved and loaded by the Auto class and by the class itself, or by the class itself "
    "alone, where no Auto class loads the model; stock checkpoint loaded with "
    "`position_embedding`, also without positions; the stock class refuses the folder",
    "copies": "`copy.deepcopy` and `pickle`",
    "another type": "the output changes without positions; evaluation draws nothing; a model "
    "inside, such as the text model of CLIP, gives the same if it is called alone; two draws "
    "change the output in training; gradients are finite, and the same with gradient checkpointing",
    "in attention": "where the stock model adds positions and looks its attention function up by "
    "the interface of transformers: a type of each kind that acts in attention changes the output, "
    "counts from the first token with padding on either side and with a cache, and trains as above",
    "two kinds": "where a field of the stock configuration tells two kinds of stock models apart, "
    "such as ESM with a table and ESM-2, which turns queries and keys: the same for both",
}
_INTRODUCTION = """\
# Families of Hugging Face models

`python -m tests.families` builds a tiny stock model of each model type that transformers has and
shows, in a process for each type:

| what | how |
|---|---|"""
_READING = """\
Everything above was shown, except what the last column names. Where the cell of types
in attention is empty, the model turns queries and keys, or its family has a file.

`moonshine` counts the frames of its encoder, 24 ms each, not seconds, because the stock model does.
"""
_OTHER_WAY = """
`cape-plugins doctor MODEL_TYPE` shows the same for one model type on your release.
"""


def write(machine: str, path: Path = DOCUMENT, not_proved_path: Path = NOT_PROVED) -> None:
    """Writes the page, and which rows of the table are not proved, by release.

    Args:
        machine: The command, the machine and the versions of the last run.
        path: Where to write the page.
        not_proved_path: Where to write the names, which :mod:`hf_models.releases` reads.
    """
    files = sorted(FOLDER.glob("*.jsonl"), key=lambda file: Version(file.stem))
    releases = {file.stem: read(file) for file in files}
    with writing(path) as file:
        file.write("\n".join(page(releases, machine)) + "\n")
    rows = not_proved(releases).items()
    lines = (f"{json.dumps(release)}: {json.dumps(names)}" for release, names in rows)
    with writing(not_proved_path) as file:
        file.write("{\n  " + ",\n  ".join(lines) + "\n}\n")


def not_proved(releases: Mapping[str, Mapping[str, Row]]) -> dict[str, list[str]]:
    """By release, the rows of the table of generated families that the release has, but that were
    not proved there. For the argument see :func:`page`."""
    return {
        release: sorted(n for n in rows.keys() & GENERATED.keys() if not _is_proved(rows[n]))
        for release, rows in releases.items()
    }


def page(releases: Mapping[str, Mapping[str, Row]], machine: str) -> Iterator[str]:
    """Lines of the page.

    Args:
        releases: Results by model type, by release, oldest first.
        machine: See :func:`write`.
    """
    yield _INTRODUCTION
    yield from (f"| {what} | {how} |" for what, how in _SHOWN.items())
    yield _OTHER_WAY
    yield machine
    yield ""
    yield from _counts(releases)
    types = sorted({name for rows in releases.values() for name in rows})
    proved = {
        name: [release for release, rows in releases.items() if _is_proved(rows.get(name))]
        for name in types
    }
    yield "\n## Families\n"
    yield _READING
    yield "| model type | stock class | seam | in attention | transformers | not shown |"
    yield "|---|---|---|---|---|---|"
    for name in types:
        if proved[name]:
            rows = {release: releases[release][name] for release in proved[name]}
            stock, seam, in_attention, missing = (_cell(rows, text) for text in _CELLS)
            cells = stock, seam, in_attention, ", ".join(rows), missing
            yield f"| `{name}` | {' | '.join(cells)} |"
    last = {name: _last(releases, name) for name in types if proved[name]}
    yield from _lost({name: row for name, row in last.items() if not _is_proved(row)})
    yield from _out({name: _last(releases, name) for name in types if not proved[name]})


def _counts(releases: Mapping[str, Mapping[str, Row]]) -> Iterator[str]:
    """The number of model types by seam and result, a column for each release."""
    kinds = {release: [*map(_kind, rows.values())] for release, rows in releases.items()}
    counts = {release: Counter(names) for release, names in kinds.items()}
    names = sorted({name for counter in counts.values() for name in counter})
    names.sort(key=lambda name: _RESULTS.index(name.partition(",")[0]))
    yield "| model types | " + " | ".join(releases) + " |"
    yield "|---" * (len(releases) + 1) + "|"
    for name in names:
        yield f"| {name} | " + " | ".join(str(counts[release][name]) for release in releases) + " |"
    totals = (sum(name.startswith(PROVED) for name in kinds[release]) for release in releases)
    yield "| **all proved** | " + " | ".join(f"**{total}**" for total in totals) + " |"
    packed = (sum(map(_keeps_texts_apart, rows.values())) for rows in releases.values())
    yield "| of these, packed texts | " + " | ".join(map(str, packed)) + " |"


def _keeps_texts_apart(row: Row) -> bool:
    shown = row.get("shown", ()) if _is_proved(row) else ()
    return any(name.endswith(PACKED) for name in shown)


def _kind(row: Row) -> str:
    with_seam = row["result"] in (PROVED, FAILS) and row["seam"]
    return f"{row['result']}, seam {row['seam']}" if with_seam else row["result"]


def _is_proved(row: Row | None) -> bool:
    return row is not None and row["result"] == PROVED


def _last(releases: Mapping[str, Mapping[str, Row]], name: str) -> Row:
    return [rows[name] for rows in releases.values() if name in rows][-1]


def _cell(rows: Mapping[str, Row], text_of: Callable[[Row], str]) -> str:
    """A text for all releases, or where they differ a text for each that has one."""
    texts = {release: text_of(row) for release, row in rows.items()}
    if len({*texts.values()}) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{release}: {text}" for release, text in texts.items() if text)


def _in_attention(row: Row) -> str:
    """Types in attention that were shown beside the types that add, or why there are none."""
    if (refusal := row["skipped"].get(IN_ATTENTION)) is not None:
        return f"none: {_REMEDY.sub('', _REFUSED.sub('', refusal))}"
    return ", ".join(row.get("in_attention", ()))


def _missing(row: Row) -> str:
    """What could not be shown because the stock model fails, in a few words."""
    failing = [name for name, text in row["skipped"].items() if text.startswith("the stock model")]
    return f"{', '.join(failing)}: the stock model fails" if failing else ""


_CELLS = (itemgetter("class"), itemgetter("seam"), _in_attention, _missing)


def _lost(rows: Mapping[str, Row]) -> Iterator[str]:
    """Families that an older release shows and the newest release with the type does not."""
    if not rows:
        return
    yield "\n## Families that the newest release does not show\n"
    yield "| model type | transformers | why |"
    yield "|---|---|---|"
    for name, row in rows.items():
        yield f"| `{name}` | {row['release']} | {reason_of(row)} |"


def _out(rows: Mapping[str, Row]) -> Iterator[str]:
    """The model types that have no family here, with the reason; types with one reason together."""
    yield "\n## Model types without a family\n"
    groups: dict[tuple[str, str], list[str]] = {}
    for name, row in rows.items():
        groups.setdefault((row["result"], reason_of(row)), []).append(name)
    yield "| result | why | model types |"
    yield "|---|---|---|"
    for (result, reason), names in sorted(groups.items(), key=_order):
        yield f"| {result} | {reason} | {' '.join(f'`{name}`' for name in names)} |"


def _order(group: tuple[tuple[str, str], Sequence[str]]) -> tuple[int, int, str]:
    (result, _), names = group
    return _RESULTS.index(result), -len(names), names[0]
