"""Stochastic depth for layers of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_models.seams.images import ImageModel


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016), at the end of a branch that a residual is added to.

    In training each sample keeps the branch with probability ``1 - rate``. A kept branch is divided
    by this probability, so the expectation does not change. The released code of CAPE divides by
    the share of samples that kept the branch, which gives 0/0 if no sample keeps the branch.

    Args:
        rate: Probability that a sample goes without the branch, 0 to less than 1.
        dropout: The dropout that this module replaces; applied to the branch first.
    """

    def __init__(self, rate: float, dropout: nn.Module) -> None:
        super().__init__()
        self.rate = rate
        self.dropout = dropout

    def forward(self, branch: Tensor) -> Tensor:
        """``[B, ...]`` to the same shape."""
        branch = self.dropout(branch)
        if not self.training:
            return branch
        shape = (branch.shape[0],) + (1,) * (branch.dim() - 1)
        keep = branch.new_empty(shape).bernoulli_(1 - self.rate)
        return branch * (keep / (1 - self.rate))


def add_drop_path(layers: nn.ModuleList, rate: float) -> None:
    """Puts stochastic depth into both branches of each layer; the rate grows linearly from 0 in the
    first layer to `rate` in the last. A layer with rate 0 draws the same random numbers as before.
    """
    for depth, layer in enumerate(layers):
        layer_rate = rate * depth / max(1, len(layers) - 1)
        if layer_rate:
            layer.dropout = DropPath(layer_rate, layer.dropout)


# the flags keep __init__, __repr__ and __eq__ of the stock configuration
@dataclass(init=False, repr=False, eq=False, kw_only=True)
class DropPathSettings:
    """Mixin over a configuration with the field `drop_path_rate`, for a :class:`DropPathModel`."""

    drop_path_rate: float | int = 0.0

    def validate_drop_path_rate(self) -> None:
        """Part of strict validation."""
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(
                f"drop_path_rate={self.drop_path_rate} is not allowed; allowed: 0 to less than 1, "
                "such as 0.1."
            )


class DropPathModel(ImageModel):
    """Mixin over a stock model of images whose `layers` have a dropout at the end of each branch,
    and whose configuration has :class:`DropPathSettings`."""

    def install_positions(self, config: Any, trained: bool) -> None:
        """See :class:`~hf_models.switching.install.PositionHost`."""
        super().install_positions(config, trained)
        add_drop_path(self.layers, config.drop_path_rate)
