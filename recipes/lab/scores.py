"""Scores of trained models by group (length, duration, size ...): table, page and figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cape_plugins.settings.switching import Step, gains_of_switches
from recipes.lab.figures import Panel, write_lines_figure
from recipes.lab.tables import ALL, Row, pivot, seed_table, write_csv, write_page

# metrics whose highest value is about 1; all other metrics are percentages
SHARES = ("accuracy", "exact_match", "token_accuracy", "loss")
ERRORS = ("wer", "ler", "loss")  # metrics whose lowest value is best


def write_scores(
    folder: Path,
    title: str,
    rows: Sequence[Row],
    group: str,
    metrics: Mapping[str, str],
    facts: Mapping[str, str],
    *,
    name: str = "scores",
    groups_are: str = "",
    trained: Sequence[str] = (),
    trainings: Sequence[tuple[Step, float | None]] = (),
    more: Mapping[str, Sequence[str]] | None = None,
    shown: bool = True,
) -> None:
    """Writes ``NAME.csv``, ``NAME.md`` and ``NAME.png``, and prints the tables.

    Args:
        rows: Rows with the name of the model in their first column, mostly ``seed``, the column
            `group`, and the columns of `metrics`. The group "all" is left out of the figure.
        metrics: Titles of columns with values.
        groups_are: Description of the groups (default: the name of their column).
        trained: Groups that occur in training, marked in the tables and grey in the figure.
        trainings: Trainings with their seconds; lines under the tables say what switches of a
            trained model gain and lose.
        more: Sections of the page after the tables, by heading.
    """
    model, groups_are = next(iter(rows[0])), groups_are or group
    drawn = [row for row in rows if row[group] != ALL] or rows
    tables = {}
    for metric, metric_is in metrics.items():
        table = seed_table(pivot(rows, model, group, metric), model, trained=trained)
        scores, errors = pivot(drawn, model, group, metric), metric in ERRORS
        gains = gains_of_switches(trainings, scores, trained, lower_is_better=errors, digits=2)
        tables[f"{metric_is} by {groups_are}"] = [*table, *([""] if gains else []), *gains]
    facts = {**facts, "In training": ", ".join(trained)} if trained else facts
    write_csv(folder / f"{name}.csv", rows)
    write_page(folder / f"{name}.md", title, {**tables, **(more or {})}, facts)
    panels = [
        Panel(pivot(drawn, model, group, metric), metric_is, whole=1 if metric in SHARES else 100)
        for metric, metric_is in metrics.items()
    ]
    write_lines_figure(folder / f"{name}.png", panels, groups_are, trained)
    if shown:
        for heading, lines in tables.items():
            print("\n".join([heading, "", *lines, ""]))
        print(f"tables and figure: {folder}/{name}.md, {name}.csv, {name}.png", flush=True)
