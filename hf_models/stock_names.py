"""What transformers knows of a stock model by name, said of the model in its place, too.

Parts of it ask for the name of a class instead of the class itself, such as the Trainer, which
shifts labels for label smoothing, and the choice of a tokenizer for a checkpoint that names none.
They treat a name that they do not know as some other model, often without a word.
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


def share_model_names(config: Any, parts: Mapping[type, type]) -> None:
    """Puts the models of a family into the tables of names that their stock models are in.

    Args:
        config: Configuration class of the family, with its ``model_types``.
        parts: Stock classes, and the classes in their place.
    """
    own_type, *stock_types = config.model_types()
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_NAMES")]
    for table, stock_type in product(tables, stock_types):
        known = table.get(stock_type, ())
        known = known if isinstance(known, tuple) else (known,)
        own = tuple(part.__name__ for stock, part in parts.items() if stock.__name__ in known)
        if own:
            table[own_type] = own[0] if len(own) == 1 else own


def share_processors(config: Any) -> None:
    """Lets the Auto classes choose tokenizers and processors as for the stock model.

    Args:
        config: Configuration class of a family, with its ``model_types``.
    """
    own_type, *stock_types = config.model_types()
    for stock_type in stock_types:
        mappings = (
            *(TOKENIZER_MAPPING, PROCESSOR_MAPPING),
            *(IMAGE_PROCESSOR_MAPPING, FEATURE_EXTRACTOR_MAPPING),
        )
        for mapping in mappings:
            # by name: to register a class is to import it, with whatever it needs
            mapping._reverse_config_mapping[config.__name__] = stock_type
        if stock_type in TOKENIZER_MAPPING_NAMES:
            TOKENIZER_MAPPING_NAMES[own_type] = TOKENIZER_MAPPING_NAMES[stock_type]
        if stock_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
            MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.add(own_type)
