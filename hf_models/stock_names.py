"""What transformers knows of a stock model by name, said of the model in its place, too.

Parts of it ask for the name of a class instead of the class itself, such as the Trainer, which
shifts labels for label smoothing, and treat a name that they do not know as some other model,
without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from transformers.models.auto import modeling_auto


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
