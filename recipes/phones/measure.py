"""Runs all measurements of the models with one position embedding, and draws their pictures."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from cape_plugins import PositionConfig
from cape_plugins.pictures import plot
from cape_plugins.pictures.views import similarity, similarity_by_distance
from recipes.lab.tables import Row
from recipes.phones import pictures, report, train
from recipes.phones.analysis import (
    Frames,
    class_attention,
    class_changes,
    class_rows,
    confusions,
    error_rate,
    error_types,
    head_rows,
)
from recipes.phones.data import Corpus
from recipes.phones.model import PhoneClassifier
from recipes.phones.report import Result, mean_matrix
from recipes.phones.train import CONDITIONS, Experiment, targets

PRINTED_MODELS = ("inc", "exc")  # models whose errors are compared frame by frame
BY_DISTANCE = 50  # frames
# Conditions of training and test on training utterances (Figures 5.5, 5.6 and 5.4)
FITTED = (("inc", "inc"), ("exc", "exc"), ("inc", "exc"))
FITTED_UTTERANCES = 1000
SIMILARITIES = ("distance", "dot", "dot_min", "dot_max", "cosine", "cosine_min", "cosine_max")


def run_type(
    experiment: Experiment, name: str, config: PositionConfig, args: argparse.Namespace
) -> Result:
    """Measures one position embedding, with models trained under the conditions of `args`. Pictures
    go to ``OUTPUT/NAME``; pictures of attention and positions show the first seed."""
    corpus = experiment.corpus
    test = corpus.splits["test"]
    models = [model for model in args.conditions if model in conditions_of(config)]
    result, predicted = Result(name, class_changes(targets(test))), {}
    for seed in args.seeds:
        first = seed == args.seeds[0]
        for condition in models:
            model, history = experiment.model(name, config, condition, seed)
            best = min(history, key=lambda row: row["dev_per"])
            reached = {"loss": history[-1]["train_loss"], "PER of dev": best["dev_per"]}
            names = {"trained": condition, "seed": seed}
            row = {"type": name, **names, **reached, "epoch": best["epoch"]}
            result.trainings.append(row)
            result.histories += [{**names, **row} for row in history]
            predictions = _measure(model, corpus, config, names, result)
            matrix = confusions(targets(test), predictions, len(corpus.classes))
            result.confusions.setdefault(condition, {})[seed] = matrix
            _measure_fit(model, corpus, names, result)
            drawn = args.output / result.folder(condition) if first else None
            _look_at_attention(model, corpus, names, result, drawn)
            by_epoch = experiment.at_epochs(name, config, condition, seed)
            _follow_attention(by_epoch, corpus, names, result, drawn)
            if first and condition in PRINTED_MODELS:
                predicted[condition] = predictions
            if first and condition == ("inc" if "inc" in models else models[0]):
                folder = args.output / result.folder()
                _compare_positions(model, folder, result, args.similarity_length)
    spoken = [utterance.name for utterance in test]
    result.printed = report.printed_errors(spoken, targets(test), predicted, corpus.classes)
    _draw_tables(args.output / result.folder(), result, corpus.classes)
    return result


def _measure(
    model: PhoneClassifier,
    corpus: Corpus,
    config: PositionConfig,
    names: Row,
    result: Result,
) -> Frames:
    """Adds rows of tests under all conditions; `names` are ``trained`` and ``seed`` of the model.
    Returns predictions of the test under the condition of the training."""
    test, alike = corpus.splits["test"], []
    columns = {"type": result.name, **names}
    for tested in conditions_of(config):
        pair = targets(test), train.predict(model, test, CONDITIONS[tested])
        counts = (error_rate(*pair), class_changes(pair[1]), *error_types(*pair))
        measured = dict(zip(report.COUNTS, counts, strict=True))
        result.rows.append({**columns, "tested": tested, **measured})
        if tested == names["trained"]:
            alike = pair[1]
    return alike


def _measure_fit(model: PhoneClassifier, corpus: Corpus, names: Row, result: Result) -> None:
    """Adds confusions in utterances that the model was trained on."""
    utterances = corpus.splits["train"][:FITTED_UTTERANCES]
    for trained, tested in FITTED:
        if trained == names["trained"]:
            pair = targets(utterances), train.predict(model, utterances, CONDITIONS[tested])
            matrix = confusions(*pair, len(corpus.classes))
            result.fitted.setdefault((trained, tested), {})[names["seed"]] = matrix
            row = {**names, "tested": tested, "utterances": len(utterances)}
            result.fitted_rates.append({**row, "per": error_rate(*pair)})


def _look_at_attention(
    model: PhoneClassifier, corpus: Corpus, names: Row, result: Result, folder: Path | None
) -> None:
    """Measures attention in one utterance of the test, and between classes in all utterances,
    because few utterances have both phones of a pair such as /z/ and /s/. Draws both measurements
    if there is a folder."""
    test, inputs = corpus.splits["test"], CONDITIONS[names["trained"]]
    utterance = train.long_utterance(test)
    weights = train.attention(model, utterance, inputs)
    result.heads += [{**names, **row} for row in head_rows(weights, train.NEAR)]
    maps = (train.attention(model, utterance, inputs) for utterance in test)
    labels = [train.seen_labels(utterance, inputs) for utterance in test]
    shares, uniform = class_attention(maps, labels, len(corpus.classes))
    result.relations += [{**names, **row} for row in class_rows(shares, uniform, corpus.classes)]
    for row in class_rows(shares.mean(1, keepdims=True), uniform, corpus.classes):
        result.layer_relations.append({**names, **{key: row[key] for key in row if key != "head"}})
    if folder:
        title = f"M-{names['trained']}, {folder.name}"
        layers = {f"L{number}": layer for number, layer in enumerate(weights, 1)}
        path = folder / f"attention-{names['trained']}.png"
        pictures.draw_attention(path, layers, f"{title}: {utterance.name}")
        path = folder / f"attention-classes-{names['trained']}.png"
        pictures.draw_class_attention(path, shares, uniform, corpus.classes, title)


def _follow_attention(
    models: Mapping[int, PhoneClassifier],
    corpus: Corpus,
    names: Row,
    result: Result,
    folder: Path | None,
) -> None:
    """Measures attention after some epochs in the same utterance, and draws maps of the first and
    the last layer if there is a folder. The parameters of these epochs are stored with each model;
    a model whose training has not stored them is refused."""
    utterance, rows = train.long_utterance(corpus.splits["test"]), {}
    for epoch, model in models.items():
        weights = train.attention(model, utterance, CONDITIONS[names["trained"]])
        columns = {**names, "epoch": epoch}
        result.epochs += [{**columns, **row} for row in head_rows(weights, train.NEAR)]
        for layer in sorted({0, len(weights) - 1}):
            rows[layer, epoch] = weights[layer]
    if folder:
        ordered = {f"L{a + 1} epoch {b}": rows[a, b] for a, b in sorted(rows)}
        path = folder / f"attention-epochs-{names['trained']}.png"
        title = f"M-{names['trained']}, {folder.name}, by epoch: {utterance.name}"
        pictures.draw_attention(path, ordered, title)


def _draw_tables(folder: Path, result: Result, classes: Sequence[str]) -> None:
    """Draws confusions (means over the seeds) and trainings. All pictures of confusions share one
    colour range, up to the largest error of a model that is tested under its training condition
    (thesis: 26 %)."""
    means = {f"M-{name}": mean_matrix(seeds) for name, seeds in result.confusions.items()}
    fitted = {pair: mean_matrix(seeds) for pair, seeds in result.fitted.items()}
    alike = [matrix for (a, b), matrix in fitted.items() if a == b]
    errors = (pictures.off_diagonal(matrix, classes) for matrix in [*alike, *means.values()])
    highest = max(matrix.max() for matrix in errors)
    pictures.draw_confusions(folder / "confusions.png", means, classes, highest)
    titles = {f"{a}-{b}, training": matrix for (a, b), matrix in fitted.items()}
    if titles:
        path = folder / "confusions-training.png"
        pictures.draw_confusions(path, titles, classes, highest)
    pictures.draw_histories(folder / "training.png", result.histories)


def run_lengths(
    experiment: Experiment, name: str, config: PositionConfig, args: argparse.Namespace
) -> tuple[list[Row], list[Row]]:
    """PER by length of the test, and the histories of the trainings. The models have positions if
    the type has positions, and are tested under the condition of their training."""
    rows, epochs = [], []
    for condition in trained_alone(config, args.conditions):
        for seed in args.seeds:
            model, history = experiment.model(name, config, condition, seed)
            columns = {"type": name, "trained": condition, "seed": seed}
            epochs += [{**columns, **row} for row in history]
            for seconds, pieces in experiment.corpus.lengths.items():
                predictions = train.predict(model, pieces, CONDITIONS[condition])
                per = error_rate(targets(pieces), predictions)
                rows.append({**columns, "seconds": seconds, "per": per})
    return rows, epochs


def trained_alone(config: PositionConfig, conditions: Sequence[str]) -> list[str]:
    """The `conditions` with positions if the type has positions, else the conditions without."""
    having = has_positions(config)
    return [name for name in conditions if CONDITIONS[name].positions == having]


def has_positions(config: PositionConfig) -> bool:
    return config.encoding.adds or config.in_attention


def conditions_of(config: PositionConfig) -> list[str]:
    """Names of the conditions for a type: a type without positions has no condition with
    positions."""
    having = has_positions(config)
    return [name for name, condition in CONDITIONS.items() if having or not condition.positions]


@torch.no_grad()
def _compare_positions(model: PhoneClassifier, folder: Path, result: Result, length: int) -> None:
    """Draws and tabulates similarities of the position embeddings, as used in tests."""
    embeddings = model.eval().embed(length, next(model.parameters()).device)
    if embeddings is None:
        return
    rows, title = embeddings[0].cpu().numpy(), f"position embeddings of {result.name}"
    pictures.save(plot.similarity_figure({"": rows}, title, "frames"), folder / "similarity.png")
    farthest = min(BY_DISTANCE, length - 1)
    columns = [similarity_by_distance(matrix, farthest) for matrix in similarity(rows).values()]
    for distance, values in enumerate(np.hstack(columns).tolist()):
        result.similarities.append(dict(zip(SIMILARITIES, (distance, *values), strict=True)))
