"""The command ``cape-plugins advise``: the type that docs/choosing.md recommends for the lengths of
a corpus, and the settings of `cape` that follow from these lengths. Rows of ``DOMAINS`` hold the
recommended types; docs/settings.md (A trained model) says how a trained model goes on.

The rule. Let T be the length that one training input in twenty reaches, N the longest input in use.
If N is at most T, nothing is augmented. If N is at most the longest training input, training has
seen all positions in use, the far ones rarely, which is enough if long inputs are as rare in use.

* Shift of `cape`: training must see the positions of an input of length N (CAPE section 5.2:
  "covers 60 s"; SHAPE section 2.3: offsets). Positions that are counted from 0 reach T + shift:
  shift = N - T. Mean-normalised positions lie around 0: shift = (N - T) / 2. Images span [-1, 1] at
  any size, so no shift covers a larger image, and the shift of the paper remains.
* Scale of `cape`: the scale of the paper for the domain; 1 if training mixes sizes of images, as in
  UniViT (CAPE section 5.1). Rotary models have the scale N / T and no shift, because a shift does
  nothing if only distances count.
* Source scale: alpha, target tokens / source tokens (CAPE section 5.3). The length of a pair is
  then the larger of target length and source length times alpha.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cape_plugins.corpus.alpha import TokenCounts, by_tokenizer, count_lengths
from cape_plugins.mathematics.encodings import Sinusoid
from cape_plugins.settings.arguments import TYPE_ARG, option_flag
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS, SWITCH_PERCENT, Domain
from cape_plugins.settings.options import OptionError
from cape_plugins.settings.registry import DEFAULT_TYPE, ENCODINGS, ROTARY, TYPES
from cape_plugins.utils.texts import text_lines

REACHED = 0.05  # share of the training inputs that have the length T or more
LARGEST_SCALE = 4  # for rotary models; larger scales have not been measured
COARSE = 0.25  # share of channels that alias, above which a grid is called coarse
TWICE = 2  # times the length of training, beyond which other types are ahead in translation
AUGMENTED = 0.75  # share of samples that cape augments in text
ROTARY_TYPE = "rope"  # of rotary models from scratch, if nothing in use is longer
PAGE, SETTINGS = "docs/choosing.md", "docs/settings.md"


class Corpus(NamedTuple):
    """Lengths of training inputs, in tokens, seconds or patches on the longest side.

    Attributes:
        lengths: Length of each input, the shortest first.
        shortest_side: Patches on the shorter side of the smallest image; grids only.
        longest: The longest input in use.
        counts: Tokens of both sides of parallel text.
    """

    lengths: Sequence[float]
    longest: float
    shortest_side: int = 0
    counts: TokenCounts | None = None

    @property
    def reached(self) -> float:
        """T, the length that a share :data:`REACHED` of the inputs has or exceeds."""
        return self.lengths[math.ceil((1 - REACHED) * len(self.lengths)) - 1]


def add_advise_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--domain", choices=DOMAINS, default="text", help="kind of the inputs (default: text)"
    )
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument(
        "--train-lengths",
        metavar="FILE",
        help="lengths of the training inputs, one a line: tokens, seconds, or patches of grids "
        "(14, or the sizes of the axes, such as 14x20); .gz is read",
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
        "do (default: as the config.json in the folder of --tokenizer says)",
    )
    parser.add_argument(
        "--longest",
        required=True,
        metavar="N",
        help="length of the longest input in use, in the same unit; for a translation in source "
        "tokens",
    )
    parser.add_argument(
        "--trained",
        metavar="TYPE",
        choices=TYPES,
        help="type of position embedding of a model that is trained already; also prints how to "
        "switch the model to the type that is advised",
    )


def advice(args: argparse.Namespace, in_fairseq: bool = True) -> str:
    """The printed advice: the corpus, the settings as flags and as a dictionary, and the reason.
    `in_fairseq` tells whether fairseq has models of this kind.

    Raises:
        ValueError: names option, value, allowed range and remedy.
        FileNotFoundError: if a file is missing.
        ImportError: if a tokenizer is given without transformers.
    """
    domain = DOMAINS[args.domain]
    if args.tokenizer and not args.train_text:
        raise ValueError(f"--tokenizer {args.tokenizer} belongs to --train-text; leave it out.")
    corpus = _read_text(args, domain) if args.train_text else _read_lengths(args, domain)
    counts_tokens = not domain.grid and domain.spacing is None
    if args.rotary and (corpus.counts or not counts_tokens):
        conflict = "source and target" if corpus.counts else f"--domain {args.domain}"
        raise ValueError(
            f"--rotary is for language models, here with {conflict}; leave one of the two out."
        )
    architecture = ROTARY if args.rotary else "seq2seq" if corpus.counts else "encoder"
    if args.trained:
        _check_trained(args.trained, args.domain, architecture)
    unit = domain.steps if domain.grid or not domain.symbol else domain.symbol
    number = len(corpus.lengths)
    lines = [
        f"training: {number} input{'s' if number > 1 else ''}, median "
        f"{median(corpus.lengths):g}, one in {1 / REACHED:g} has {corpus.reached:g} or more, "
        f"longest {corpus.lengths[-1]:g} {unit}; in use up to {corpus.longest:g} {unit}"
    ]
    *rows, reason = choose(corpus, args.domain, args.rotary, args.trained)
    for index, row in enumerate(rows):
        prefix = "or " if index else ""
        PositionConfig.from_dict(row, args.domain, architecture)  # refuses wrong advice
        lines.append(f"{prefix + 'flags:':<10}{_flags(row)}")
        lines.append(f"{prefix + 'field:':<10}position_embedding={json.dumps(row)}")
    lines.append(f"note:     {reason}")
    if args.trained and any(row["type"] != args.trained for row in rows):
        lines.extend(_how_to_switch(args, in_fairseq))
    if corpus.counts and corpus.counts.doubt:
        lines.append(f"note:     warning: {corpus.counts.doubt}.")
    if args.train_text and not args.tokenizer:
        lines.append(
            "note:     tokens were counted at white space, which fits text after subword "
            "segmentation; of raw text give --tokenizer, or prepare it first."
        )
    return "\n".join(lines)


def _check_trained(trained: str, domain_name: str, architecture: str) -> None:
    """Refuses a type that no trained model of this kind has."""
    try:
        PositionConfig(trained, domain_name, architecture)
    except OptionError as error:
        raise ValueError(
            f"--trained {trained} {error.problem}; allowed: {error.allowed}. Give the type that "
            "the model has now, or leave --trained out."
        ) from None


def choose(
    corpus: Corpus, domain_name: str, rotary: bool = False, trained: str | None = None
) -> tuple[Any, ...]:
    """Returns settings ``{"type": ..., option: value}`` by the rule at the top of this file, then
    alternative settings for some tasks, and last the reason. `trained` is the type of a model that
    is trained already."""
    if rotary:
        longer = _choose_scale(corpus)
    else:
        longer = _choose_for_longer(corpus, domain_name, trained)
    if corpus.longest > corpus.lengths[-1]:
        return longer
    domain = DOMAINS[domain_name]
    from_scratch = domain.coarse if _is_coarse(corpus, domain_name) else domain.from_scratch
    settings = {"type": trained or (ROTARY_TYPE if rotary else from_scratch)}
    if corpus.longest <= corpus.reached:
        reason = "nothing in use is longer than what training sees often: no augmentation is needed"
        return settings, f"{reason} ({PAGE}, Which type)."
    *rows, reason_for_longer = longer
    alternatives = [row for row in rows if row != settings]
    reason = "nothing in use is longer than the longest training input."
    if alternatives:
        reason += (
            f" If more than one in {1 / REACHED:g} inputs in use is longer than "
            f'{corpus.reached:g}, take the settings after "or": {reason_for_longer}'
        )
    return settings, *alternatives, reason


def _choose_for_longer(corpus: Corpus, domain_name: str, trained: str | None) -> tuple[Any, ...]:
    """Settings and the reason for inputs in use that are longer than T, see :func:`choose`."""
    domain, cape = DOMAINS[domain_name], _cape(corpus, domain_name)
    if _is_coarse(corpus, domain_name):
        share = aliasing(domain_name, corpus.shortest_side)
        reason = (
            f"on {corpus.shortest_side} patches a side {100 * share:.0f} % of the channels of "
            f"sinusoids turn by more than half a circle from patch to patch "
            f"({SETTINGS}, When not to use cape)."
        )
        # on CIFAR-10, rope helps a model trained with sinusoids, and none helps one with a table
        keeps_table = trained in (None, domain.coarse)
        return {"type": domain.coarse if keeps_table else domain.from_scratch}, reason
    if trained and domain.keeps_type and not ENCODINGS[TYPES[trained].encoding].counts:
        best: Sequence[Mapping[str, Any]] = ({"type": trained},)
        where = "running text: no switch gained anything on longer captions"
        page = f"{SETTINGS}, A trained model"
    else:
        up_to_twice, beyond = domain.twice, domain.longer
        if corpus.counts:
            up_to_twice, beyond = domain.pairs, domain.longer_pairs or beyond
        is_twice = corpus.longest <= TWICE * corpus.reached
        where, best = (is_twice and up_to_twice) or beyond
        page = f"{PAGE}, Which type"
    reason = f"take {' or '.join(row['type'] for row in best)} for {where} ({page}). "
    if domain.grid:
        reason += f"With millions of training images take {cape['type']}."
    else:
        example = f", as in {domain.by_position}" if domain.by_position else ""
        reach = f"{corpus.longest:g} {domain.symbol}".rstrip()
        reason += (
            f"If positions alone lead to the answer{example}, take {cape['type']}: with this "
            f"shift, training sees positions up to {reach} ({SETTINGS}, Shift)."
            f"{domain.with_decoder}"
        )
    return *best, cape, reason


def _cape(corpus: Corpus, domain_name: str) -> dict[str, Any]:
    """Settings of `cape` by the rule at the top of this file, for models that are not rotary."""
    default = PositionConfig(DEFAULT_TYPE, domain_name)
    settings = {
        "type": default.type,
        "max_global_shift": default.max_global_shift,
        "max_local_shift": default.max_local_shift,
        "max_global_scale": default.max_global_scale,
    }
    if DOMAINS[domain_name].grid:
        return settings if len(set(corpus.lengths)) == 1 else settings | {"max_global_scale": 1.0}
    added_length = corpus.longest - corpus.reached
    shift = added_length / 2 if default.mean_normalize else added_length
    settings["max_global_shift"] = float(math.ceil(shift))
    if not default.mean_normalize:
        settings["augment_probability"] = AUGMENTED
    if corpus.counts:
        settings["source_scale"] = str(corpus.counts)
    return settings


def _how_to_switch(args: argparse.Namespace, in_fairseq: bool) -> Iterator[str]:
    percent = DOMAINS[args.domain].switch_percent
    for_cape = "" if percent == SWITCH_PERCENT else f" ({DEFAULT_TYPE}: {SWITCH_PERCENT} %)"
    fairseq = "fairseq: --finetune-from-model CHECKPOINT with these flags; " if in_fairseq else ""
    twice = f" ({DEFAULT_TYPE} at twice this rate, which helped in the control task)"
    yield (
        f"switch:   {fairseq}Hugging Face: from_pretrained(MODEL, position_embedding=...) or "
        "hf_models.switch(model, ...)"
    )
    yield (
        f"note:     after a switch train for {percent} % of the updates of the first training"
        f"{for_cape}, at its highest learning rate{'' if args.rotary else twice}, with warm-up and "
        f"decay; train {args.trained} on for as long, and compare. Only a control task, number "
        "lists, captions, digits with CTC, CIFAR-10 and exercises of rotary models were measured "
        f"({SETTINGS}, A trained model)."
    )


def _choose_scale(corpus: Corpus) -> tuple[Any, ...]:
    scale = min(math.ceil(corpus.longest / corpus.reached), LARGEST_SCALE)
    reach = scale * corpus.reached
    reason = f"a scale of {scale} shows training distances up to {reach:g} tokens"
    reason += f" ({SETTINGS}, Scale)"
    if reach < corpus.longest:
        reason += f"; for longer inputs compare nopos, randpos and rfs ({PAGE}, Which type)"
    return {"type": DEFAULT_TYPE, "max_global_scale": float(scale)}, f"{reason}."


def _is_coarse(corpus: Corpus, domain_name: str) -> bool:
    """Whether many channels alias on the smallest grid of training."""
    is_grid = bool(DOMAINS[domain_name].coarse)
    return is_grid and aliasing(domain_name, corpus.shortest_side) > COARSE


def aliasing(domain_name: str, side: int) -> float:
    """Share of the channels that alias on a grid of `side` positions on each axis."""
    domain = DOMAINS[domain_name]
    sinusoid = Sinusoid(domain.dim, domain.frequencies)
    seconds = domain.defaults["seconds_per_frame"] if domain.timed else None
    return sinusoid.aliased(*[side] * len(domain.grid), seconds=seconds) / domain.dim


def _flags(settings: Mapping[str, Any]) -> str:
    by_argument = {TYPE_ARG if name == "type" else name: value for name, value in settings.items()}
    return " ".join(f"{option_flag(name)} {_flag_value(v)}" for name, v in by_argument.items())


def _flag_value(value: Any) -> str:
    """The value as a flag takes it: true or false, and numbers without needless digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- input --------------------------------------------------------------------------------------


def _read_lengths(args: argparse.Namespace, domain: Domain) -> Corpus:
    option = f"--train-lengths {args.train_lengths}"
    sizes = [
        _size(f"{option}, line {number}:", line, domain)
        for number, line in enumerate(_lines("--train-lengths", args.train_lengths), 1)
        if line.strip()
    ]
    if not sizes:
        raise ValueError(f"{option} has no lengths; give {_allowed(domain)}, one a line.")
    longest = max(_size("--longest", args.longest, domain))
    return Corpus(sorted(map(max, sizes)), longest, int(min(map(min, sizes))))


def _read_text(args: argparse.Namespace, domain: Domain) -> Corpus:
    paths, option = args.train_text, f"--train-text {' '.join(args.train_text)}"
    if domain.grid or domain.spacing is not None:
        raise ValueError(
            f"{option} is counted in tokens, the domain is {args.domain!r}; allowed: "
            f"--train-lengths FILE with {_allowed(domain)}, one a line."
        )
    if len(paths) > 2:
        raise ValueError(f"{option}: {len(paths)} files; allowed: one, or source and target.")
    longest = max(_size("--longest", args.longest, domain))
    if args.tokenizer:
        tokens = by_tokenizer("tokens")(args.tokenizer)
        sides = [
            list(map(len, tokens(path, target=number > 0))) for number, path in enumerate(paths)
        ]
    else:
        sides = [[len(line.split()) for line in _lines("--train-text", path)] for path in paths]
    if not all(map(any, sides)):
        raise ValueError(f"{option} has no tokens; give text, one input a line.")
    if len(sides) == 1:
        return Corpus(sorted(filter(None, sides[0])), longest)
    # count the end of each sentence, unless a tokenizer has added the end
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
    """Sides of a grid, or the length of a sequence."""
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
    """Lengths that are allowed, for error texts."""
    if domain.grid:
        example = "x".join(["10", *["14"] * (len(domain.grid) - 1)])
        return f"{domain.steps} such as 14 or {example}, whole numbers above 0"
    if domain.spacing is not None:
        return f"{domain.unit} such as 7.5, numbers above 0"
    return f"{domain.unit} such as 25, whole numbers above 0"
