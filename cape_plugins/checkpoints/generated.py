"""Families of Hugging Face models that are made from their stock classes, as rows of data.

Only families that ``python -m tests.families`` has shown to equal their stock models are here. This
module needs the standard library only.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class GeneratedRow:
    """A family without a file.

    Attributes:
        seam: Kind of the modules that know positions, a key of hf_models.generated.seams.SEAMS.
        stock: Type of position embedding of the stock model.
        side: Side of the model, "encoder" or "decoder".
        domain: Key of :data:`~cape_plugins.DOMAINS`.
        architecture: Architecture of the :class:`~cape_plugins.PositionConfig`.
        keeps_borders: Whether the model attends to both sides and lets packed texts see each other,
            so this package has to keep them apart.
        checked: Whether ``cape-plugins doctor`` without a model checks the family.
    """

    seam: str
    stock: str
    side: str
    domain: str
    architecture: str
    keeps_borders: bool = False
    checked: bool = False

    @property
    def oddities(self) -> dict[str, Any]:
        """Fields that plain families leave at their defaults, with other values."""
        optional = (f for f in fields(self) if f.default is not MISSING and f.name != "checked")
        values = {field: getattr(self, field.name) for field in optional}
        return {field.name: value for field, value in values.items() if value != field.default}


_DECODER = ("angles", "rope", "decoder", "text", "rotary")
_ENCODER = ("angles", "rope", "encoder", "text", "rotary")


def _rows(fields: tuple[str, ...], model_types: str) -> dict[str, GeneratedRow]:
    return dict.fromkeys(model_types.split(), GeneratedRow(*fields))


GENERATED: dict[str, GeneratedRow] = {
    "llama": GeneratedRow(*_DECODER, checked=True),
    "qwen2": GeneratedRow(*_DECODER, checked=True),
    "modernbert": GeneratedRow(*_ENCODER, keeps_borders=True, checked=True),
    **_rows(_DECODER, "mistral mixtral gemma3 gemma3_text qwen2_vl llava mistral3"),
}
