"""Images: the cost of UniViT's mixed sizes, resized tables and augmented positions, and the images
per second in evaluation."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.huggingface import share, training_step, training_steps, vit, vit_sizes
from benchmarks.measure import CLOCKS, Setup, Step, interleave
from benchmarks.report import (
    Report,
    distinct,
    legend_below,
    plot_columns,
    plot_ratios,
    ratio_tables,
)
from recipes.lab.tables import markdown
from recipes.vit.catalog import UNIVIT_SIZES
from recipes.vit.classifier import images_per_second
from recipes.vit.data import resize

SECONDS = 60.0
SIZE = 224  # size of the table and of training images
STORED = 256  # size of the stored images
LIMIT = 1.1
BATCH = {"cpu": 4, "cuda": 128}
TYPES = ("nopos", "abspos", "sinpos", "rope", "alibi", "fire", "cape")
TEXT = (
    f"""\
ViT-Ti. **UniViT**: updates of 128, 160, ..., 320 pixels, one of each, against as many of {SIZE}
(the reference), with cape: images of {STORED} pixels are resized, then forward, loss and backward
(no optimizer). The paper says 1.1 (CAPE section 5.1.2).""",
    """\
**Positions**: training steps by type and size with a table of 224 pixels, which `abspos` resizes
bicubically, with gradient, in each forward pass of another size; `nopos` is the reference. The
last columns are the embedding layer alone (patches, class token, positions).""",
    """\
**Evaluation**: images per second without gradient by the paper's protocol (30 runs to warm up,
30 timed), at a fixed batch.""",
)


def run(setup: Setup) -> Report:
    """Measures all three parts."""
    report = Report("Images", TEXT)
    batch = 2 if setup.quick else BATCH[setup.device.type]
    sizes = (16, 32, 48) if setup.quick else UNIVIT_SIZES
    home = 32 if setup.quick else SIZE
    cases: dict[str, dict[str, Step]] = {"UniViT": univit_steps(setup, batch, sizes, home)}
    for size in (home, sizes[-1]):
        cases[f"training, {size} px"] = type_steps(setup, batch, size, home)
    for size in (home, sizes[-1]):
        cases[f"embedding layer, {size} px"] = embedding_steps(setup, batch, size, home)
    for case, steps in cases.items():
        seconds = setup.seconds(2 * SECONDS if case == "UniViT" else SECONDS)
        report.add({"case": case}, interleave(steps, setup, seconds, case))
    timed = list(report.rows)
    for case in ("UniViT", "training", "embedding layer"):
        rows = [row for row in timed if str(row["case"]).startswith(case)]
        tables = ratio_tables(rows, "case")
        report.tables |= {f"{case}: {heading}": table for heading, table in tables.items()}
    evaluation_rows(setup, report, batch, sizes, home)
    report.plot = partial(_plot, report)
    return report


def models(setup: Setup, home: int, names: Sequence[str] = TYPES) -> dict[str, nn.Module]:
    """ViT-Ti of each type, on shared parameters."""
    sizes = vit_sizes(setup) | {"image_size": home}
    by_name = {name: vit(sizes, {"type": name}).to(setup.device) for name in names}
    return share(by_name, setup)


def images_of(setup: Setup, batch: int, size: int) -> torch.Tensor:
    return torch.rand(batch, 3, size, size, device=setup.device, dtype=setup.dtype)


def univit_steps(setup: Setup, batch: int, sizes: Sequence[int], home: int) -> dict[str, Step]:
    (model,) = models(setup, home, ["cape"]).values()
    images = images_of(setup, batch, STORED)
    labels = torch.zeros(batch, dtype=torch.long, device=setup.device)

    def updates(pixels: Sequence[int]) -> None:
        for size in pixels:
            training_step(model, {"pixel_values": resize(images, size), "labels": labels})

    return {
        f"all {home}": partial(updates, [home] * len(sizes)),
        "UniViT": partial(updates, sizes),
    }


def type_steps(
    setup: Setup, batch: int, size: int, home: int, names: Sequence[str] = TYPES
) -> dict[str, Step]:
    inputs: dict[str, Any] = {
        "pixel_values": images_of(setup, batch, size),
        "labels": torch.zeros(batch, dtype=torch.long, device=setup.device),
    }
    return training_steps(models(setup, home, names), inputs)


def embedding_steps(setup: Setup, batch: int, size: int, home: int) -> dict[str, Step]:
    images = images_of(setup, batch, size)

    def step(layer: nn.Module) -> None:
        layer(images).sum().backward()
        layer.zero_grad(set_to_none=True)

    return {
        name: partial(step, model.vit.embeddings) for name, model in models(setup, home).items()
    }


def evaluation_rows(
    setup: Setup, report: Report, batch: int, sizes: Sequence[int], home: int
) -> None:
    """Images per second by type and size."""
    runs = 2 if setup.quick else 30
    options = {"synchronize": setup.synchronize, "clock": CLOCKS[setup.clock]}
    lines = []
    for name, model in models(setup, home).items():
        cells = []
        for size in sizes:
            forward = torch.inference_mode()(partial(model.eval(), images_of(setup, batch, size)))
            rate = images_per_second(forward, batch, warmup=runs, runs=runs, **options)
            report.rows.append(
                {"case": "evaluation", "variant": name, "pixels": size}
                | {"images_per_second": round(rate, 2)}
            )
            cells.append(f"{rate:.1f}")
        lines.append([name, *cells])
    header = [f"batch {batch}", *(f"{size} px" for size in sizes)]
    report.tables["Evaluation: images per second"] = markdown(header, lines)


def _plot(report: Report, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    timed = [row for row in report.rows if "ratio" in row]
    plot_ratios(left, timed, "case", LIMIT)
    left.tick_params(axis="x", rotation=20, labelsize=7)
    names = distinct(timed, "variant")  # colours as on the left
    rows = [row for row in report.rows if row["case"] == "evaluation"]
    for name in TYPES:
        of_type = [row for row in rows if row["variant"] == name]
        colour = f"C{names.index(name)}"
        plot_columns(right, of_type, "pixels", "images_per_second", color=colour)
    right.set(xlabel="pixels", ylabel="images per second, evaluation")
    right.grid(alpha=0.3)
    legend_below(figure, left)
