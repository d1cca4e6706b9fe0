"""Folds the parts that stock models lack into stock parameters. Computed positions become rows of a
learned table, and neighbouring layers are multiplied by the residual weights of ADMIN. A folded
copy computes the same outputs as the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, nn

from fairseq_user_dir.admin import AdminResidual

SIDES = ("encoder", "decoder")


@torch.no_grad()
def folded(model: nn.Module, source_rows: int, target_rows: int) -> nn.Module:
    """A copy of a model in evaluation mode, with positions and ADMIN in stock parameters.

    The stacks have a :class:`~fairseq.modules.LearnedPositionalEmbedding` with `padding_idx` + 1
    rows of zeros and the rows of the positions; None stays if the type adds nothing. The BOS hint
    is still put before the source, and relative attention does not change.

    Args:
        model: An encoder-decoder, or a language model, of :mod:`fairseq_user_dir.models`.
        source_rows: Positions of the encoder, BOS hint and EOS included.
        target_rows: Positions of the decoder.

    Raises:
        ValueError: if residual weights cannot be folded.
    """
    model = copy.deepcopy(model).eval()
    for side, rows in zip(SIDES, (source_rows, target_rows), strict=True):
        if hasattr(model, side):
            stack = getattr(model, side)
            stack.embed_positions = position_table(stack, rows)
            _fold_residuals(stack, side)
    return model


@torch.no_grad()
def position_table(stack: nn.Module, rows: int) -> LearnedPositionalEmbedding | None:
    """The first `rows` position embeddings of an encoder or decoder as a stock table; None if the
    type adds nothing. After the last row of a learned table of this package, the rows are repeated
    from the first."""
    seam = stack.embed_positions
    if seam is None:
        return None
    first = stack.padding_idx + 1
    values = seam(torch.full((1, rows), first))[0]
    table = LearnedPositionalEmbedding(first + rows, values.shape[1], stack.padding_idx)
    table.weight.zero_()[first:] = values
    return table


def empty_table(stack: nn.Module, rows: int) -> LearnedPositionalEmbedding:
    """A stock table for `rows` positions of an encoder or decoder, which adds zero."""
    first = stack.padding_idx + 1
    table = LearnedPositionalEmbedding(first + rows, width_of(stack), stack.padding_idx)
    nn.init.zeros_(table.weight)
    return table.requires_grad_(False)


def width_of(stack: nn.Module) -> int:
    """Number of channels of the positions of an encoder or decoder."""
    return layers_of(stack)[0].embed_dim


def layers_of(stack: nn.Module) -> list[nn.Module]:
    """All layers, read by index: iterating over a stack with layer drop would skip layers in
    training."""
    return [stack.layers[index] for index in range(len(stack.layers))]


def _fold_residuals(stack: nn.Module, side: str) -> None:
    """Takes the residual weights of ADMIN out of a post-LN stack.

    LN(f(x) + w x) is a plain sub-layer with the input w x, if f divides its input by w. So the
    parameters of the module that computes x are multiplied by w: this module is the norm before the
    sub-layer or, for the first layer, the embeddings. The weights of the modules in f that read x
    are divided by w.
    """
    layers = layers_of(stack)
    if not all(isinstance(getattr(layer, "admin", None), AdminResidual) for layer in layers):
        return
    if getattr(stack, "cross_self_attention", False):
        raise ValueError(
            f"{side}: the residual weights of ADMIN cannot be folded where self-attention reads "
            "the encoder as well (--cross-self-attention); allowed: a model without one of them."
        )
    before: nn.Module | None = None
    for index, layer in enumerate(layers):
        admin = layer.admin
        sublayers = list(_sublayers(layer))
        for weight, (opening, readers, norm) in zip(admin.omega, sublayers, strict=True):
            if not weight.all():
                raise ValueError(
                    f"{side}.layers.{index} has a residual weight of ADMIN that is 0, which "
                    "cannot be folded into the layers around it; allowed: all other values. "
                    "Export another checkpoint of the training."
                )
            if before is None:
                _scale_entry(stack, weight)
            else:
                _scale_norm(before, weight)
            for reader in readers:
                reader.weight.copy_(reader.weight / weight)
            before = norm
            _remove_hooks(opening, admin)
        del layer.admin, layer.residual_connection  # the method of the class remains


def _sublayers(layer: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module], nn.Module]]:
    """Yields for each sub-layer in order: the module that opens the sub-layer, the modules that
    read the input of the sub-layer, and the norm of the sub-layer."""
    attention = layer.self_attn
    yield (
        attention,
        [attention.q_proj, attention.k_proj, attention.v_proj],
        layer.self_attn_layer_norm,
    )
    if getattr(layer, "encoder_attn", None) is not None:
        # keys and values come from the encoder, which has no residual weight after its last norm
        yield layer.encoder_attn, [layer.encoder_attn.q_proj], layer.encoder_attn_layer_norm
    yield layer.fc1, [layer.fc1], layer.final_layer_norm


def _scale_norm(norm: nn.Module, weight: Tensor) -> None:
    norm.weight.mul_(weight)
    norm.bias.mul_(weight)


def _scale_entry(stack: nn.Module, weight: Tensor) -> None:
    """Multiplies the input of the first layer."""
    if stack.layernorm_embedding is not None:
        _scale_norm(stack.layernorm_embedding, weight)
        return
    projection = getattr(stack, "project_in_dim", None)
    if projection is not None:
        projection.weight.mul_(weight[:, None])
    else:
        # A copy is scaled: the other side and the output projection may share these vectors, and
        # must not change.
        stack.embed_tokens = copy.deepcopy(stack.embed_tokens)
        stack.embed_tokens.weight.mul_(weight)
    if stack.embed_positions is not None:
        stack.embed_positions.weight.mul_(weight)


def _remove_hooks(module: nn.Module, admin: AdminResidual) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if getattr(getattr(hook, "func", None), "__self__", None) is admin:
            del module._forward_pre_hooks[key]
