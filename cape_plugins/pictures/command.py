"""The command ``cape-plugins plot``: draws the positions of given settings or of a trained
model."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cape_plugins.checkpoints.families import SIDES
from cape_plugins.checkpoints.stack import SOURCE_TARGET, Size, Stack, choose_side, read_stack
from cape_plugins.mathematics.builders import build_position_encoder
from cape_plugins.mathematics.relative_tables import build_relative_positions
from cape_plugins.pictures.plot import components_figure, save, similarities_figure
from cape_plugins.pictures.plot_positions import augmentation_figure, coverage_figure
from cape_plugins.pictures.views import View, relative_views, views
from cape_plugins.settings.arguments import PREFIX, TYPE_ARG, add_position_args, given_settings
from cape_plugins.settings.config import ARCHITECTURES, PositionConfig
from cape_plugins.settings.domains import DOMAINS, each_domain
from cape_plugins.settings.registry import DEFAULT_TYPE, ROTARY_TYPES, TYPES, types_of
from cape_plugins.utils.files import missing_folder

# Positions of one input; as many as in the similarity maps of the thesis that recipes/phones
# repeats.
MAX_POSITIONS = 3000
MAX_CHANNELS = 12
HEADS = 8  # heads of relative tables in pictures that are drawn from settings, without a model


class Picture(NamedTuple):
    """A picture that the command can draw.

    Attributes:
        help: Help text of the picture.
        needs: Property that a position embedding must have for the picture, as text for errors.
        able: Whether a position embedding has this property.
        draws: Fewest, default and most draws of the augmentation.
        most_sizes: Largest number of sizes.
    """

    help: str
    needs: str
    able: Callable[[PositionConfig], bool]
    draws: tuple[int, int, int]
    most_sizes: int


PICTURES = {
    "components": Picture(
        "some channels over the plane, or over tokens or time (CAPE Figure 9)",
        "is learned or a sinusoid",
        lambda config: config.encoding.adds or config.relative_context > 0,
        (0, 2, 20),
        4,
    ),
    "similarity": Picture(
        "dot products and cosines of all pairs of positions",
        "is learned or a sinusoid",
        lambda config: config.encoding.adds or config.relative_context > 0,
        (0, 0, 3),
        3,
    ),
    "augmentation": Picture(
        "what one augmentation does to the positions, step by step (CAPE Figure 1)",
        "draws random numbers in training",
        lambda config: config.random,
        (1, 2, 5),
        1,
    ),
    "coverage": Picture(
        "positions drawn in training, and how much of other inputs they cover",
        "has coordinates, as sinusoids do",
        lambda config: (
            (config.encoding.adds and not config.encoding.counts) or config.encoding.in_attention
        ),
        (1, 1000, 2000),
        4,
    ),
}


def add_plot_args(parser: argparse.ArgumentParser) -> None:
    """Adds a subcommand for each picture."""
    pictures = parser.add_subparsers(dest="picture", required=True, metavar="PICTURE")
    for name, picture in PICTURES.items():
        command = pictures.add_parser(name, help=picture.help, description=picture.help)
        _add_model_args(command)
        unit = "in tokens, seconds or patches (14, or the sizes of the axes, such as 14x20)"
        command.add_argument(
            "--sizes", "--lengths", nargs="+", metavar="SIZE",
            help=f"sizes of inputs {unit}, at most {picture.most_sizes}",
        )  # fmt: skip
        low, default, high = picture.draws
        command.add_argument(
            "--draws", type=int, metavar="N",
            help=f"draws of the augmentation, {low} to {high} (default: {default} if it is random)",
        )  # fmt: skip
        command.add_argument(
            "--seed", type=int, default=1, metavar="N",
            help="seed of the random numbers (default: 1)",
        )  # fmt: skip
        command.add_argument(
            "--output", type=Path, metavar="FILE.png",
            help="where results are written (default: PICTURE-TYPE-DOMAIN.png)",
        )  # fmt: skip
        if name == "components":
            command.add_argument(
                "--channels", nargs="+", type=int, metavar="K",
                help=f"channels to draw, counted from 0, at most {MAX_CHANNELS} (default: eight, "
                "evenly spaced)",
            )  # fmt: skip
        elif name == "similarity":
            command.add_argument(
                "--patch", nargs=2, type=int, metavar=("ROW", "COLUMN"),
                help="for images: the patch that is compared with all others (default: the patch "
                "in the middle)",
            )  # fmt: skip
        elif name == "coverage":
            command.add_argument(
                "--test-sizes", "--test-lengths", nargs="+", metavar="SIZE",
                help=f"sizes of inputs in evaluation {unit}; --sizes are sizes in training",
            )  # fmt: skip


def _add_model_args(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH",
        help="trained model, whose settings are drawn: Hugging Face folder or fairseq checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--side", choices=SIDES, help="side of a model that has both (default: encoder)"
    )
    settings = parser.add_argument_group("settings, without --model")
    settings.add_argument("--domain", choices=DOMAINS, help="kind of the inputs (default: text)")
    settings.add_argument(
        "--architecture", choices=ARCHITECTURES, help="kind of the model (default: encoder)"
    )
    settings.add_argument(
        "--dim", type=int, metavar="K",
        help="channels (default: " + each_domain("dim", named=True) + ")",
    )  # fmt: skip
    settings.add_argument(
        "--seconds-per-frame", type=float, metavar="S",
        help=f"distance between positions in time (default: {_spacings()})",
    )  # fmt: skip
    add_position_args(settings, None, types={**ROTARY_TYPES, **TYPES})


def _spacings() -> str:
    rows = {name: row.spacing for name, row in DOMAINS.items() if row.spacing is not None}
    return ", ".join(f"{spacing:g} ({name})" for name, spacing in rows.items())


def draw_picture(args: argparse.Namespace) -> str:
    """Writes the picture; returns the text to print: numbers of the picture, and the file.

    Raises:
        ValueError: names option, value, allowed range and remedy.
        ImportError: without the package matplotlib.
    """
    picture = PICTURES[args.picture]
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed {args.seed} is not allowed; allowed: 0 to {2**63 - 1}.")
    stack = _stack_of_settings(args) if args.model is None else _stack_of_model(args)
    config = stack.config
    if not picture.able(config):
        types = types_of("encoder", config.domain)
        able = [name for name in types if picture.able(PositionConfig(name, config.domain))]
        raise ValueError(
            f"--position-embedding {config.type} with these settings cannot be shown: a picture "
            f"of {args.picture} needs a position embedding that {picture.needs}, such as "
            f"{', '.join(able)} by default."
        )
    output = args.output or Path(f"{args.picture}-{config.type}-{config.domain}.png")
    if output.suffix.lower() != ".png" or output.is_dir():
        raise ValueError(f"--output {output} is not allowed; allowed: a file name ending in .png.")
    folder = missing_folder(output.parent, f"--output {output}")
    word = _word(stack)
    default = stack.domain.default_sizes(args.picture)
    sizes = _sizes(f"--{word}", args.sizes, default, picture.most_sizes, stack)
    draws = _draws(args.draws, picture, config)
    generator = torch.Generator().manual_seed(args.seed)
    rows: list[dict[str, str]] = []
    if args.picture == "components":
        channels = _channels(args.channels, stack)
        inputs = _relative_views(args, stack) or views(stack, sizes, draws, generator)
        figure = components_figure(stack, inputs, channels)
    elif args.picture == "similarity":
        patch = _patch(args.patch, sizes, stack)
        tables = _relative_views(args, stack)
        # Tables of one part, such as keys without values or rows without columns; of many layers
        # the first, the middle and the last.
        parts = [table.state.partition(", ")[2] for table in tables]
        tables = [table for table, part in zip(tables, parts, strict=True) if part == parts[0]]
        indices = sorted({0, len(tables) // 2, len(tables) - 1}) if tables else []
        inputs = [tables[i] for i in indices] or views(stack, sizes, draws, generator)
        figure = similarities_figure(stack, inputs, patch)
    elif args.picture == "augmentation":
        figure = augmentation_figure(stack, sizes[0], draws, generator)
    else:
        default = stack.domain.default_sizes("test")
        tests = _sizes(f"--test-{word}", args.test_sizes, default, 8, stack)
        figure, rows = coverage_figure(stack, sizes, tests, draws, generator)
    try:
        save(figure, output)
    except OSError as error:
        raise ValueError(
            f"--output {output} cannot be written ({error.strerror or error}); give a file in a "
            "folder that can be written to."
        ) from None
    folder_note = f", in the new folder {folder}" if folder else ""
    return "\n".join([*markdown_table(rows), f"wrote {output}{folder_note}"])


def _word(stack: Stack) -> str:
    """Name of the option with the sizes of inputs, for messages."""
    return "sizes" if stack.domain.grid else "lengths"


def _relative_views(args: argparse.Namespace, stack: Stack) -> list[View]:
    """Relative embeddings, which are shown at all distances; empty for other types."""
    tables = relative_views(stack)
    patch = getattr(args, "patch", None)
    for option, value in ((f"--{_word(stack)}", args.sizes), ("--patch", patch)):
        if tables and value:
            raise ValueError(
                f"{option} {' '.join(map(str, value))} has no effect: relative embeddings are "
                "shown at all their distances; leave the option out."
            )
    return tables


# ---- the model ---------------------------------------------------------------------------------


def _stack_of_settings(args: argparse.Namespace) -> Stack:
    """The stack that the settings of the command line describe, not trained."""
    domain, architecture = args.domain or "text", args.architecture or "encoder"
    config = PositionConfig(
        getattr(args, TYPE_ARG) or DEFAULT_TYPE, domain, architecture, **given_settings(args, None)
    )
    sides = ARCHITECTURES[architecture].sides
    side = choose_side(args.side, sides, f"architecture {architecture}")
    row = DOMAINS[domain]
    dim = row.dim if args.dim is None else args.dim
    if not 1 <= dim <= 16384:
        raise ValueError(f"--dim {dim} is not allowed; allowed: 1 to 16384.")
    spacing = row.spacing if args.seconds_per_frame is None else args.seconds_per_frame
    if spacing is not None and row.spacing is None:
        timed_domains = " or ".join(name for name, other in DOMAINS.items() if other.spacing)
        raise ValueError(
            f"--seconds-per-frame {spacing} belongs to --domain {timed_domains}; leave it out."
        )
    if spacing is not None and not 0 < spacing < math.inf:
        raise ValueError(f"--seconds-per-frame {spacing} is not allowed; allowed: > 0.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)  # a learned table is drawn with its random initial values
        encoder = build_position_encoder(
            config, dim, side=SOURCE_TARGET[side], table_size=row.table_size
        )
        relative = {} if config.encoding.adds else _relative_tables(config, dim)
    name = "not trained" if config.encoding.learned or relative else ""
    grid = row.table_size if row.grid else ()
    return Stack(config, encoder, spacing or 1.0, grid, name, relative)


def _relative_tables(config: PositionConfig, dim: int) -> dict[str, torch.Tensor]:
    """Relative tables of one layer before training."""
    tables = build_relative_positions(config, max(1, dim // HEADS), HEADS)
    if tables is None:
        return {}
    return {
        name.replace(".", ", "): rows.detach().transpose(0, 1).flatten(1)
        for name, rows in tables.named_parameters()
    }


def _stack_of_model(args: argparse.Namespace) -> Stack:
    stack = read_stack(args.model, args.side)
    for name, value in vars(args).items():
        is_setting = name in ("domain", "architecture", "dim", "seconds_per_frame", TYPE_ARG)
        if value is not None and (is_setting or name.startswith(PREFIX)):
            raise ValueError(
                f"--{name.replace('_', '-')} {value} contradicts --model, which sets this option; "
                "leave one of the two out."
            )
    return stack


# ---- options -----------------------------------------------------------------------------------


def _sizes(
    option: str, texts: Sequence[str] | None, default: Sequence[float], limit: int, stack: Stack
) -> list[Size]:
    """Sizes in positions, without repetitions."""
    if texts is None:
        if stack.domain.grid:
            return [tuple(max(1, round(f * side)) for side in stack.grid) for f in default]
        texts = [str(size) for size in default]
    sizes = list(dict.fromkeys(_size(option, text, stack) for text in texts))
    if len(sizes) > limit:
        raise ValueError(f"{option} has {len(sizes)} sizes; allowed: at most {limit}.")
    return sizes


def _size(option: str, text: str, stack: Stack) -> Size:
    domain, axes = stack.domain, len(stack.domain.grid)
    unit = domain.unit
    if axes:
        unit = f"{domain.steps}, 14 or {'x'.join(['10', *['14'] * (axes - 1)])}"
    try:
        if axes:
            sides = [int(side) for side in re.fullmatch(r"\d+(x\d+)*", text)[0].split("x")]
            size = tuple(sides * axes if len(sides) == 1 else sides)
            count = math.prod(size) if len(size) == axes else 0
        elif domain.spacing is not None:
            size = count = round(float(text) / stack.spacing)
        else:
            size = count = int(text)
        if not 1 <= count <= MAX_POSITIONS:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{option} {text} is not allowed; allowed in domain {stack.config.domain}: {unit}, "
            f"1 to {MAX_POSITIONS} positions."
        ) from None
    return size


def _draws(requested: int | None, picture: Picture, config: PositionConfig) -> int:
    low, default, high = picture.draws
    if not config.random:
        if requested:
            raise ValueError(
                f"--draws {requested}: position embedding {config.type} with these settings draws "
                "nothing in training; leave the option out."
            )
        return 0
    draws = default if requested is None else requested
    if not low <= draws <= high:
        raise ValueError(f"--draws {draws} is not allowed; allowed: {low} to {high}.")
    return draws


def _channels(requested: Sequence[int] | None, stack: Stack) -> list[int]:
    dim = stack.dim
    # eight channels, evenly spaced; CAPE Figure 9 shows every 20th of 768
    channels = list(dict.fromkeys(requested or [i * dim // 8 for i in range(8)]))
    if len(channels) > MAX_CHANNELS or not all(0 <= channel < dim for channel in channels):
        raise ValueError(
            f"--channels {' '.join(map(str, channels))} is not allowed; allowed: at most "
            f"{MAX_CHANNELS} from 0 to {dim - 1}."
        )
    return channels


def _patch(
    row_and_column: Sequence[int] | None, sizes: Sequence[Size], stack: Stack
) -> tuple[int, int] | None:
    if row_and_column is None:
        return None
    row, column = row_and_column
    if not stack.domain.grid:
        raise ValueError(f"--patch {row} {column} belongs to images; leave the option out.")
    rows = min(math.prod(size[:-1]) for size in sizes)
    columns = min(size[-1] for size in sizes)
    if not (0 <= row < rows and 0 <= column < columns):
        raise ValueError(
            f"--patch {row} {column} is not in the image; allowed: rows 0 to {rows - 1}, "
            f"columns 0 to {columns - 1}."
        )
    return row, column


def markdown_table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of a Markdown table."""
    if not rows:
        return []
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]
