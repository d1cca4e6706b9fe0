"""A table of results with the range over seeds."""

from collections.abc import Sequence
from statistics import mean

from recipes.lab.runs import Result


def summarise(results: Sequence[Result], metric: str, label: str) -> dict[str, list[float]]:
    """Values of one metric for one group by variant, one for each seed."""
    values: dict[str, list[float]] = {}
    for result in results:
        values.setdefault(result.variant, []).append(getattr(result.scores[label], metric))
    return values


def markdown_table(results: Sequence[Result], metric: str, labels: Sequence[str]) -> list[str]:
    """Rows are variants, columns are lengths; mean over seeds, and the range of several seeds."""
    digits = 1 if metric == "bleu" else 2
    columns = {label: summarise(results, metric, label) for label in labels}
    lines = [f"| variant | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    for variant in dict.fromkeys(result.variant for result in results):
        cells = []
        for label in labels:
            values = columns[label][variant]
            cell = f"{mean(values):.{digits}f}"
            if len(values) > 1 and max(values) - min(values) >= 0.5 * 10**-digits:
                cell += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
            cells.append(cell)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines
