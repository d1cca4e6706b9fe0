"""Relative self-attention in fairseq layers."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from cape_plugins import (
    PositionConfig,
    RelativePositions,
    build_relative_positions,
    relative_attention,
)
from fairseq_user_dir.host.errors import SettingsError


class RelativeSelfAttention(MultiheadAttention):
    """fairseq's self-attention with learned relative positions (Shaw et al.).

    Checkpoints of the stock attention fit: the relative tables are additional parameters. The
    whole forward is replaced, because key terms act before the softmax and value terms after it.
    """

    relative: RelativePositions

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, Any] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention in fairseq's signature.

        Args:
            query: ``[T, B, C]``; key and value are the same tensor.
            key_padding_mask: ``[B, S]``, True on padding.
            incremental_state: Cache of incremental decoding.
            attn_mask: ``[T, S]`` added to the scores.

        Returns:
            ``[T, B, C]`` and weights: ``[H, B, T, S]`` if `need_head_weights`, the mean over heads
            ``[B, T, S]`` if `need_weights`, else None.
        """
        if static_kv or before_softmax:
            raise ValueError("relative attention has no static_kv or before_softmax mode.")
        queries, keys, values = (
            self._heads(projection(query)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if incremental_state is not None:
            keys, values, key_padding_mask = self._append_to_cache(
                incremental_state, keys, values, key_padding_mask
            )
        drop = self.dropout_module
        output, weights = relative_attention(
            queries,
            keys,
            values,
            self.relative,
            query_offset=keys.shape[2] - queries.shape[2],
            attn_mask=attn_mask,
            key_padding_mask=None if key_padding_mask is None else key_padding_mask.bool(),
            dropout=drop.p if drop.training or drop.apply_during_inference else 0.0,
            need_weights=need_weights or need_head_weights,
        )
        # B x H x T x d -> T x B x C
        output = self.out_proj(output.permute(2, 0, 1, 3).flatten(2))
        if weights is not None:
            weights = weights.transpose(0, 1)
            if not need_head_weights:
                weights = weights.mean(0)
        return output, weights

    def _heads(self, projected: Tensor) -> Tensor:
        """T x B x C -> B x H x T x d"""
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _append_to_cache(
        self,
        incremental_state: dict[str, Any],
        keys: Tensor,
        values: Tensor,
        key_padding_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values of the whole prefix. The cache holds only content, no positions, so
        fairseq's reordering of beams stays right."""
        saved = self._get_input_buffer(incremental_state)
        if "prev_key" in saved:
            keys = torch.cat((saved["prev_key"], keys), dim=2)
            values = torch.cat((saved["prev_value"], values), dim=2)
        key_padding_mask = self._append_prev_key_padding_mask(
            key_padding_mask=key_padding_mask,
            prev_key_padding_mask=saved.get("prev_key_padding_mask"),
            batch_size=keys.shape[0],
            src_len=keys.shape[2],
            static_kv=False,
        )
        saved = {
            "prev_key": keys,
            "prev_value": values,
            "prev_key_padding_mask": key_padding_mask,
        }
        self._set_input_buffer(incremental_state, saved)
        return keys, values, key_padding_mask


def add_relative_positions(layers: nn.ModuleList, config: PositionConfig) -> None:
    """Gives the self-attention of all or the first of `layers` relative positions; does nothing if
    the settings have no relative attention.

    Exchanges the class of the built attention and overrides no builder of layers: layers may
    already be wrapped for activation checkpointing, but not their attention. Stock initialisation,
    names of parameters and dropout settings stay.

    Raises:
        ValueError: for kinds of attention without a definition of relative positions.
    """
    # by index: with layer drop, iterating skips layers at random
    for layer in (layers[index] for index in range(config.relative_depth(len(layers)))):
        attention = getattr(layer, "self_attn", None)
        if type(attention) is not MultiheadAttention:
            raise SettingsError(
                f"--position-relative-context={config.relative_context} needs fairseq's "
                f"MultiheadAttention in each layer, found {type(attention).__name__} in "
                f"{type(layer).__name__}; leave out the option that replaces it "
                "(such as --base-layers)."
            )
        unsupported = {
            "--cross-self-attention": not attention.self_attention,
            "xformers attention": attention.use_xformers,
            "add_bias_kv": attention.bias_k is not None,
            "add_zero_attn": attention.add_zero_attn,
        }
        for name, present in unsupported.items():
            if present:
                raise SettingsError(
                    f"--position-relative-context={config.relative_context} cannot be combined "
                    f"with {name}; switch one of them off."
                )
        attention.relative = build_relative_positions(
            config, attention.head_dim, attention.num_heads
        )
        attention.__class__ = RelativeSelfAttention
