"""The tests of the papers that are stages of a recipe; recipes/mt/analysis does the work.

stack   sentences stacked to 300 and more target tokens, loss by position (CAPE 5.3, figure 8)
swap    the first of ten joined sentences moved to the end (SHAPE 3.2, table 1)
"""

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
from sacrebleu.metrics import BLEU

from recipes.lab.steps import CommandError
from recipes.lab.tables import markdown, write_csv, write_page
from recipes.mt.analysis.options import open_translator, translations
from recipes.mt.analysis.stack import TABLE_BIN, loss_by_position
from recipes.mt.analysis.swap import COLUMNS, swap_bleu
from recipes.mt.analysis.text import stack_pairs
from recipes.mt.analysis.translators import Decoding, Running, Translator
from recipes.mt.corpus import read_pairs
from recipes.mt.stages import (
    Experiment,
    detokenise,
    load_model,
    selected_checkpoint,
)

SWAPPED_SENTENCES = 10_000


def stack(experiment: Experiment) -> None:
    """Loss by position on the stacked first test set: ``run/stacked.csv``, and a summary."""
    recipe, work, length = experiment.recipe, experiment.work, experiment.recipe.stacked_length
    tokens = work / ("tokenised" if recipe.segmentation == "bpe" else "text")
    encode = load_model(experiment).encode
    pairs = read_pairs(*(tokens / f"test.{language}" for language in recipe.languages), "--test")
    stacked = stack_pairs(pairs, lambda text: len(encode(text).split()), length)
    pieces = [(encode(source), encode(target)) for source, target in stacked]
    if not pieces:
        raise CommandError(
            f"--work {work}: its test set has fewer than {length} target subwords, too few for"
            " one stacked sentence; prepare a larger one"
        )
    losses = [-scores for scores in _model(experiment).log_probabilities(pieces, "stack")]
    rows = loss_by_position(losses)
    write_csv(
        experiment.run / "stacked.csv",
        (
            {"position": n, "mean_nll": float(loss), "count": count, "tail": int(n >= length)}
            for n, loss, count in rows
        ),
    )
    print(f"{len(losses)} stacked sentences; mean negative log likelihood (nats) by position")
    for start in range(0, length, TABLE_BIN):
        part = rows[start : min(start + TABLE_BIN, length)]
        total = sum(count for _, _, count in part)
        loss = sum(loss * count for _, loss, count in part) / total
        print(f"{start:5d}-{start + len(part) - 1:<5d} {loss:8.3f}   {total} tokens")
    print(f"not shown: from {length} on, the ends of the texts (tail 1 in stacked.csv)")


def swap(experiment: Experiment) -> None:
    """BLEU on training sentences in original and in swapped order: ``run/swap.md``."""
    recipe, work = experiment.recipe, experiment.work
    if recipe.join == 1:
        raise CommandError(
            "the stage swap needs joined sentences; choose the recipe wmt16_en_de_interpolate"
        )
    files = [work / "subwords" / f"train.{language}" for language in recipe.languages]
    pairs = islice(read_pairs(*files, "--train"), SWAPPED_SENTENCES)
    sources, targets = zip(*pairs, strict=True)
    model, metric = _model(experiment), BLEU(lowercase=recipe.lowercase)
    _, share, _, more = recipe.max_length.split()
    decoding = Decoding(recipe.beam, recipe.length_penalty, float(share), int(more))

    def translate(lines: Sequence[str], order: str) -> list[str]:
        return translations(model, lines, decoding, experiment.run / "swap", order)

    references = detokenise(experiment, list(map(model.plain, targets)))
    bleu = swap_bleu(translate, sources, references, metric, partial(detokenise, experiment))
    table = markdown(["model", *COLUMNS], [[experiment.run.name, *map(bleu.get, COLUMNS)]])
    facts = {"Sentences": f"{len(sources)} of training", "BLEU": str(metric.get_signature())}
    page = write_page(experiment.run / "swap.md", "Swapped sentences", {"": table}, facts)
    print("\n".join(page))


def _model(experiment: Experiment) -> Translator:
    """The selected checkpoint, for text in the subwords of the recipe."""
    torch.set_num_threads(experiment.threads)
    gpu = torch.cuda.is_available()
    running = Running(torch.device("cuda" if gpu else "cpu"), half=gpu)
    checkpoint = selected_checkpoint(experiment)
    return open_translator(checkpoint, running, data=experiment.data, segmented=True)
