"""Augment, then encode: the module that hosts call."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.augmentation import Draw, augment, draw_global, draw_local
from cape_plugins.config import PositionConfig
from cape_plugins.encodings import PositionTable, Sinusoid
from cape_plugins.positions import Positions

COMBINATIONS = ("add", "concat")


class PositionEncoder(nn.Module):
    """Turns :class:`Positions` into the embedding that is added to the content.

    Drawing is separate from applying: the caller draws once per batch with :meth:`draw` and hands
    the result to every call that shares it (CAPE section 5.3: encoder and decoder). Evaluation is
    deterministic and consumes no random numbers.

    Args:
        config: Complete settings.
        encoding: A :class:`Sinusoid`, a :class:`PositionTable`, or None where nothing is added.
    """

    def __init__(self, config: PositionConfig, encoding: Sinusoid | PositionTable | None) -> None:
        super().__init__()
        self.config = config
        self.encoding = encoding

    def draw(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Draw | None:
        """The random numbers of one training forward; None in evaluation.

        Args:
            batch_size: B.
            device: Device of the positions.
            generator: Source of randomness; default the global one.
        """
        if not self.training:
            return None
        config = self.config
        num_coords = 2 if config.domain == "image" else 1
        draw = draw_global(
            batch_size,
            num_coords,
            max_global_shift=config.max_global_shift,
            max_global_scale=config.max_global_scale,
            max_offset=config.max_offset,
            device=device,
            generator=generator,
        )
        if all(part is None for part in draw) and config.max_local_shift:
            # tells the batch size where the samples share their coordinates
            return Draw(torch.zeros(batch_size, 1, num_coords, device=device))
        return draw

    def forward(
        self,
        positions: Positions,
        draw: Draw | None = None,
        local_shift: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
        random: bool | None = None,
    ) -> Tensor | None:
        """Embeddings of a batch of positions; arithmetic in float32, the result in `dtype`.

        Args:
            positions: B x T positions.
            draw: From :meth:`draw`; required in training if the type draws at all.
            local_shift: ``[B, T, D]`` in the unit of the positions, to inject; default drawn in
                training.
            dtype: Of the result.
            generator: For the local shift; default the global one.
            random: Whether to augment; default in training. False is for hosts that generate text
                with a model in training mode, where each step must see the same positions.

        Returns:
            ``[B, T, K]`` (``[1, T, K]`` where the batch shares all), zero on padding; None if the
            type adds nothing.

        Raises:
            ValueError: in training without a draw: two silent independent draws would undo the
                synchronisation of source and target.
        """
        if self.encoding is None:
            return None
        config = self.config
        random = self.training if random is None else random
        if random and config.random and draw is None:
            raise ValueError(
                f"position embedding {config.type!r} in training needs a draw: pass "
                "draw=encoder.draw(batch_size), the same one to source and target; "
                "call .eval() for inference."
            )
        if isinstance(self.encoding, PositionTable):
            return _gather(_table_rows(self.encoding, positions), positions, dtype)
        if local_shift is None and random and config.max_local_shift:
            local_shift = draw_local(
                positions.coords,
                positions.step,
                config.max_local_shift,
                _batch_size(positions, draw),
                generator,
            )
        moved = draw is not None and any(part is not None for part in draw)
        if positions.grid is not None and not (
            moved or local_shift is not None or config.mean_normalize
        ):
            return _gather(self.encoding.grid(positions.grid), positions, dtype)
        coords = augment(
            positions.coords,
            positions.valid,
            mean_normalize=config.mean_normalize,
            draw=draw,
            local_shift=local_shift,
            step=positions.step,
        )
        embedding = self.encoding(coords)
        if positions.valid is not None:
            valid = positions.valid[..., None]
            # in place is several times faster on a CPU than masked_fill_; padding may become -0.0
            same = embedding.shape[0] == valid.shape[0]
            embedding = embedding.mul_(valid) if same else embedding * valid
        return embedding.to(dtype)


def build_position_encoder(
    config: PositionConfig,
    dim: int,
    *,
    frequencies: str | None = None,
    layout: str = "cos_sin_interleaved",
    table_size: int | tuple[int, int] = 1024,
    table_std: float | None = None,
) -> PositionEncoder:
    """The one place where the names of a configuration become code.

    Args:
        config: Complete settings.
        dim: K.
        frequencies: Key of :data:`~cape_plugins.encodings.FREQUENCIES`; default the domain's.
        layout: One of :data:`~cape_plugins.encodings.LAYOUTS`; default the paper's.
        table_size: Rows of a learned table, or its (height, width) in patches.
        table_std: Standard deviation of its initialisation; default ``dim ** -0.5``.

    Raises:
        ValueError: if `dim` does not fit the encoding.
    """
    encoding: Sinusoid | PositionTable | None = None
    if config.encoding == "sinusoid":
        encoding = Sinusoid(dim, frequencies or config.domain, layout)
    elif config.encoding == "table":
        encoding = PositionTable(dim, table_size, table_std)
    return PositionEncoder(config, encoding)


def combine(
    content: Tensor, embedding: Tensor | None, mode: str = "add", dim: int | None = None
) -> Tensor:
    """Content with its position embeddings: added (Vaswani et al.), or behind it in channels of
    their own, as in the phone classifier of recipes/phones.

    Args:
        content: ``[B, T, C]``.
        embedding: ``[B or 1, T, K]`` of a :class:`PositionEncoder`; None for no positions.
        mode: One of :data:`COMBINATIONS`: "add" (K = C) or "concat".
        dim: K; needed by "concat" without embedding, whose channels are zero then, so that a model
            has the same size with and without positions.

    Returns:
        ``[B, T, C]`` for "add", ``[B, T, C + K]`` for "concat".

    Raises:
        ValueError: for an unknown mode, or channels that do not fit.
    """
    if mode not in COMBINATIONS:
        raise ValueError(f"mode={mode!r} is unknown; allowed: {', '.join(COMBINATIONS)}.")
    if embedding is None:
        if mode == "add":
            return content
        if dim is None:
            raise ValueError(
                "dim=None is not allowed with mode='concat' and no embedding; allowed: >= 1, the "
                "number of channels to fill with zeros."
            )
        embedding = content.new_zeros(1, content.shape[1], dim)
    width = embedding.shape[-1]
    if dim not in (None, width) or (mode == "add" and width != content.shape[-1]):
        raise ValueError(
            f"mode={mode!r}, dim={dim}: the embedding has {width} channels, the content "
            f"{content.shape[-1]}; allowed: dim={width}, and as many as the content for 'add'. "
            "Build the position encoder for this dimension."
        )
    if mode == "add":
        return content + embedding
    return torch.cat((content, embedding.expand(*content.shape[:-1], width)), dim=-1)


def _table_rows(table: PositionTable, positions: Positions) -> Tensor:
    """``[T, K]``, one row of the table for each row of the grid."""
    if positions.grid is None and positions.index is None:
        raise ValueError(
            "a learned position table has rows for tokens, frames or patches counted from the "
            "first, not for arbitrary coordinates; use token_positions, frame_positions or "
            "patch_positions, or a sinusoid type."
        )
    if positions.patches is not None:
        return table.resize(*positions.patches)
    return table.rows(positions.coords.shape[1], positions.first)


def _gather(rows: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
    """Rows of an encoded grid for each position, zero on padding."""
    if positions.index is None:
        return rows[None].to(dtype)
    # index 0 means padding: one zero row in front serves it
    rows = F.pad(rows.to(dtype), (0, 0, 1, 0))
    batch, length = positions.index.shape
    return rows.index_select(0, positions.index.reshape(-1)).view(batch, length, -1)


def _batch_size(positions: Positions, draw: Draw | None) -> int:
    """B, also where the samples share their coordinates but not their draws."""
    for tensor in (*(draw or ()), positions.valid):
        if tensor is not None:
            return tensor.shape[0]
    return positions.coords.shape[0]
