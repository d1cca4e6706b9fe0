"""All models of one position embedding: trained, tested under all conditions, looked at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cape_plugins import PositionConfig
from cape_plugins.pictures.views import similarity, similarity_by_distance
from recipes.lab.tables import Row
from recipes.phones import plots
from recipes.phones.analysis import class_changes, confusions, error_rate, error_types, head_rows
from recipes.phones.data import Corpus
from recipes.phones.model import PhoneClassifier, Sizes
from recipes.phones.report import COUNTS, HEADS, Result
from recipes.phones.train import (
    CONDITIONS,
    NEAR,
    NO_POSITIONS,
    History,
    Job,
    Training,
    attention,
    long_utterance,
    predict,
    targets,
    trained,
    with_positions_of,
)

BY_DISTANCE = 50  # frames
SIMILARITIES = ("distance", "dot", "dot_min", "dot_max", "cosine", "cosine_min", "cosine_max")


@dataclass(frozen=True)
class Experiment:
    """What all models have in common."""

    corpus: Corpus
    sizes: Sizes
    training: Training
    work: Path
    device: torch.device

    def model(
        self, name: str, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """The trained model of a position embedding. Training without positions is the same for all
        of them and done once; for the tests the positions are put in."""
        positions = CONDITIONS[condition].positions
        if not positions:
            name = NO_POSITIONS.type
        job = Job(name, condition, config if positions else NO_POSITIONS, seed)
        model, history = trained(
            self.work, job, self.corpus, self.sizes, self.training, self.device
        )
        if not positions:
            model = with_positions_of(config, model, self.corpus, self.sizes, seed)
        return model, history


def run_type(
    experiment: Experiment,
    name: str,
    config: PositionConfig,
    models: Sequence[str],
    seeds: Sequence[int],
    output: Path,
    similarity_length: int,
) -> Result:
    """Everything about one position embedding; pictures, of the first seed, go to ``output/NAME``.

    Args:
        experiment: What all position embeddings have in common.
        name: Name of this one.
        config: Its settings.
        models: Keys of CONDITIONS, the models to train.
        seeds: Seeds of the models.
        output: Folder.
        similarity_length: Positions of the similarity maps, in frames.
    """
    classes, test = experiment.corpus.classes, experiment.corpus.splits["test"]
    models = [model for model in models if model in conditions_of(config)]
    result = Result(name, class_changes(targets(test)))
    folder = output / result.folder()
    for seed in seeds:
        for condition in models:
            model, history = experiment.model(name, config, condition, seed)
            columns = {"type": name, "trained": condition, "seed": seed}
            result.rows += [columns | row for row in _measure(experiment.corpus, model, config)]
            if seed != seeds[0]:
                continue
            given = CONDITIONS[condition]
            result.histories[condition] = history
            predictions = predict(model, test, given)
            result.confusions[condition] = confusions(targets(test), predictions, len(classes))
            utterance = long_utterance(test)
            weights = attention(model, utterance, given)
            result.heads += [
                {"trained": condition, **dict(zip(HEADS, row, strict=True))}
                for row in head_rows(weights, NEAR)
            ]
            shared = result.folder(condition)
            title = f"M-{condition}, {shared}: {utterance.name}"
            plots.draw_attention(output / shared / f"attention-{condition}.png", weights, title)
            if condition == ("inc" if "inc" in models else models[0]):
                _compare_positions(model, folder, result, similarity_length)
    titles = {f"M-{condition}": matrix for condition, matrix in result.confusions.items()}
    plots.draw_confusions(folder / "confusions.png", titles, classes)
    plots.draw_histories(folder / "training.png", result.histories)
    return result


def conditions_of(config: PositionConfig) -> list[str]:
    """Those that make sense: without positions of any kind there is nothing to put in."""
    having = config.encoding.adds or config.relative_context > 0
    return [name for name, condition in CONDITIONS.items() if having or not condition.positions]


def _measure(corpus: Corpus, model: PhoneClassifier, config: PositionConfig) -> Iterator[Row]:
    """Measures one model under all test conditions."""
    test = corpus.splits["test"]
    for name in conditions_of(config):
        predictions = predict(model, test, CONDITIONS[name])
        changes = class_changes(predictions)
        types = error_types(targets(test), predictions)
        counts = (error_rate(targets(test), predictions), changes, *types)
        yield {"tested": name, **dict(zip(COUNTS, counts, strict=True))}


def _compare_positions(model: PhoneClassifier, folder: Path, result: Result, length: int) -> None:
    """Draws and tabulates similarities of the position embeddings, as used in tests."""
    with torch.no_grad():
        embeddings = model.eval().embed(length, next(model.parameters()).device)
    if embeddings is None:
        return
    rows = embeddings[0].cpu().numpy()
    title = f"position embeddings of {result.name}"
    plots.draw_similarities(folder / "similarity.png", rows, title)
    farthest = min(BY_DISTANCE, length - 1)
    columns = [similarity_by_distance(matrix, farthest) for matrix in similarity(rows).values()]
    result.similarities += [
        dict(zip(SIMILARITIES, (distance, *values), strict=True))
        for distance, values in enumerate(np.hstack(columns).tolist())
    ]
