"""Tables (CSV, Markdown) and figures of the evaluation of image models."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, mean, stdev

from recipes.lab import tables as lab
from recipes.lab.figures import Panel, new_figure, widen, write_figure, write_lines_figure
from recipes.lab.tables import ALL, Cells, Row
from recipes.vit.measure import MAX, MIN

TITLES = {
    "accuracy": "Accuracy by size",
    "tta": "Test-time augmentation",
    "gamma": "Factor on the grid of positions",
    "bins": "Best size by size of the original",
    "throughput": "Accuracy against throughput",
}
TOP = {"top1": "Top-1 accuracy, %", "top5": "Top-5 accuracy, %"}
BEST = "best of each bin"


def write_all(
    folder: Path, rows: Mapping[str, Sequence[Row]], facts: Mapping[str, str]
) -> Iterator[list[str]]:
    """Writes ``TABLE.csv``, ``TABLE.md`` and ``TABLE.png`` for each of :data:`TITLES` that there
    are rows of, and yields the lines of its page. Of `facts` those with the name of a table belong
    to it alone."""
    for table, measured in rows.items():
        figure = folder / f"{table}.png"
        if table == "bins":
            sections = _write_bins(figure, measured)
        elif table == "throughput":
            sections = _write_throughput(figure, measured, rows["accuracy"])
        else:
            sections = _write_sizes(figure, measured)
        lab.write_csv(folder / f"{table}.csv", measured)
        own = {name: text for name, text in facts.items() if name not in TITLES or name == table}
        yield lab.write_page(folder / f"{table}.md", TITLES[table], sections, own)


def _write_sizes(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    lines, panel = [], ["data"]
    for row in rows:
        line = row["model"] + " TTA" * (row.get("tta") == "+")
        if "gamma" in row:
            line, panel = f"{line}, gamma {row['gamma']}", ["data", "model"]
        lines.append({**row, "line": line})
    panels = [
        Panel(lab.pivot(group, "line", "size", "top1"), TOP["top1"], title)
        for title, group in lab.grouped(lines, *panel).items()
    ]
    write_lines_figure(path, panels, "size in pixels")
    return {
        f"{title} ({name}, {group[0]['images']} images)": lab.seed_table(
            lab.pivot(group, "line", "size", metric), "model"
        )
        for name, group in lab.grouped(lines, "data").items()
        for metric, title in TOP.items()
    }


def _write_bins(path: Path, rows: Sequence[Row]) -> dict[str, list[str]]:
    panels, tables = [], {}
    for title, group in lab.grouped(rows, "data", "model").items():
        labels = dict.fromkeys(row["bin"] for row in group)
        # each line has all bins, so that they keep their order
        lines = {
            name: {label: tried.get(label, []) for label in labels}
            for name, tried in lab.pivot(group, "strategy", "bin", "top1").items()
        }
        panels.append(Panel(lines, TOP["top1"], title))
        tables[f"{TOP['top1']} ({title})"] = bin_table(group)
    write_lines_figure(path, panels, "shorter side of the original in pixels")
    return tables


def bin_table(rows: Sequence[Row]) -> list[str]:
    """Of one model on one data set: a row for each bin with the best strategy, by the mean over the
    seeds, in bold; then all images by those strategies that were tried in every bin, and by
    :data:`BEST`: means over the bins, weighted by their images."""
    cells = lab.pivot(rows, "bin", "strategy", "top1")
    images = {row["bin"]: row["images"] for row in rows}
    sizes = {(row["bin"], row["strategy"]): row["size"] for row in rows}
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    lines, chosen = [], {name: [] for name in (*names, BEST)}
    for label, tried in cells.items():
        best = max(tried, key=lambda name, tried=tried: mean(tried[name]))
        texts = []
        for name in names:
            text = lab.cell(tried.get(name, ()))
            text = f"**{text}**" if name == best else text
            shown = name in (MIN, MAX) and name in tried
            texts.append(f"{text} ({sizes[label, name]})" if shown else text)
        lines.append([label, images[label], *texts, lab.cell(tried[best])])
        for name, values in (*tried.items(), (BEST, tried[best])):
            chosen[name].append(values)
    totals = [
        [fmean(seeds, images.values()) for seeds in zip(*bins, strict=True)]
        if len(bins) == len(cells)
        else []
        for bins in chosen.values()
    ]
    lines.append([ALL, sum(images.values()), *map(lab.cell, totals)])
    return lab.markdown([f"shorter side ({lab.of_seeds(cells)})", "images", *chosen], lines)


def draw_throughput(path: Path, rates: Cells, accuracies: Cells) -> None:
    """Accuracy against images per second, a line for each model through its sizes (CAPE Fig. 4)."""
    figure, ((axes,),) = new_figure(7, 4.8)
    for name, row in rates.items():
        points = [(mean(row[size]), mean(accuracies[name][size])) for size in row]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in map(accuracies[name].get, row)]
        style = {"yerr": spread if any(spread) else None, "capsize": 2, "marker": "o", "ms": 4}
        axes.errorbar(*zip(*points, strict=True), label=name, **style)
        for size, point in zip(row, points, strict=True):
            axes.annotate(str(size), point, (4, 4), textcoords="offset points", fontsize="small")
    axes.set(xscale="log", xlabel="images per second (numbers: size in pixels)")
    axes.set_ylabel(f"{TOP['top1']}\n({lab.of_seeds(accuracies)})")
    widen(axes, 100)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    write_figure(path, figure)


def _write_throughput(
    path: Path, rows: Sequence[Row], accuracies: Sequence[Row]
) -> dict[str, list[str]]:
    """Accuracy is that on the first data set."""
    name, accuracies = next(iter(lab.grouped(accuracies, "data").items()))
    rates = lab.pivot(rows, "model", "size", "images_per_second")
    right = lab.pivot(accuracies, "model", "size", "top1")
    draw_throughput(path, rates, right)
    return {
        "Images per second": lab.seed_table(rates, "model"),
        "Batch size": lab.seed_table(lab.pivot(rows, "model", "size", "batch"), "model"),
        f"{TOP['top1']} ({name}, {accuracies[0]['images']} images)": lab.seed_table(right, "model"),
    }
