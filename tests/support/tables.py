"""Tables that programs have written."""

import csv


def read_csv(path):
    """Rows as dicts of texts."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def read_scores(folder, metric):
    """``{model: {group: value}}`` of ``scores.csv``, of the last seed."""
    scores = {}
    for row in read_csv(folder / "scores.csv"):
        model, _, group, *_ = row.values()
        scores.setdefault(model, {})[group] = float(row[metric])
    return scores
