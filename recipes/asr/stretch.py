"""Makes longer test sets by joining utterances that follow each other.

    python -m recipes.asr.stretch data/libri100/test_clean.tsv --seconds 10 20 30 45

makes ``test_clean_10s.tsv`` ... beside the manifest, with recordings at 16 kHz in ``audio``.
Utterances of the same talk, chapter or speaker (the part of their ids before the last - or _) are
joined in order, up to the duration. No text is lost: a longer utterance stays alone, and the last
utterances of a talk become a shorter recording.
"""

import argparse
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cape_plugins.speech.audio import AudioError
from cape_plugins.speech.features import SAMPLING_RATE
from cape_plugins.speech.manifest import LeftOut, Unusable, Utterance, load
from recipes.asr import manifest as manifests
from recipes.lab.command_line import add_shared, new_parser, number
from recipes.lab.steps import CommandError, digest, progress, run_main


def group_of(id: str) -> str:
    """The part of an id before the last ``-`` or ``_``.

    >>> group_of("84-121123-0000")
    '84-121123'
    """
    return re.sub("[-_][^-_]*$", "", id)


def pack(utterances: Sequence[Utterance], seconds: float, gap: float) -> Iterator[list[Utterance]]:
    """Yields runs of utterances; a run lasts at most `seconds`, with `gap` seconds between two
    utterances."""
    run, total = [], 0.0
    for utterance in utterances:
        if run and total + gap + utterance.seconds > seconds:
            yield run
            run, total = [], 0.0
        total += utterance.seconds + (gap if run else 0.0)
        run.append(utterance)
    if run:
        yield run


def join(run: Sequence[Utterance], gap: float, left_out: LeftOut) -> tuple[np.ndarray, str]:
    """Samples at 16 kHz and the text of a run. Utterances that cannot be read are counted and left
    out."""
    parts, texts = [], []
    silence = np.zeros(round(gap * SAMPLING_RATE), np.float32)
    for utterance in run:
        with left_out.counting():
            try:
                samples = load(utterance).numpy()
            except AudioError as error:
                raise Unusable("unreadable", error) from None
            parts += [silence, samples] if parts else [samples]
            texts.append(utterance.text)
    return np.concatenate(parts or [silence]), " ".join(texts)


def stretch(manifest: Path, output: Path, seconds: float, gap: float, any_group: bool) -> Path:
    """Makes the set ``{name}_{seconds}s.tsv`` in `output`, unless it is finished."""
    name, output = f"{manifest.stem}_{seconds:g}s", Path(os.path.abspath(output))
    table, audio = output / f"{name}.tsv", output / "audio" / name
    members, utterances = defaultdict(list), manifests.read_manifest(manifest)
    for utterance in utterances:
        members["" if any_group else group_of(utterance.id)].append(utterance)
    if len(members) == len(utterances) > 1:
        why = (
            f"no two utterances are of the same talk, by ids such as {utterances[0].id} and "
            f"{utterances[1].id}"
        )
        raise CommandError(f"{manifest}: {why}, so nothing can be joined; give --any-group")
    joined, left_out = [], LeftOut()

    def make(folder: Path) -> None:
        runs = [
            (f"{group or manifest.stem}-{n:04}".replace("/", "-"), run)
            for group, rows in members.items()
            for n, run in enumerate(pack(rows, seconds, gap))
        ]
        for id, run in progress(runs, name, unit="recording"):
            samples, text = join(run, gap, left_out)
            if text:
                manifests.write_audio(folder / f"{id}.flac", samples, SAMPLING_RATE)
                duration = len(samples) / SAMPLING_RATE
                joined.append(Utterance(id, audio / f"{id}.flac", text, duration))
        manifests.report_left_out(name, left_out, len(utterances))
        if not joined:
            raise CommandError(f"{manifest}: none of {len(utterances)} recordings can be read")

    if not table.is_file():  # an interrupted run may have left recordings without their table
        shutil.rmtree(audio, ignore_errors=True)
    settings = {"seconds": seconds, "gap": gap, "any_group": any_group}
    manifests.make_folder(audio, {**settings, "manifest": digest(manifest)}, make)
    if joined:
        manifests.write_manifest(table, joined)
    return table


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument(
        "manifest", type=Path, metavar="MANIFEST.tsv", help="manifest of recipes.asr.prepare"
    )
    parser.add_argument(
        "--seconds",
        type=number(0.1, 1e6),
        nargs="+",
        required=True,
        metavar="N",
        help="longest durations of the joined recordings; each makes one set",
    )
    add_shared(parser, "output", shown="beside the manifest")
    parser.add_argument(
        "--gap",
        type=number(0, 60),
        default=0.0,
        metavar="SECONDS",
        help="silence between two utterances (default: none)",
    )
    parser.add_argument(
        "--any-group",
        action="store_true",
        help="join utterances of different talks or speakers, too",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    sets = {args.manifest.stem: manifests.read_manifest(args.manifest)}
    output = args.output or args.manifest.parent
    for seconds in dict.fromkeys(args.seconds):
        table = stretch(args.manifest, output, seconds, args.gap, args.any_group)
        sets[table.stem] = manifests.read_manifest(table)
    print(manifests.describe(sets))


if __name__ == "__main__":
    run_main(main)
