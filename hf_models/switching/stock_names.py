"""Adds the models of this package to the tables in which transformers looks up models by name, with
the entries of the stock models that they replace.

Parts of transformers look at the name of a class instead of the class: the Trainer, to shift labels
for label smoothing, and the choice of a tokenizer for a checkpoint that names none. These parts
treat an unknown name as some other model, often silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from transformers.models.auto import modeling_auto
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING,
    TOKENIZER_MAPPING_NAMES,
)

_PROCESSOR_MAPPINGS = (
    TOKENIZER_MAPPING,
    PROCESSOR_MAPPING,
    IMAGE_PROCESSOR_MAPPING,
    FEATURE_EXTRACTOR_MAPPING,
)


def share_model_names(config: Any, parts: Mapping[type, type]) -> None:
    """Puts the models of a family into the tables of names that hold their stock models.

    Args:
        config: Configuration class of the family, with its ``model_types``.
        parts: Stock classes, and the classes in their place.
    """
    cape_type, *stock_types = config.model_types()
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_NAMES")]
    for table, stock_type in product(tables, stock_types):
        stock_names = table.get(stock_type, ())
        stock_names = stock_names if isinstance(stock_names, tuple) else (stock_names,)
        cape_names = tuple(
            part.__name__ for stock, part in parts.items() if stock.__name__ in stock_names
        )
        if cape_names:
            table[cape_type] = cape_names[0] if len(cape_names) == 1 else cape_names


def share_processors(config: Any) -> None:
    """Lets the Auto classes choose tokenizers and processors as for the stock model.

    Args:
        config: Configuration class of a family, with its ``model_types``.
    """
    cape_type, *stock_types = config.model_types()
    for stock_type in stock_types:
        for mapping in _PROCESSOR_MAPPINGS:
            # by name, because registering classes would import every image processor
            mapping._reverse_config_mapping[config.__name__] = stock_type
        if stock_type in TOKENIZER_MAPPING_NAMES:
            TOKENIZER_MAPPING_NAMES[cape_type] = TOKENIZER_MAPPING_NAMES[stock_type]
        if stock_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(cape_type)
