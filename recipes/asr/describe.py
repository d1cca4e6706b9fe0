"""Describes manifests as the appendix of the CAPE paper does: hours, seconds and words of
recordings (Tables 7 and 8), and the hops of batches without padding (Figure 14).

    python -m recipes.asr.describe data/wsj/train.tsv data/wsj/nov93dev.tsv data/wsj/nov92.tsv

Tables (CSV, Markdown) and the histogram (PNG) go to --output.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, stdev

from cape_plugins.speech.batching import PaddingFreeBatches
from cape_plugins.speech.manifest import Utterance
from recipes.asr.manifest import read_manifest
from recipes.lab.command_line import add_shared, check_shared, new_parser, number
from recipes.lab.figures import draw_bars, new_figure, write_figure
from recipes.lab.steps import CommandError, run_main, started_as
from recipes.lab.tables import (
    Row,
    how_made,
    markdown,
    pivot,
    plus_minus,
    shown_command,
    write_csv,
    write_page,
)

BATCH_SECONDS = 240.0  # batch size of the paper, on each GPU
TITLES = {"hours": "hours", "seconds": "seconds of a recording", "words": "words of a recording"}


def statistics_of(name: str, utterances: Sequence[Utterance]) -> Row:
    """Number and hours of recordings; mean and sample standard deviation of seconds and of words
    per recording (deviation 0 for a single recording)."""
    row = {"set": name, "recordings": len(utterances)}
    row["hours"] = sum(utterance.seconds for utterance in utterances) / 3600
    for unit, values in (
        ("seconds", [utterance.seconds for utterance in utterances]),
        ("words", [len(utterance.text.split()) for utterance in utterances]),
    ):
        spread = stdev(values) if len(values) > 1 else 0.0
        row |= {f"{unit}_mean": float(mean(values)), f"{unit}_deviation": float(spread)}
    return row


def shares_of_hops(
    sets: Mapping[str, Sequence[Utterance]], batch_seconds: float, seed: int
) -> list[Row]:
    """The percentage of the recordings of each set by hop, in whole milliseconds, in one epoch of
    batches of `batch_seconds` without padding."""
    counts = {}
    for name, utterances in sets.items():
        seconds = [utterance.seconds for utterance in utterances]
        batches = chain.from_iterable(PaddingFreeBatches(seconds, batch_seconds, seed))
        counts[name] = Counter(round(1000 * hop.seconds) for hop in batches)
    every = sorted({hop for counter in counts.values() for hop in counter})
    return [
        {"set": name, "hop_ms": hop, "percent": 100 * counter[hop] / counter.total()}
        for name, counter in counts.items()
        for hop in range(every[0], every[-1] + 1)
    ]


def tables_of(rows: Sequence[Row], histogram: Sequence[Row]) -> dict[str, list[str]]:
    """Sections of the page."""
    lines = [
        [row["set"], row["recordings"], f"{row['hours']:.2f}"]
        + [
            plus_minus(row[f"{unit}_mean"], row[f"{unit}_deviation"])
            for unit in ("seconds", "words")
        ]
        for row in rows
    ]
    shares = pivot(histogram, "set", "hop_ms", "percent")
    columns = next(iter(shares.values()))
    hops = [[name, *(share for (share,) in by_hop.values())] for name, by_hop in shares.items()]
    return {
        "Recordings (mean ± sample standard deviation)": markdown(
            ["set", "recordings", *TITLES.values()], lines
        ),
        "Percentage of recordings by hop in ms, without padding": markdown(
            ["set", *columns], hops, digits=1
        ),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument(
        "manifest", nargs="+", type=Path, metavar="MANIFEST", help="table of recordings with texts"
    )
    parser.add_argument(
        "--batch-seconds",
        type=number(0.1, 1e6),
        default=BATCH_SECONDS,
        metavar="X",
        help="seconds of audio in a batch without padding (default: 240, as in the paper)",
    )
    add_shared(parser, "seed", default=0)
    add_shared(parser, "output", default=Path("results/asr/corpus"))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    check_shared(args)
    names = [path.stem for path in args.manifest]
    if len(set(names)) < len(names):
        names = [str(path.with_suffix("")) for path in args.manifest]
    if len(set(names)) < len(names):
        raise CommandError(f"{' '.join(map(str, args.manifest))}: give each manifest once")
    sets = {name: read_manifest(path) for name, path in zip(names, args.manifest, strict=True)}
    rows = [statistics_of(name, utterances) for name, utterances in sets.items()]
    histogram = shares_of_hops(sets, args.batch_seconds, args.seed)
    command = shown_command(started_as(), sys.argv[1:] if argv is None else argv)
    facts = how_made(command, ("numpy", "soundfile"), seed=str(args.seed))
    page = write_page(args.output / "corpus.md", "Recordings", tables_of(rows, histogram), facts)
    write_csv(args.output / "corpus.csv", rows)
    write_csv(args.output / "hops.csv", histogram)
    figure, ((axes,),) = new_figure(7, 4.4)
    draw_bars(axes, pivot(histogram, "hop_ms", "set", "percent"))
    axes.set(xlabel="hop, ms", ylabel="recordings, %")
    axes.legend(fontsize="small")
    write_figure(args.output / "hops.png", figure)
    print("\n".join(page))
    print(f"tables and figure: {args.output}/corpus.md, corpus.csv, hops.csv, hops.png", flush=True)


if __name__ == "__main__":
    run_main(main)
