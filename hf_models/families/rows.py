"""Families that are their stock classes with mixins, as rows of data.

The classes have names in this module, but are made when one of them is asked for, so that a folder
with its own code makes one family only.
"""

from __future__ import annotations

import functools
from typing import Any

from hf_models.families.making import Part, Row, make_family
from hf_models.seams.tokens import TokenEmbeddings, TokenModel
from hf_models.switching.install import FamilyClasses
from hf_models.switching.modeling import PositionModelMixin

_HEAD = (PositionModelMixin,)

# Rows by the package of transformers that has the stock classes.
ROWS: dict[str, tuple[Row, ...]] = {
    "bert": (
        Row(
            "Bert",
            "Texts of any length. Positions count tokens from 0, without padding on either side.",
            {
                "Embeddings": Part("Tokens, their types and positions.", (TokenEmbeddings,)),
                "Model": Part(
                    "Tokens to hidden states; ``forward(..., draw=)``.", (TokenModel, *_HEAD)
                ),
                "ForMaskedLM": Part("Predicts masked tokens.", _HEAD),
                "ForSequenceClassification": Part("Classifies texts.", _HEAD),
                "ForTokenClassification": Part("Classifies tokens.", _HEAD),
                "ForQuestionAnswering": Part("Finds the answer in a text.", _HEAD),
            },
        ),
    ),
}


@functools.cache
def families_of(package: str) -> list[FamilyClasses]:
    """The families of a key of :data:`ROWS`; made at the first call."""
    return [make_family(row, package, __name__) for row in ROWS[package]]


def __getattr__(name: str) -> Any:
    for package, rows in ROWS.items():
        if any(name in row.names for row in rows):
            families = families_of(package)
            classes = [cls for family in families for cls in (family.config, *family.parts)]
            return next(cls for cls in classes if cls.__name__ == name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
