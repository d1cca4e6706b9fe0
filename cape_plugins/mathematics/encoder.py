"""The module that models call: augments positions, then encodes them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cape_plugins.mathematics.augmentation import (
    Draw,
    augment,
    draw_global,
    draw_local,
    positions_at,
    sorted_sample,
    times,
)
from cape_plugins.mathematics.encodings import Sinusoid
from cape_plugins.mathematics.positions import Positions
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.domains import DOMAINS
from cape_plugins.settings.options import OptionError

SIDES = ("source", "target")
# A source of randomness, or a function of the device that makes the source when a draw needs it.
Generators = torch.Generator | Callable[[torch.device], torch.Generator | None] | None


class PositionEncoder(nn.Module):
    """Turns :class:`Positions` into the embedding that is added to the content.

    A caller passes raw positions; this module applies the settings: alpha, gamma, the unit of
    the host, mean-normalisation, augmentation. Drawing is separate from applying: the caller draws
    once per batch with :meth:`draw`, and passes the draw to every call that shares it (CAPE section
    5.3: encoder and decoder). Evaluation is deterministic and consumes no random numbers.

    Args:
        config: Complete settings.
        encoding: Module built by the row of the encoding; None if nothing is added.
        side: "source" or "target"; alpha scales positions of the source only.
        start: Coordinate of position 0, in the unit of this encoder.
        unit: Distance that this encoder counts as 1, in the unit of the domain: models count
            frames, settings are in seconds.
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
        self.side, self.unit = side, unit
        # positions count from 0 where only distances count: large angles would be rounded
        self.start = 0.0 if config.encoding.in_attention else start
        self.alpha = 1.0 if encoding is None or side != SIDES[0] else config.alpha

    @property
    def draws(self) -> bool:
        """Whether a forward needs a draw now: a random type draws in training, and in evaluation
        with ``random_evaluation``."""
        return self.config.random and (self.training or self.config.random_evaluation)

    @property
    def max_local_shift(self) -> float:
        """Half-width of local shifts in grid steps; 0 if nothing is random."""
        return self.config.max_local_shift if self.config.random else 0.0

    def draw(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        generator: Generators = None,
        partner: Draw | None = None,
    ) -> Draw | None:
        """The random numbers of one training forward; None in evaluation, and if nothing is random
        (:attr:`draws`).

        Args:
            batch_size: B.
            device: Device of the positions.
            generator: Source of randomness, or a function of the device that makes the source if
                anything is drawn; default the global source.
            partner: Draw of the other side, if the two sides draw separately. Samples that
                `partner` does not augment are not augmented here either.
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
            generator=_resolve(generator, device),
        )

    def num_positions(self, valid: Tensor) -> Tensor:
        """Number of positions that the tokens of a side need, including alpha.

        Args:
            valid: ``[B, T]`` bool, False on padding.

        Returns:
            ``[B]`` int64, for :meth:`~cape_plugins.Draw.covering`.
        """
        return self._positions_up_to((valid.sum(1) - 1).clamp(min=0) * self.alpha)

    def _positions_up_to(self, last: Tensor) -> Tensor:
        """Number of positions up to position number `last`, whole or not."""
        return last.float().ceil().long() + 1

    def sampled(self, positions: Positions, draw: Draw) -> Tensor:
        """Positions that a draw with an `order` gives, in steps: ``[B, T, 1]`` float32.

        A sample takes one entry of the order for each position, or as many entries as the draw
        covers. Position i gets entry i, on the source side entry alpha * i, linear between entries.
        Padding takes no entry.

        Raises:
            ValueError: for positions that are not counted, for more positions than entries of the
                order, and without a common count if source and target are synchronised.
        """
        number = positions.counts
        if number is None:
            raise ValueError(
                f"position embedding {self.config.type!r} in training takes positions that are "
                "counted, not arbitrary coordinates; use token_positions or frame_positions, or "
                "another type."
            )
        number = times(number, self.alpha)
        self.check_length(number.shape[1])
        if draw.count is None and self.config.synchronize:
            raise ValueError(
                "synchronize=True: source and target need the same number of positions; give "
                "both draw.covering(source_encoder.num_positions(source_valid), "
                "target_encoder.num_positions(target_valid))."
            )
        valid = positions.valid
        count = self._positions_up_to((number if valid is None else number * valid).amax(1))
        if draw.count is not None:
            count = torch.maximum(count, draw.count)
        sample = sorted_sample(draw.order, count.expand(draw.order.shape[0]))
        return positions_at(sample, number)[..., None]

    def check_length(self, length: int) -> None:
        """Refuses inputs with more positions than a draw has. Compares the padded length, because
        only the device knows the lengths of single samples.

        Raises:
            ValueError: names the length that is needed.
        """
        limit = self.config.max_position
        if self.alpha * (length - 1) > limit - 1:
            scaled = (
                "" if self.alpha == 1 else f", times the source scale {self.config.source_scale}"
            )
            needed = math.ceil(self.alpha * (length - 1)) + 1
            raise OptionError(
                "max_position",
                limit,
                f"of position embedding {self.config.type!r} is too small for an input of {length} "
                f"positions{scaled}, in training",
                allowed=f">= {needed}",
                remedy="Set a larger one, or leave out longer inputs.",
            )

    def step(self, positions: Positions) -> Tensor | float:
        """Distance between neighbours, ``gamma * step / unit``: a number, or a tensor that
        broadcasts to the rows. Local shifts and offsets are measured in this step, so alpha does
        not scale shifts and offsets."""
        return self._in_units(positions.step, self.config.gamma)

    def rows_and_step(self, positions: Positions) -> tuple[Tensor, Tensor | float]:
        """Coordinates of the raw rows, ``[B or 1, T, D]``, in the unit of this encoder, ``start +
        alpha * gamma * position / unit``, and the :meth:`step` of the rows."""
        step = self.step(positions)
        if positions.patches is not None and self.config.encoding.in_attention:
            positions = positions.at_centres()
        # One factor, step / unit: frames at the hop that the host counts as 1 become whole numbers,
        # as in the stock model. Seconds divided by the unit would be rounded.
        if positions.in_steps:
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
            local_shift: ``[B, T, D]`` in the unit of this encoder, such as the local shift of
                another call. By default drawn in training.
            dtype: Precision of the result.
            generator: Source of the local shift, as in :meth:`draw`.
            random: Whether a draw is required and local shifts are drawn; default in training. A
                `draw` or `local_shift` that the caller passes always moves positions. Hosts that
                generate text with a model in training mode give False, because each step must see
                the same positions.

        Returns:
            ``[B, T, K]`` (``[1, T, K]`` if the batch shares all positions), zero on padding; None
            if the type adds nothing.

        Raises:
            ValueError: in training without a draw, because two independent draws would silently
                break the synchronisation of source and target.
        """
        if self.encoding is None:
            return None
        config = self.config
        if random is None:
            random = self.training or config.random_evaluation
        if random and config.random and draw is None:
            self.refuse_missing_draw()
        if config.encoding.counts:
            return positions.gather(self.encoding.lookup(positions), dtype)
        if positions.shared and not self._moves(draw, local_shift, random):
            return positions.gather(self._embed_shared(positions), dtype)
        coords = self.coordinates(positions, draw, local_shift, generator, random)
        embedding = self.encoding(self._encoding_input(coords, positions))
        return positions.clear_padding(embedding).to(dtype)

    def refuse_missing_draw(self) -> None:
        """Raises the ValueError of a forward that needs a draw."""
        in_evaluation = self.config.random_evaluation
        when = "in training and evaluation" if in_evaluation else "in training"
        remedy = "" if in_evaluation else "; call .eval() for inference"
        raise ValueError(
            f"position embedding {self.config.type!r} {when} needs a draw: pass "
            f"draw=encoder.draw(batch_size), the same one to source and target{remedy}."
        )

    def _moves(self, draw: Draw | None, local_shift: Tensor | None, random: bool) -> bool:
        """Whether a draw, a local shift or the mean changes what :meth:`rows_and_step` gives."""
        if local_shift is not None or (random and self.max_local_shift):
            return True
        return self.config.mean_normalize or (draw is not None and draw.moves)

    def _embed_shared(self, positions: Positions) -> Tensor:
        """Embeddings ``[T, K]`` of rows that the batch shares, without augmentation."""
        step = self.step(positions)
        if isinstance(self.encoding, Sinusoid) and positions.in_steps and type(step) is float:
            numbers, first = positions.rows[0], positions.first
            rows = self.encoding.counted(numbers, first, self.start, self.alpha * step)
            # without padding, gather would return a view of the cached rows, which a caller may
            # change
            is_cached = positions.valid is None and positions.row_of is None
            return rows.clone() if is_cached else rows
        rows, _ = self.rows_and_step(positions)
        return self.encoding.grid(self._encoding_input(rows, positions)[0])

    def _encoding_input(self, coords: Tensor, positions: Positions) -> Tensor:
        """Input of the encoding: coordinates, or numbers of steps."""
        if not self.config.encoding.steps:
            return coords
        return (coords - self.start) / self.step(positions)

    def coordinates(
        self,
        positions: Positions,
        draw: Draw | None = None,
        local_shift: Tensor | None = None,
        generator: Generators = None,
        random: bool = False,
    ) -> Tensor:
        """The coordinates ``[B or 1, T, D]`` float32 that are encoded, augmented if there is a
        draw; see :meth:`forward` for the arguments."""
        mean_normalize = self.config.mean_normalize
        rows, step = self.rows_and_step(positions)
        augmented = None if draw is None else draw.augmented
        if draw is None or draw.order is None:
            coords = positions.elements(rows)
        else:
            coords = self.start + times(self.sampled(positions, draw), step)
            # samples that are not augmented have the positions of evaluation, in which skipped
            # frames leave gaps
            if augmented is not None:
                coords = torch.where(augmented, coords, positions.elements(rows))
        max_shift = self.max_local_shift if random and local_shift is None else 0.0
        if max_shift:
            batch_size = _batch_size(coords, draw)
            local_shift = draw_local(
                coords, step, max_shift, batch_size, _resolve(generator, coords.device), augmented
            )
        return augment(
            coords,
            positions.valid if mean_normalize else None,
            mean_normalize=mean_normalize,
            draw=draw,
            local_shift=local_shift,
            step=step,
        )


def _resolve(generator: Generators, device: torch.device | str | None) -> torch.Generator | None:
    """The generator; a function that makes the generator is called."""
    return generator(device) if callable(generator) else generator


def _batch_size(coords: Tensor, draw: Draw | None) -> int:
    """B, even if the samples share their coordinates but not their draws."""
    for part in draw or ():
        if part is not None:
            return part.shape[0] if isinstance(part, Tensor) else part
    return coords.shape[0]
