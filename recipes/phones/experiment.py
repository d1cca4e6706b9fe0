"""All models of one position-embedding type: trained, tested under all conditions, looked at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cape_plugins import PositionConfig
from cape_plugins.pictures.views import similarity, similarity_by_distance
from recipes.phones import plots
from recipes.phones.analysis import (
    class_changes,
    confusions,
    error_rate,
    error_types,
)
from recipes.phones.data import Corpus
from recipes.phones.model import PhoneClassifier, Sizes
from recipes.phones.report import Measurement, Result, head_rows, shown_with
from recipes.phones.train import (
    CONDITIONS,
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


@dataclass(frozen=True)
class Experiment:
    """What all models have in common."""

    corpus: Corpus
    sizes: Sizes
    training: Training
    work: Path
    device: str

    def model(
        self, config: PositionConfig, condition: str, seed: int
    ) -> tuple[PhoneClassifier, History]:
        """The trained model of a type. Training without positions is the same for all types and
        done once; for the tests the positions of the type are put in."""
        positions = CONDITIONS[condition].positions
        job = Job(condition, config if positions else NO_POSITIONS, seed)
        model, history = trained(
            self.work, job, self.corpus, self.sizes, self.training, self.device
        )
        if not positions:
            model = with_positions_of(config, model, self.corpus, self.sizes, seed)
        return model, history


def run_type(
    experiment: Experiment,
    config: PositionConfig,
    models: Sequence[str],
    seeds: Sequence[int],
    output: Path,
    similarity_length: int,
) -> Result:
    """Everything about one type; pictures, of the first seed, go to ``output/TYPE``.

    Args:
        experiment: What all types have in common.
        config: The type.
        models: Keys of CONDITIONS, the models to train.
        seeds: Of the models.
        output: Folder.
        similarity_length: Positions of the similarity maps, in frames.
    """
    folder = output / config.type
    test = experiment.corpus.splits["test"]
    names = [name for name in models if name in conditions_of(config)]
    result = Result(config.type, class_changes(targets(test)))
    for seed in seeds:
        for name in names:
            model, history = experiment.model(config, name, seed)
            result.measurements += _measure(experiment.corpus, model, config, name, seed)
            if seed != seeds[0]:
                continue
            result.histories[name] = history
            predictions = predict(model, test, CONDITIONS[name])
            result.confusions[name] = confusions(
                targets(test), predictions, len(experiment.corpus.classes)
            )
            utterance = long_utterance(test)
            weights = attention(model, utterance, CONDITIONS[name])
            result.heads += [(name, *row) for row in head_rows(weights)]
            kind = shown_with(config.type, name)
            plots.draw_attention(
                output / kind / f"attention-{name}.png",
                weights,
                f"M-{name}, {kind}: {utterance.name}",
            )
            if name == ("inc" if "inc" in names else names[0]):
                _compare_positions(model, folder, result, similarity_length)
    titles = {f"M-{name}": matrix for name, matrix in result.confusions.items()}
    plots.draw_confusions(folder / "confusions.png", titles, experiment.corpus.classes)
    plots.draw_histories(folder / "training.png", result.histories)
    return result


def conditions_of(config: PositionConfig) -> list[str]:
    """Those that make sense: without positions of any kind there is nothing to put in."""
    having = config.encoding.adds or config.relative_context > 0
    return [name for name, condition in CONDITIONS.items() if having or not condition.positions]


def _measure(
    corpus: Corpus, model: PhoneClassifier, config: PositionConfig, trained_as: str, seed: int
) -> Iterator[Measurement]:
    """One model under all test conditions."""
    test = corpus.splits["test"]
    for name in conditions_of(config):
        predictions = predict(model, test, CONDITIONS[name])
        yield Measurement(
            *(config.type, trained_as, name, seed),
            error_rate(targets(test), predictions),
            class_changes(predictions),
            *error_types(targets(test), predictions),
        )


def _compare_positions(model: PhoneClassifier, folder: Path, result: Result, length: int) -> None:
    """Similarities of the position embeddings, as used in tests."""
    with torch.no_grad():
        embeddings = model.eval().embed(length, next(model.parameters()).device)
    if embeddings is None:
        return
    rows = embeddings[0].cpu().numpy()
    plots.draw_similarities(
        folder / "similarity.png", rows, f"position embeddings of {result.type}"
    )
    farthest = min(BY_DISTANCE, length - 1)
    columns = [similarity_by_distance(matrix, farthest) for matrix in similarity(rows).values()]
    result.similarities += [
        (distance, *map(float, values)) for distance, values in enumerate(np.hstack(columns))
    ]
