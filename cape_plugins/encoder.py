"""Augment, then encode: the module that hosts call."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cape_plugins.augmentation import (
    Draw,
    augment,
    draw_global,
    draw_local,
    positions_at,
    sorted_sample,
    times,
)
from cape_plugins.config import PositionConfig
from cape_plugins.domains import DOMAINS
from cape_plugins.encodings import Frequencies, Sinusoid, warn_of_coarse_grid
from cape_plugins.positions import Positions

SIDES = ("source", "target")
# A source of randomness, or what makes one when it is needed.
Generators = torch.Generator | Callable[[torch.device], torch.Generator | None] | None


class PositionEncoder(nn.Module):
    """Turns :class:`Positions` into the embedding that is added to the content.

    A caller hands over raw positions; what the settings say of them is done here: alpha, gamma,
    the unit of the host, mean-normalisation, augmentation. Drawing is separate from applying: the
    caller draws once per batch with :meth:`draw` and hands the result to every call that shares it
    (CAPE section 5.3: encoder and decoder). Evaluation is deterministic and consumes no random
    numbers.

    Args:
        config: Complete settings.
        encoding: Module built by the row of the encoding; None where nothing is added.
        side: "source" or "target"; alpha scales positions of the source only.
        start: Coordinate of position 0, in the unit of this encoder.
        unit: Distance that this encoder counts as 1, in the unit of the domain: hosts count frames,
            settings have seconds.
    """

    def __init__(
        self,
        config: PositionConfig,
        encoding: nn.Module | None,
        side: str = SIDES[0],
        start: float = 0.0,
        unit: float = 1.0,
    ) -> None:
        super().__init__()
        if side not in SIDES:
            raise ValueError(f"side={side!r} is unknown; allowed: {', '.join(SIDES)}.")
        if not 0 < unit < math.inf:
            raise ValueError(f"unit={unit} is not allowed; allowed: > 0, such as 0.04 seconds.")
        self.config = config
        self.encoding = encoding
        self.side, self.start, self.unit = side, start, unit
        self.alpha = 1.0 if encoding is None or side != SIDES[0] else config.alpha

    @property
    def draws(self) -> bool:
        """Whether a forward needs a draw now: in training, where the type is random, and in
        evaluation, where that is asked for."""
        return self.config.random and (self.training or self.config.random_evaluation)

    @property
    def max_local_shift(self) -> float:
        """Half-width of local shifts in grid steps; 0 where nothing is random."""
        return self.config.max_local_shift if self.config.random else 0.0

    def draw(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        generator: Generators = None,
        partner: Draw | None = None,
    ) -> Draw | None:
        """The random numbers of one training forward; None in evaluation, and where nothing is
        random (:attr:`draws`).

        Args:
            batch_size: B.
            device: Device of the positions.
            generator: Source of randomness, or a function of the device that makes it if anything
                is drawn; default the global one.
            partner: Draw of the other side, where sides draw for themselves: the samples that it
                leaves as they are stay so on this side, too.
        """
        if not self.draws:
            return None
        config = self.config
        return draw_global(
            batch_size,
            DOMAINS[config.domain].num_coords,
            max_global_shift=config.max_global_shift / self.unit,
            max_global_scale=config.max_global_scale,
            max_offset=config.max_offset,
            max_position=config.max_position,
            sampling=config.sampling,
            augment_probability=config.augment_probability,
            partner=partner,
            device=device,
            generator=_made(generator, device),
        )

    def span(self, valid: Tensor) -> Tensor:
        """How many positions the tokens of a side reach over, alpha included.

        Args:
            valid: ``[B, T]`` bool, False on padding.

        Returns:
            ``[B]`` int64, for :meth:`~cape_plugins.augmentation.Draw.covering`.
        """
        return self._reach((valid.sum(1) - 1).clamp(min=0) * self.alpha)

    def _reach(self, last: Tensor) -> Tensor:
        """Number of positions up to the one with the number `last`, whole or not."""
        return last.float().ceil().long() + 1

    def sampled(self, positions: Positions, draw: Draw) -> Tensor:
        """What a draw with an `order` makes of numbers of steps: ``[B, T, 1]`` float32.

        A sample takes as many entries of the order as it has positions, or as its draw covers;
        position i gets the i-th of them, the source alpha * i, linear between entries. Padding
        takes none.

        Raises:
            ValueError: for positions that are not counted, for more of them than the order has,
                and without a common count where source and target are synchronised.
        """
        if positions.in_steps:
            number = positions.elements(positions.rows)[..., 0]
        elif positions.first is not None and positions.index is not None:
            # frames of which some were skipped are the first, the second ... of those that are left
            number = positions.numbers.float()
        else:
            raise ValueError(
                f"position embedding {self.config.type!r} in training takes positions that are "
                "counted, not arbitrary coordinates; use token_positions or frame_positions, or "
                "another type."
            )
        number = times(number, self.alpha)
        self.check_length(number.shape[1])
        if draw.count is None and self.config.synchronize:
            raise ValueError(
                "synchronize=True: source and target need one number of positions; give both "
                "draw.covering(source_encoder.span(source_valid), target_encoder.span(target_valid"
                "))."
            )
        valid = positions.valid
        count = self._reach((number if valid is None else number * valid).amax(1))
        if draw.count is not None:
            count = torch.maximum(count, draw.count)
        sample = sorted_sample(draw.order, count.expand(draw.order.shape[0]))
        return positions_at(sample, number)[..., None]

    def check_length(self, length: int) -> None:
        """Refuses inputs of more positions than a draw has, by the padded length: the lengths of
        single samples are known to the device alone.

        Raises:
            ValueError: naming the length that is needed.
        """
        limit = self.config.max_position
        if self.alpha * (length - 1) > limit - 1:
            scaled = "" if self.alpha == 1 else f", times source_scale={self.config.source_scale}"
            needed = math.ceil(self.alpha * (length - 1)) + 1
            raise ValueError(
                f"max_position={limit} of position embedding {self.config.type!r} is too small for "
                f"an input of {length} positions{scaled}, in training; allowed: >= {needed}. Set a "
                "larger one, or leave out longer inputs."
            )

    def place(self, positions: Positions) -> tuple[Tensor, Tensor | float]:
        """Rows of raw positions ``[B or 1, T, D]`` and their step where this encoder has them:
        ``start + alpha * gamma * position / unit``. Local shifts and offsets, which are measured in
        steps, are not scaled by alpha."""
        step = self._in_units(positions.step, self.config.gamma)
        if positions.in_steps:  # one factor: frames at the hop of the host are whole numbers
            rows = times(positions.rows, self.alpha * step)
        else:
            rows = self._in_units(positions.rows, self.alpha * self.config.gamma)
        return (self.start + rows if self.start else rows), step

    def _in_units(self, value: Tensor | float, factor: float) -> Tensor | float:
        """``value * factor / unit``."""
        value = times(value, factor)
        return value if self.unit == 1.0 else value / self.unit

    def forward(
        self,
        positions: Positions,
        draw: Draw | None = None,
        local_shift: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        generator: Generators = None,
        random: bool | None = None,
    ) -> Tensor | None:
        """Embeddings of a batch of positions; arithmetic in float32, the result in `dtype`.

        Args:
            positions: B x T raw positions.
            draw: Random numbers from :meth:`draw`; required in training if the type draws at all.
            local_shift: ``[B, T, D]`` in the unit of this encoder, to inject; default drawn in
                training.
            dtype: Precision of the result.
            generator: Source of the local shift, as in :meth:`draw`.
            random: Whether a draw is required and local shifts are drawn; default in training. A
                `draw` or `local_shift` that is given moves positions in any case. False is for
                hosts that generate text with a model in training mode, where each step must see
                the same positions.

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
        if random is None:
            random = self.training or config.random_evaluation
        if random and config.random and draw is None:
            when = "in training" + " and evaluation" * config.random_evaluation
            remedy = "" if config.random_evaluation else "; call .eval() for inference"
            raise ValueError(
                f"position embedding {config.type!r} {when} needs a draw: pass "
                f"draw=encoder.draw(batch_size), the same one to source and target{remedy}."
            )
        if config.encoding.counts:
            return positions.gather(self.encoding.lookup(positions), dtype)
        local = self.max_local_shift if random and local_shift is None else 0.0
        moved = local or local_shift is not None or (draw is not None and draw.moves)
        if positions.regular and not (moved or config.mean_normalize):
            rows = self._shared(positions)
            if rows is not None:
                return positions.gather(rows, dtype)
        coords = self.coordinates(positions, draw, local_shift, generator, random)
        embedding = self.encoding(self._encodable(coords, positions))
        if (valid := positions.valid) is not None:
            # in place is several times faster on a CPU than masked_fill_; padding may become -0.0
            same = embedding.shape[0] == valid.shape[0] and not embedding.requires_grad
            embedding = embedding.mul_(valid[..., None]) if same else embedding * valid[..., None]
        return embedding.to(dtype)

    def _shared(self, positions: Positions) -> Tensor | None:
        """``[T, K]`` embeddings of regular positions as they are; None where samples differ."""
        step = self._in_units(positions.step, self.config.gamma)
        counted = positions.in_steps and positions.rows.shape[0] == 1 and type(step) is float
        if counted and isinstance(self.encoding, Sinusoid):
            first, step = positions.first, self.alpha * step
            rows = self.encoding.counted(positions.rows[0], first, self.start, step)
            return rows.clone() if positions.index is None else rows  # else gather copies them
        rows, _ = self.place(positions)
        if rows.shape[0] > 1:
            return None
        return self.encoding.grid(self._encodable(rows, positions)[0])

    def _encodable(self, coords: Tensor, positions: Positions) -> Tensor:
        """What the encoding takes: coordinates, or numbers of steps."""
        if not self.config.encoding.steps:
            return coords
        return (coords - self.start) / self._in_units(positions.step, self.config.gamma)

    def coordinates(
        self,
        positions: Positions,
        draw: Draw | None = None,
        local_shift: Tensor | None = None,
        generator: Generators = None,
        random: bool = False,
    ) -> Tensor:
        """The coordinates ``[B or 1, T, D]`` float32 that are encoded, augmented where there is a
        draw; see :meth:`forward` for the arguments."""
        mean_normalize = self.config.mean_normalize
        rows, step = self.place(positions)
        augmented = None if draw is None else draw.augmented
        if draw is None or draw.order is None:
            coords = positions.elements(rows)
        else:
            coords = self.start + times(self.sampled(positions, draw), step)
            if augmented is not None:  # the others as in evaluation, where skipped frames count
                coords = torch.where(augmented, coords, positions.elements(rows))
        local = self.max_local_shift if random and local_shift is None else 0.0
        if local:
            batch_size = _batch_size(coords, draw)
            local_shift = draw_local(
                coords, step, local, batch_size, _made(generator, coords.device), augmented
            )
        return augment(
            coords,
            positions.valid if mean_normalize else None,
            mean_normalize=mean_normalize,
            draw=draw,
            local_shift=local_shift,
            step=step,
        )


def build_position_encoder(
    config: PositionConfig,
    dim: int,
    *,
    side: str = SIDES[0],
    start: float = 0.0,
    unit: float = 1.0,
    frequencies: str | Frequencies | None = None,
    layout: str = "cos_sin_interleaved",
    table_size: int | tuple[int, ...] | None = None,
    table_std: float | None = None,
) -> PositionEncoder:
    """The position encoder of one side of a model.

    Args:
        config: Complete settings.
        dim: K.
        side: "source" or "target"; alpha scales positions of the source only.
        start: Coordinate of position 0, in multiples of `unit`.
        unit: Distance that the host counts as 1, in the unit of the domain: seconds of a frame.
        frequencies: Key of :data:`~cape_plugins.encodings.FREQUENCIES`, or such a function;
            default the domain's.
        layout: One of :data:`~cape_plugins.encodings.LAYOUTS`; default the paper's.
        table_size: Rows of a learned table; for a grid the size of the inputs, (height, width) in
            patches, of whatever type: sinusoids warn if it is too coarse for them. Default 1024, or
            the grid of the domain.
        table_std: Standard deviation of its initialisation; default ``dim ** -0.5``.

    Raises:
        ValueError: if `dim` does not fit the encoding, for an unknown side or a bad unit.
    """
    encoding, domain = None, DOMAINS[config.domain]
    if table_size is None:
        table_size = domain.table_size if domain.grid else 1024
    if config.encoding.build is not None:
        encoding = config.encoding.build(
            dim=dim,
            frequencies=frequencies or domain.frequencies,
            layout=layout,
            table_size=table_size,
            table_std=table_std,
            max_position=config.max_position,
        )
    if domain.grid and not isinstance(table_size, int) and isinstance(encoding, Sinusoid):
        warn_of_coarse_grid(encoding, table_size, domain.table_size, config.gamma)
    return PositionEncoder(config, encoding, side, start, unit)


def _made(generator: Generators, device: torch.device | str | None) -> torch.Generator | None:
    """The generator, made now if need be."""
    return generator(device) if callable(generator) else generator


def _batch_size(coords: Tensor, draw: Draw | None) -> int:
    """B, also where the samples share their coordinates but not their draws."""
    for part in draw or ():
        if part is not None:
            return part.shape[0] if isinstance(part, Tensor) else part
    return coords.shape[0]
