"""Similarity of encoder states of the same text at different position offsets (SHAPE figure 2).

Each sentence is encoded with all its positions moved by each of --offsets. The cosine similarity of
the states of a token at two offsets, averaged over the tokens, is 1 if the model ignores the
absolute position at which a text begins. The similarity is measured for the sum of the embeddings,
and for the output of each layer (before a final layer norm).
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional as F

from recipes.lab.command_line import int_at_least
from recipes.lab.figures import draw_matrix, new_figure
from recipes.lab.steps import CommandError
from recipes.lab.tables import seed_table
from recipes.mt.analysis.arguments import each, open_models, test_pairs, write_report
from recipes.mt.analysis.translators import Translator, shifted

# No offset, the largest offset of SHAPE's training (table 4), and two offsets between. The figure
# of the paper has other offsets, which were not legible in our copy of the paper.
OFFSETS = (0, 100, 250, 500)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--offsets",
        nargs="+",
        type=int_at_least,
        default=OFFSETS,
        metavar="K",
        help="offsets that are compared, in tokens (default: 0 100 250 500, up to SHAPE's largest)",
    )


def similarities(model: Translator, sources: Sequence[str], offsets: Sequence[int]) -> np.ndarray:
    """``[layers + 1, offsets, offsets]``: mean similarity of a token's states (SHAPE Eq. 3)."""
    ids = [model.source_ids(source) for source in sources]

    def measure(network: nn.Module, rows: list[int]) -> list[tuple[np.ndarray, int]]:
        at_offsets = []
        for offset in offsets:
            with shifted(network, model.position_config(network), offset):
                states, valid = model.states(network, [ids[row] for row in rows])
                at_offsets.append([state.float() for state in states])
        valid = valid.cpu()
        cosines = [
            [[F.cosine_similarity(a, b, dim=-1).cpu().double().where(valid, 0).sum(1).numpy()
              for b in layer] for a in layer]
            for layer in zip(*at_offsets, strict=True)
        ]  # fmt: skip
        return list(zip(np.moveaxis(cosines, -1, 0), valid.sum(1).tolist(), strict=True))

    totals, counts = zip(*model.over_batches(list(map(len, ids)), measure), strict=True)
    return sum(totals) / sum(counts)


def run(args: argparse.Namespace) -> None:
    if len(set(args.offsets)) != len(args.offsets) or len(args.offsets) < 2:
        offsets = " ".join(map(str, args.offsets))
        raise CommandError(f"--offsets {offsets}: give two or more different numbers")
    sources = [source for source, _ in test_pairs(args)]
    models = open_models(args)
    for first, *_ in models.values():
        first.check_offset(max(args.offsets))
    measured = {
        name: np.array([similarities(model, sources, args.offsets) for model in seeds])
        for name, seeds in models.items()
    }
    different = ~np.eye(len(args.offsets), dtype=bool)
    cells, last = {}, {}
    for name, values in measured.items():
        by_layer = values[..., different].mean(-1).T.tolist()
        cells[name] = {f"layer {n}": seeds for n, seeds in enumerate(by_layer)}
        last[name] = {
            f"{a} and {b}": values[:, -1, i, j].tolist()
            for (i, a), (j, b) in combinations(enumerate(args.offsets), 2)
        }
    lines = [
        *seed_table(cells, "model", digits=3),
        "",
        f"Cosine similarity of the encoder states of {len(sources)} sentences at the offsets"
        f" {', '.join(map(str, args.offsets))}: mean over all pairs of different offsets. Layer 0"
        " is the sum of the embeddings. By pair of offsets, for the last layer:",
        "",
        *seed_table(last, "model", digits=3),
    ]
    rows = [
        {**at, "layer": layer, "offset_a": args.offsets[i], "offset_b": args.offsets[j],
         "cosine_similarity": float(cosine)}
        for at, values in each(measured)
        for (layer, i, j), cosine in np.ndenumerate(values)
    ]  # fmt: skip
    figure = plot(args.offsets, {name: values.mean(0) for name, values in measured.items()})
    title = "Encoder states at different offsets (SHAPE figure 2)"
    write_report(args, models, title, rows, figure, lines)


def plot(offsets: Sequence[int], similarities: Mapping[str, np.ndarray]) -> Any:
    """Draws SHAPE's Figure 2: a row of heat maps for each model, a heat map for each layer.
    `similarities` maps names to means ``[layers + 1, offsets, offsets]``."""
    columns = max(map(len, similarities.values()))
    inches = 0.75 + 0.42 * len(offsets)  # of a heat map
    width, height = inches * columns + 1.2, inches * len(similarities) + 0.6
    figure, panels = new_figure(width, height, len(similarities), columns)
    lowest = np.floor(10 * min(values.min() for values in similarities.values())) / 10
    for row, (name, layers) in zip(panels, similarities.items(), strict=True):
        for axes in row[len(layers) :]:
            axes.set_axis_off()
        for layer, (axes, values) in enumerate(zip(row, layers, strict=False)):
            texts = [[f"{value:.2f}" for value in line] for line in values]
            picture = draw_matrix(axes, values, texts, vmin=lowest, vmax=1, cmap="viridis")
            axes.set_xticks(range(len(offsets)), offsets, fontsize="small")
            axes.set_yticks(range(len(offsets)), offsets, fontsize="small")
            axes.set_title(f"{name}, layer {layer}" if layer else f"{name}, embeddings",
                           fontsize="small")  # fmt: skip
    figure.supxlabel("offset (tokens)")
    figure.supylabel("offset (tokens)")
    figure.colorbar(picture, ax=panels, label="cosine similarity", shrink=0.8)
    return figure
