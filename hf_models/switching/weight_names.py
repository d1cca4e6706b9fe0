"""Older names of weights, which stock checkpoints hold and transformers translates on loading."""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming


class OlderName(WeightRenaming):
    """Renames weights with an older name, and leaves weights that have the new name alone.

    A pattern of transformers may match a part of a new name too: DINOv3's ``layer.``, for
    ``model.layer.``, matches ``layer_`` in ``model.layer.0.layer_scale1``. Stock checkpoints hold
    older names only; checkpoints of this package hold new names.
    """

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """See transformers. Returns the name, and the pattern that matched or None."""
        renamed, pattern = super().rename_source_key(source_key)
        if len(renamed) > len(source_key):  # a longer name may hold the older one
            older, _ = self.reverse_transform().rename_source_key(source_key)
            if older != source_key:
                return source_key, None
        return renamed, pattern

    def reverse_transform(self) -> WeightRenaming:
        """See transformers. The way back renames everything that matches."""
        back = WeightRenaming(self._original_target_patterns, self._original_source_patterns)
        back.scope_prefix = self.scope_prefix
        back.base_model_prefix = self.base_model_prefix
        return back


def translate_older_names(stock: str, cape: str) -> None:
    """Makes transformers translate older names for a model of this package as for the stock model.

    Args:
        stock: Model type or class name of the stock model.
        cape: Model type or class name of this package.
    """
    if transforms := get_checkpoint_conversion_mapping(stock):
        transforms = [_guarded(transform) for transform in transforms]
        register_checkpoint_conversion_mapping(cape, transforms, overwrite=True)


def _guarded(transform: Any) -> Any:
    if type(transform) is not WeightRenaming:  # merges weights, or has other rules
        return transform
    return OlderName(transform._original_source_patterns, transform._original_target_patterns)
