"""Computes scores of decoded sentences, overall and by length."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sacrebleu.metrics import BLEU

from recipes.lab.command_line import bin_of, bins
from recipes.lab.steps import CommandError
from recipes.lab.tables import ALL

METRICS = {"exact_match": "Exact match", "bleu": "BLEU", "token_accuracy": "Token accuracy"}
Score = dict[str, float]  # "count" and METRICS: BLEU from 0 to 100, shares from 0 to 1


def sacrebleu(language: str, **settings: Any) -> BLEU:
    """BLEU with sacrebleu's tokenizer for a target language: 13a for most languages, separate
    tokenizers for zh, ja and ko."""
    try:
        return BLEU(trg_lang=language, **settings)
    except (ImportError, RuntimeError) as error:  # ja and ko need packages
        why = " ".join(str(error).split())
        raise CommandError(f"sacreBLEU cannot split {language} into words: {why}") from None


def metrics_are(language: str) -> str:
    """Description of the metrics for a page."""
    return (
        "exact match: share of sentences translated without any error; BLEU: sacrebleu, "
        f"{sacrebleu(language).tokenizer.signature()}; token accuracy: share of positions with the"
        " right subword, of the longer of hypothesis and reference"
    )


def token_accuracy(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Share of positions with the right token; a position that only one text has is wrong."""
    right = sum(ours == theirs for ours, theirs in zip(hypothesis, reference, strict=False))
    return right / max(len(hypothesis), len(reference), 1)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    hypothesis_tokens: Sequence[Sequence[str]],
    reference_tokens: Sequence[Sequence[str]],
    language: str = "",
) -> Score:
    """Scores one group: exact match and BLEU of text in this language, accuracy of its subwords."""
    matches = [ours == theirs for ours, theirs in zip(hypotheses, references, strict=True)]
    # texts too short for a 4-gram, such as one number, are scored by shorter n-grams
    metric = sacrebleu(language, effective_order=True)
    bleu = metric.corpus_score(list(hypotheses), [list(references)]).score
    accuracy = fmean(map(token_accuracy, hypothesis_tokens, reference_tokens))
    shares = {"exact_match": fmean(matches), "bleu": bleu, "token_accuracy": accuracy}
    return {"count": len(matches), **shares}


def score_groups(
    hypotheses: Sequence[str],
    references: Sequence[str],
    groups: Sequence[str],
    labels: Sequence[str],
    tokens: tuple[Sequence[str], Sequence[str]] | None = None,
    language: str = "",
) -> dict[str, Score]:
    """Scores of the sentences of each group, in the order of `labels` and without empty groups;
    then scores of all sentences.

    Args:
        tokens: Tokens of hypotheses and references, separated by spaces (default: words).
        language: Target language.
    """
    sides = ([text.split() for text in texts] for texts in tokens or (hypotheses, references))
    members: dict[str, list] = {label: [] for label in labels} | {ALL: []}
    for group, *row in zip(groups, hypotheses, references, *sides, strict=True):
        members[group].append(row)
        members[ALL].append(row)
    columns = {label: zip(*rows, strict=True) for label, rows in members.items() if rows}
    return {label: score(*sides, language=language) for label, sides in columns.items()}


def groups_by_length(
    sources: Sequence[str], edges: Sequence[int]
) -> tuple[Sequence[str], Sequence[str]]:
    """Groups and their labels: bins of source words with these upper ends."""
    labelled = bins(edges, "--bins")
    groups = [bin_of(len(source.split()), labelled) for source in sources]
    return groups, [label for label, *_ in labelled]
