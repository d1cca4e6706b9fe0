"""Scores of decoded sentences, overall and by length."""

from collections.abc import Sequence
from statistics import fmean

from sacrebleu.metrics import BLEU

from recipes.lab.options import bin_of, bins
from recipes.lab.tables import ALL

# Texts too short for a 4-gram, such as one number, are scored by shorter n-grams; others as usual.
_BLEU = BLEU(effective_order=True)
METRICS = {"exact_match": "Exact match", "bleu": "BLEU", "token_accuracy": "Token accuracy"}
METRICS_ARE = (
    "exact match: share of sentences translated without any error; BLEU: sacrebleu, 13a; token"
    " accuracy: share of positions with the right subword, of the longer of hypothesis and"
    " reference"
)
Score = dict[str, float]  # count, and METRICS: BLEU from 0 to 100, shares from 0 to 1


def token_accuracy(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Share of positions with the right token; a position that only one of the two has is wrong."""
    right = sum(ours == theirs for ours, theirs in zip(hypothesis, reference, strict=False))
    return right / max(len(hypothesis), len(reference), 1)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    hypothesis_tokens: Sequence[Sequence[str]],
    reference_tokens: Sequence[Sequence[str]],
) -> Score:
    """Score one group: exact match and BLEU (sacrebleu, 13a) of text, accuracy of its subwords."""
    matches = [ours == theirs for ours, theirs in zip(hypotheses, references, strict=True)]
    bleu = _BLEU.corpus_score(list(hypotheses), [list(references)]).score
    accuracy = fmean(map(token_accuracy, hypothesis_tokens, reference_tokens))
    shares = {"exact_match": fmean(matches), "bleu": bleu, "token_accuracy": accuracy}
    return {"count": len(matches), **shares}


def score_groups(
    hypotheses: Sequence[str],
    references: Sequence[str],
    groups: Sequence[str],
    labels: Sequence[str],
    tokens: tuple[Sequence[str], Sequence[str]] | None = None,
) -> dict[str, Score]:
    """Scores of the sentences of each group, in the order of `labels`, without those that have
    none; then those of all. `tokens` of both, separated by spaces, are words where not given."""
    sides = ([text.split() for text in texts] for texts in tokens or (hypotheses, references))
    members: dict[str, list] = {label: [] for label in labels} | {ALL: []}
    for group, *row in zip(groups, hypotheses, references, *sides, strict=True):
        members[group].append(row)
        members[ALL].append(row)
    return {label: score(*zip(*rows, strict=True)) for label, rows in members.items() if rows}


def groups_by_length(
    sources: Sequence[str], edges: Sequence[int]
) -> tuple[Sequence[str], Sequence[str]]:
    """Groups and their labels: bins of source words with these upper ends."""
    labelled = bins(edges, "--bins")
    groups = [bin_of(len(source.split()), labelled) for source in sources]
    return groups, [label for label, *_ in labelled]
