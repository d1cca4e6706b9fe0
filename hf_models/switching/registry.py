"""The families that are registered, and their registration with transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from hf_models.switching.install import FamilyClasses, add_parts

# Maps the configuration of a family to its Auto classes, and to the model that each class loads.
AUTO_CLASSES: dict[type, Any] = {}
MODELS: dict[str, type] = {}  # by name


def register_family(family: FamilyClasses) -> None:
    """Registers a family, or more heads of a known family, with the Auto classes, :func:`switch`
    and the commands.

    Args:
        family: See :class:`~hf_models.switching.install.FamilyClasses`.
    """
    add_parts(family)
    AUTO_CLASSES[family.config] = {**AUTO_CLASSES.get(family.config, {}), **family.auto}
    AutoConfig.register(family.model_type, family.config, exist_ok=True)
    for auto, model in family.auto.items():
        auto.register(family.config, model, exist_ok=True)
    MODELS.update(family.models)
