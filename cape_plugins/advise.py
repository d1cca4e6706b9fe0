"""The command ``cape-plugins advise``: settings of cape that follow from the lengths of a corpus.
docs/choosing.md says which type to take.

The rule. Let T be the length that one training input in twenty reaches, N the longest input in use.

* Type: `sinpos` if N <= T, because types are level where no position is new (CAPE Table 2: at most
  0.6 BLEU apart; docs/results.md, Multi30k: 23.5 and 23.0). Else `cape`.
* Global shift: training has to see the positions of N, so that the shift covers the difference
  (CAPE section 5.2: "covers 60 s"; SHAPE section 2.3: offsets). Positions that are counted from 0
  reach T + shift: shift = N - T. Mean-normalised ones lie around 0: shift = (N - T) / 2.
  The shift is an upper limit (docs/results.md, number lists): 5 tokens stop after 6 numbers; with
  30, which cover 12, 0.80 of the lists of 6 are right, 0.29 of 8 and 0.01 of 12.
* Images span [-1, 1] at any size, so that no shift covers a larger one: the paper's 0.5 (CAPE
  section 5.1).
* Rotary models: `rope` if N <= T. Else `cape` without a shift, which does nothing where only
  distances count, and with the scale N / T, so that training sees the distances of N
  (docs/results.md, language models: with 2 the loss stays up to three times T, with 4 up to four).
* Global scale: the paper's of the domain (1 for text, 1.1 for seconds, that of WSJ; TED-LIUM has
  2; 1.4 for images); 1 where training mixes image sizes, as UniViT does (CAPE section 5.1).
* Local shift: 0.5 steps, the most that keeps the order (CAPE section 5.2 and Appendix D.1).
* Source scale: alpha, target tokens / source tokens (CAPE section 5.3); lengths are then those of
  the target, or of the source times alpha where that is longer. Raw text has another alpha than its
  subwords: 0.94 and 1.03 for the English and German captions of Multi30k.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from cape_plugins.alpha import TokenCounts, by_tokenizer, count_lengths
from cape_plugins.arguments import PREFIX, TYPE_ARG, flag
from cape_plugins.config import PositionConfig
from cape_plugins.domains import DOMAINS, Domain
from cape_plugins.encodings import Sinusoid
from cape_plugins.registry import DEFAULT_TYPE, ROTARY
from cape_plugins.texts import text_lines

REACHED = 0.05  # share of the training inputs that reach T
WIDE = 2  # shifts of more times the median length need a longer training
MEASURED_SCALE = 4  # the largest of rotary models in docs/results.md
COARSE = 0.25  # share of channels that alias, above which a grid is called coarse


class Corpus(NamedTuple):
    """Lengths of training inputs, in tokens, seconds or patches on the longer side.

    Attributes:
        lengths: One for each input, the shortest first.
        shortest_side: Patches on the shorter side of the smallest image; of grids only.
        longest: The longest input in use.
        counts: Tokens of both sides of parallel text.
    """

    lengths: Sequence[float]
    longest: float
    shortest_side: int = 0
    counts: TokenCounts | None = None

    @property
    def reached(self) -> float:
        """T, the length that a share REACHED of the inputs has."""
        return self.lengths[math.ceil((1 - REACHED) * len(self.lengths)) - 1]


def add_advise_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--domain", choices=DOMAINS, default="text", help="what is counted (default: text)"
    )
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument(
        "--train-lengths",
        metavar="FILE",
        help="lengths of the training inputs, one a line: tokens, seconds, or patches of images "
        "(14 or ROWSxCOLUMNS); .gz is read",
    )
    corpus.add_argument(
        "--train-text",
        nargs="+",
        metavar="FILE",
        help="the training text itself, one input a line, after subword segmentation or with "
        "--tokenizer; source and target for a translation, which also gives alpha; .gz is read",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="with --train-text: folder or hub name of a Hugging Face model, whose tokenizer "
        "splits raw text (default: the text is split already, at white space)",
    )
    parser.add_argument(
        "--rotary",
        action="store_true",
        help="the model turns queries and keys by their positions, as llama, qwen2 and modernbert "
        "do",
    )
    parser.add_argument(
        "--longest",
        required=True,
        metavar="N",
        help="longest input in use, in the same unit; of a translation source tokens",
    )


def advice(args: argparse.Namespace) -> str:
    """What to print: the corpus, the settings as flags and as a dictionary, reasons and warnings.

    Raises:
        ValueError: naming option, value, allowed range and remedy.
        FileNotFoundError: if a file is missing.
        ImportError: if a tokenizer is given without transformers.
    """
    domain = DOMAINS[args.domain]
    if args.tokenizer and not args.train_text:
        raise ValueError(f"--tokenizer {args.tokenizer} belongs to --train-text; leave it out.")
    corpus = _read_text(args, domain) if args.train_text else _read_lengths(args, domain)
    other = domain.grid or domain.spacing is not None  # than tokens
    if args.rotary and (other or corpus.counts):
        has = "source and target" if corpus.counts else f"--domain {args.domain}"
        raise ValueError(f"--rotary is for language models, here with {has}; leave one out.")
    settings = recommended(corpus, args.domain, args.rotary)
    architecture = ROTARY if args.rotary else "seq2seq" if corpus.counts else "encoder"
    config = PositionConfig.from_dict(settings, args.domain, architecture)
    unit = domain.steps if domain.grid or not domain.symbol else domain.symbol
    flags = " ".join(
        f"{flag(TYPE_ARG if name == 'type' else PREFIX + name)} {_shown(value)}"
        for name, value in settings.items()
    )
    lines = [
        f"training: {len(corpus.lengths)} inputs, median {median(corpus.lengths):g}, one in "
        f"{1 / REACHED:g} has {corpus.reached:g} or more, longest {corpus.lengths[-1]:g} {unit}; "
        f"in use up to {corpus.longest:g} {unit}",
        f"flags:    {flags}",
        f"field:    position_embedding={json.dumps(settings)}",
    ]
    reasons = notes(corpus, config, unit)
    if corpus.counts and corpus.counts.doubt:
        reasons.append(f"warning: {corpus.counts.doubt}.")
    if args.train_text and not args.tokenizer:
        reasons.append(
            "tokens were counted at white space, which fits text after subword segmentation; of "
            "raw text give --tokenizer, or prepare it first."
        )
    return "\n".join([*lines, *(f"note:     {reason}" for reason in reasons)])


def recommended(corpus: Corpus, domain_name: str, rotary: bool = False) -> dict[str, Any]:
    """``{"type": ..., option: value}`` by the rule above."""
    counted = {"source_scale": str(corpus.counts)} if corpus.counts else {}
    missing = corpus.longest - corpus.reached
    if missing <= 0:
        return {"type": "rope" if rotary else "sinpos"}
    if rotary:
        times = math.ceil(corpus.longest / corpus.reached)
        return {"type": DEFAULT_TYPE, "max_global_scale": float(times)}
    domain = DOMAINS[domain_name]
    default = PositionConfig(DEFAULT_TYPE, domain_name)
    scale = default.max_global_scale
    if domain.grid:
        shift = default.max_global_shift
        scale = 1.0 if len(set(corpus.lengths)) > 1 else scale
    else:
        shift = float(math.ceil(missing / 2 if default.mean_normalize else missing))
    return {
        "type": default.type,
        "max_global_shift": shift,
        "max_local_shift": default.max_local_shift,
        "max_global_scale": scale,
        **counted,
    }


def notes(corpus: Corpus, config: PositionConfig, unit: str) -> list[str]:
    """Reasons, and warnings where measurements say that the settings may not pay."""
    domain, shift = DOMAINS[config.domain], config.max_global_shift
    if not config.random:
        reason = "nothing in use is longer than what training sees often: no augmentation is needed"
        if config.architecture == ROTARY:
            return [f"{reason}."]
        better = "abspos on images" if domain.grid else "relpos on text and speech"
        return [f"{reason}. Compare {better}, level or ahead here (docs/choosing.md, Which type)."]
    if domain.grid:
        return _notes_on_grids(corpus, config)
    if config.architecture == ROTARY:
        return _notes_on_scales(corpus, config)
    reach = f"{corpus.reached:g} to {corpus.longest:g} {unit}"
    if config.mean_normalize:
        reach = f"±{corpus.reached / 2:g} to ±{corpus.longest / 2:g} {unit}"
    lines = [
        f"a shift of ±{shift:g} takes the positions of training from {reach}.",
        "compare relpos, which carried over as well as cape or better everywhere here but on "
        "number lists (docs/choosing.md, Which type).",
        _note_on_shares(domain),
    ]
    if shift > WIDE * median(corpus.lengths):
        times = shift / median(corpus.lengths)
        lines.append(
            f"warning: the shift is {times:.1f} times the median length of training. So wide a "
            "shift takes longer to learn: on captions of 19 tokens a shift of 50 cost 4.7 BLEU "
            "after 1200 updates and 3.3 after 4800 (docs/results.md, Multi30k). Train longer, "
            "or choose a smaller shift for a smaller reach."
        )
    if domain.spacing is not None:
        lines.append(
            "warning: CTC on words whose order is local needs no positions: on digits nopos was "
            "ahead of cape on long audio (docs/results.md, Speech)."
        )
    return lines


def _note_on_shares(domain: Domain) -> str:
    measured = (
        "reached as far as 1 on number lists, and cost half a point of BLEU less on captions"
        if domain.spacing is None
        else "won back 2.2 of the 3.1 points that cape cost at the length of training on phones, "
        "and lost 8 of the 23 that it saved at four times that length"
    )
    return f"an augment_probability of 0.75 {measured} (docs/choosing.md, Probability): compare it."


def _notes_on_scales(corpus: Corpus, config: PositionConfig) -> list[str]:
    scale = config.max_global_scale
    lines = [
        f"a scale of {scale:g} shows training distances up to {scale * corpus.reached:g} tokens; "
        "on captions a scale of 2 cost 0.05 nats within the length of training and one of 4 0.12 "
        "(docs/choosing.md, Scale)."
    ]
    if scale > MEASURED_SCALE:
        lines.append(
            f"warning: scales above {MEASURED_SCALE} have not been measured. Compare nopos, "
            "randpos and rfs, whose loss hardly grows with position (docs/choosing.md)."
        )
    return lines


def _notes_on_grids(corpus: Corpus, config: PositionConfig) -> list[str]:
    lines = []
    if config.max_global_scale == 1:
        lines.append(
            "training mixes sizes, so that no scale is needed (CAPE section 5.1, UniViT). Mixed "
            "sizes made abspos and sinpos flat as well, and higher (docs/results.md, CIFAR-10)."
        )
    share = aliasing(config.domain, corpus.shortest_side)
    if share > COARSE:
        lines.append(
            f"warning: on {corpus.shortest_side} patches a side {100 * share:.0f} % of the "
            "channels turn by more than half a circle from one patch to the next. On so coarse a "
            "grid cape with the paper's shift of 0.5 was ahead of abspos at no size "
            "(docs/results.md, CIFAR-10): take smaller patches, a shift of 0.1, or abspos."
        )
    else:
        lines.append(
            "compare sinpos, which was ahead of cape at all sizes on small images after a short "
            "training (docs/results.md, CIFAR-10)."
        )
    return lines


def aliasing(domain_name: str, side: int) -> float:
    """Share of the channels that alias on a grid of `side` positions on each axis."""
    domain = DOMAINS[domain_name]
    sinusoid = Sinusoid(domain.dim, domain.frequencies)
    return sinusoid.aliased(*[side] * len(domain.grid)) / domain.dim


# ---- input --------------------------------------------------------------------------------------


def _read_lengths(args: argparse.Namespace, domain: Domain) -> Corpus:
    given = f"--train-lengths {args.train_lengths}"
    sizes = [
        _size(f"{given}, line {number}:", line, domain)
        for number, line in enumerate(_lines("--train-lengths", args.train_lengths), 1)
        if line.strip()
    ]
    if not sizes:
        raise ValueError(f"{given} has no lengths; give {_allowed(domain)}, one a line.")
    longest = max(_size("--longest", args.longest, domain))
    return Corpus(sorted(map(max, sizes)), longest, int(min(map(min, sizes))))


def _read_text(args: argparse.Namespace, domain: Domain) -> Corpus:
    paths, given = args.train_text, " ".join(args.train_text)
    if domain.grid or domain.spacing is not None:
        raise ValueError(
            f"--train-text {given} is counted in tokens, the domain is {args.domain!r}; allowed: "
            f"--train-lengths FILE with {_allowed(domain)}, one a line."
        )
    if len(paths) > 2:
        raise ValueError(
            f"--train-text {given}: {len(paths)} files; allowed: one, or source and target."
        )
    longest = max(_size("--longest", args.longest, domain))
    if args.tokenizer:
        tokens = by_tokenizer("tokens")(args.tokenizer)
        sides = [
            list(map(len, tokens(path, target=number > 0))) for number, path in enumerate(paths)
        ]
    else:
        sides = [[len(line.split()) for line in _lines("--train-text", path)] for path in paths]
    if not all(map(any, sides)):
        raise ValueError(f"--train-text {given} has no tokens; give text, one input a line.")
    if len(sides) == 1:
        return Corpus(sorted(filter(None, sides[0])), longest)
    # with the end of each sentence, which a tokenizer has added
    counts = count_lengths(*sides, names=tuple(paths), eos=not args.tokenizer)
    pairs = (max(counts.alpha * source, target) for source, target in zip(*sides, strict=True))
    return Corpus(
        sorted(filter(None, map(round, pairs))), math.ceil(counts.alpha * longest), counts=counts
    )


def _lines(option: str, path: str) -> Iterator[str]:
    """Lines of a file; errors name the option."""
    try:
        yield from text_lines(path)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"{option} {error}") from None


def _size(where: str, text: str, domain: Domain) -> tuple[float, ...]:
    """Sides of a grid, or the one length of a sequence."""
    try:
        if domain.grid:
            sides = tuple(map(int, re.fullmatch(r"\d+(x\d+)*", text.strip())[0].split("x")))
            size = sides * len(domain.grid) if len(sides) == 1 else sides
            if len(size) != len(domain.grid):
                raise ValueError
        else:
            size = (float(text) if domain.spacing is not None else int(text),)
        if not all(0 < side < math.inf for side in size):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(
            f"{where} {text.strip()!r} is not allowed; allowed: {_allowed(domain)}."
        ) from None
    return size


def _allowed(domain: Domain) -> str:
    """What a length may be, for error texts."""
    if domain.grid:
        example = "x".join(["10", *["14"] * (len(domain.grid) - 1)])
        return f"{domain.steps} such as 14 or {example}, whole numbers above 0"
    if domain.spacing is not None:
        return f"{domain.unit} such as 7.5, numbers above 0"
    return f"{domain.unit} such as 25, whole numbers above 0"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
