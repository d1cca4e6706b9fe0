"""Vision transformers for images of any height and width, with any position embedding."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import ViTForImageClassification, ViTModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.vit.modeling_vit import (
    ViTEmbeddings,
    ViTLayer,
    ViTPatchEmbeddings,
    ViTPooler,
    ViTPreTrainedModel,
)

from cape_plugins import Draw, build_position_encoder, patch_positions, resize_grid
from hf_models.configuration import CapeViTConfig
from hf_models.modeling import PositionModelMixin, add_positions, draw_positions
from hf_models.relative import add_relative_positions

# Checkpoints of ViT are stored under older names, which transformers translates by class name.
register_checkpoint_conversion_mapping(
    "CapeViTModel", get_checkpoint_conversion_mapping("ViTModel"), overwrite=True
)


class CapeViTEmbeddings(ViTEmbeddings):
    """Patches, class token and positions. The class token has a learned vector of its own and no
    place in the image.

    A learned table keeps the name and shape of the stock parameter, its first row being the class
    token's, and is resized bicubically to the image at hand.
    """

    def __init__(self, config: CapeViTConfig, use_mask_token: bool = False) -> None:
        nn.Module.__init__(self)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.mask_token = None
        if use_mask_token:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.patch_embeddings = ViTPatchEmbeddings(config)
        self.patch_size = tuple(self.patch_embeddings.patch_size)
        self.image_size = tuple(self.patch_embeddings.image_size)
        self.table_size = self.patches(*self.image_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.position_embeddings = None
        self.positions = None
        if config.position_config.encoding.counts:
            shape = (1, 1 + self.patch_embeddings.num_patches, config.hidden_size)
            self.position_embeddings = nn.Parameter(torch.zeros(shape))
        else:
            self.positions = build_position_encoder(config.position_config, config.hidden_size)

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: Draw | bool | None = None,
    ) -> Tensor:
        """``[B, 1 + patches, C]``.

        Args:
            pixel_values: ``[B, channels, H, W]``; any H and W of at least one patch.
            bool_masked_pos: ``[B, patches]``, True where the mask token stands instead.
            interpolate_pos_encoding: Every size is welcome, so that the flag means nothing here;
                its place carries the draw of :class:`CapeViTModel`.
        """
        height, width = self.patches(*pixel_values.shape[2:])
        patches = self.patch_embeddings(pixel_values)
        if bool_masked_pos is not None:
            patches = torch.where(bool_masked_pos.bool()[..., None], self.mask_token, patches)
        cls_token = self.cls_token.expand(patches.shape[0], -1, -1)
        if self.position_embeddings is not None:
            table = self._resized_table(height, width)
            return self.dropout(torch.cat((cls_token, patches), dim=1) + table)
        draw = interpolate_pos_encoding if isinstance(interpolate_pos_encoding, Draw) else None
        if draw is None:
            draw = draw_positions(self.positions, patches)
        grid = patch_positions(height, width, device=patches.device)
        patches = add_positions(patches, self.positions, grid, draw)
        return self.dropout(torch.cat((cls_token, patches), dim=1))

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of `height` x `width` pixels."""
        rows, columns = height // self.patch_size[0], width // self.patch_size[1]
        if rows < 1 or columns < 1:
            raise ValueError(
                f"image of {height} x {width} pixels is smaller than a patch "
                f"({self.patch_size[0]} x {self.patch_size[1]}); allowed: at least one patch. "
                "Resize the image, or choose a smaller patch_size."
            )
        return rows, columns

    def resize_images(self, height: int, width: int) -> None:
        """See :meth:`CapeViTModel.resize_images`."""
        size = self.patches(height, width)
        if self.position_embeddings is not None:
            with torch.no_grad():
                table = self._resized_table(*size).clone()
            self.position_embeddings = nn.Parameter(table, self.position_embeddings.requires_grad)
        self.image_size, self.table_size = (height, width), size
        self.patch_embeddings.image_size = self.image_size
        self.patch_embeddings.num_patches = size[0] * size[1]

    def _resized_table(self, height: int, width: int) -> Tensor:
        table = self.position_embeddings
        if (height, width) == self.table_size:
            return table
        rows = resize_grid(table[0, 1:], self.table_size, (height, width))
        return torch.cat((table[:, :1], rows[None]), dim=1)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016), at the end of a branch that a residual is added to.

    In training each sample keeps the branch with probability ``1 - rate`` and is then divided by
    it, so that the expectation stays what it is without. The released code of CAPE divides by the
    share of the batch that was kept instead, which is 0/0 where nobody keeps it.

    Args:
        rate: Probability that a sample goes without the branch, 0 to less than 1.
        dropout: The dropout in whose place this module is put; applied before.
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
        kept = branch.new_empty(shape).bernoulli_(1 - self.rate)
        return branch * (kept / (1 - self.rate))


def add_drop_path(layers: nn.ModuleList, rate: float) -> None:
    """Puts stochastic depth into both branches of each layer, linearly from 0 in the first layer
    to `rate` in the last. A layer of rate 0 stays as it is, down to the random numbers it draws."""
    for depth, layer in enumerate(layers):
        own = rate * depth / max(1, len(layers) - 1)
        if own:
            layer.dropout = DropPath(own, layer.dropout)


class CapeViTModel(PositionModelMixin, ViTModel):
    """See transformers' ViTModel; images of any size, no flag needed."""

    config_class = CapeViTConfig

    def __init__(
        self, config: CapeViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        ViTPreTrainedModel.__init__(self, config)
        self.embeddings = CapeViTEmbeddings(config, use_mask_token)
        self.layers = nn.ModuleList([ViTLayer(config) for _ in range(config.num_hidden_layers)])
        add_drop_path(self.layers, config.drop_path_rate)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = ViTPooler(config) if add_pooling_layer else None
        self.has_relative_positions = config.position_config.relative_context > 0
        add_relative_positions((layer.attention for layer in self.layers), config.position_config)
        self.post_init()

    def resize_images(self, height: int, width: int) -> None:
        """Makes `height` x `width` pixels the image size of the configuration.

        Every size is welcome before and after. But a learned table keeps the size of the
        configuration and is resized in each forward; to finetune at another size it is resized
        here once, bicubically, and then learns at its own size (DeiT). The row of the class token
        and all other weights stay as they are. To be called before an optimizer is made.

        Raises:
            ValueError: if the size is smaller than a patch.
        """
        self.embeddings.resize_images(height, width)
        self.config.image_size = height if height == width else (height, width)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        draw: Draw | None = None,
        **kwargs: Any,
    ) -> Any:
        """See transformers.

        Args:
            pixel_values: ``[B, channels, H, W]``.
            interpolate_pos_encoding: Accepted for the sake of stock callers; without effect.
            draw: Random numbers of this forward, to inject; default drawn in training.
        """
        channels = self.config.num_channels
        sizes = tuple(pixel_values.shape) if isinstance(pixel_values, Tensor) else ()
        if len(sizes) != 4 or sizes[1] != channels:
            given = f"has shape {sizes}" if sizes else f"is {type(pixel_values).__name__}"
            raise ValueError(
                f"pixel_values {given}; allowed: a tensor [batch, {channels} channels, height, "
                "width]. Give one image as image[None]."
            )
        if self.has_relative_positions:
            kwargs["patches"] = self.embeddings.patches(*pixel_values.shape[2:])
        return super().forward(pixel_values, bool_masked_pos, draw, attention_mask, **kwargs)


class CapeViTForImageClassification(PositionModelMixin, ViTForImageClassification):
    """Linear classifier on the class token."""

    config_class = CapeViTConfig
    # the stock table, where the type has none
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"embeddings\.position_embeddings$"]

    def __init__(self, config: CapeViTConfig) -> None:
        ViTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.vit = CapeViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Identity()
        if config.num_labels > 0:
            self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
