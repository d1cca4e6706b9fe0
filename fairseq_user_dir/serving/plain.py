"""Stacks of fairseq as engines hold them: tables in the place of modules that compute positions,
and residual connections without weights. All of it changes a stack in place: give a copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fairseq_user_dir.errors import SettingsError

_IDENTITY_WIDTH = 8  # a multiple of what kernels for int8 take at once


class PositionRows(nn.Module):
    """The embeddings ``[N, K]`` of positions 0 .. N - 1, by the names of fairseq's sinusoids.

    Attributes:
        weights: ``[N, K]`` float32.
        padding_idx: -1, because no row is that of padding.
    """

    padding_idx = -1

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weights = weights


def layers_of(stack: nn.Module) -> list[nn.Module]:
    """All layers; a stack with layer drop skips some when it is iterated in training."""
    return [stack.layers[index] for index in range(len(stack.layers))]


@torch.no_grad()
def tabulate(stack: nn.Module, rows: int) -> None:
    """Puts a table of what a stack adds to its first tokens in the place of the module that
    computes it; zeros, where nothing is added.

    Args:
        stack: In evaluation mode: encoder or decoder.
        rows: N.
    """
    if stack.embed_positions is None:
        weights = torch.zeros(rows, layers_of(stack)[0].embed_dim)
    else:
        tokens = torch.full((1, rows), stack.padding_idx + 1)
        weights = stack.embed_positions(tokens)[0].float().clone()
    stack.embed_positions = PositionRows(weights)


@torch.no_grad()
def fold_admin(stack: nn.Module) -> None:
    """Multiplies ADMIN's residual weights into their neighbours; exact but for rounding.

    LN(f(x) + w * x) is a plain layer on x' = w * x: the layer norm (or embedding) that makes x has
    its outputs times w, and what reads x in f has its columns divided by w.

    Args:
        stack: Encoder or decoder, after :func:`tabulate`; nothing is done where it has no ADMIN.

    Raises:
        SettingsError: if a weight is zero, which leaves nothing to divide by.
    """
    norm = stack.layernorm_embedding
    for layer in layers_of(stack):
        admin = getattr(layer, "admin", None)
        if admin is None:
            return
        for weight, (readers, next_norm) in zip(admin.omega, _branches(layer), strict=True):
            if not bool((weight != 0).all()):
                raise SettingsError(
                    "a residual weight of ADMIN is 0, which no plain layer can express; allowed: "
                    "others. Serve the model by fairseq, or set the weight to 1e-6."
                )
            _scale_output(stack, norm, weight)
            for reader in readers:
                reader.weight.div_(weight)
            weight.fill_(1.0)
            norm = next_norm


def _branches(layer: nn.Module) -> Iterator[tuple[list[nn.Module], nn.Module]]:
    """The sublayers in their order: linear maps that read the residual stream, and the norm at the
    end."""
    attention = layer.self_attn
    readers = [attention.q_proj, attention.k_proj, attention.v_proj]
    yield readers, layer.self_attn_layer_norm
    if getattr(layer, "encoder_attn", None) is not None:
        yield [layer.encoder_attn.q_proj], layer.encoder_attn_layer_norm
    yield [layer.fc1], layer.final_layer_norm


def _scale_output(stack: nn.Module, norm: nn.Module | None, weight: Tensor) -> None:
    """Multiplies what a layer norm gives, or the embeddings of a stack, where there is none."""
    if norm is not None:
        norm.weight.mul_(weight)
        norm.bias.mul_(weight)
        return
    # a module of its own: the other side and the projection may share the weight
    scaled = stack.embed_tokens.weight * weight
    stack.embed_tokens = nn.Embedding.from_pretrained(scaled, padding_idx=stack.padding_idx)
    stack.embed_positions = PositionRows(stack.embed_positions.weights * weight)


@torch.no_grad()
def put_identity_first(stack: nn.Module) -> None:
    """Puts a layer before the first that adds zero to the residual stream, and has plain
    attention; for pre-LN stacks, whose layers only add."""
    layer = copy.deepcopy(stack.layers[0])
    if hasattr(layer.self_attn, "relative"):
        del layer.self_attn.relative
    layer.fc1 = nn.Linear(layer.embed_dim, _IDENTITY_WIDTH)
    layer.fc2 = nn.Linear(_IDENTITY_WIDTH, layer.embed_dim)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(False).fill_(float("norm.weight" in name))
    stack.layers.insert(0, layer)
