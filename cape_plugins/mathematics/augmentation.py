"""Augmentation of positions in training, with separate functions for drawing and applying (CAPE Eq.
5 to 7).

A :class:`Draw` holds what encoder and decoder of a sample share: global shift, global scale,
SHAPE's offset, and the order in which random positions are taken. The local shift is different for
each position, and is drawn when it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """Random numbers that the samples of a batch share between encoder and decoder.

    Attributes:
        shift: ``[B, 1, D]`` float32, added to every position of a sample; None for no shift.
        scale: ``[B, 1, 1]`` float32, multiplies the shifted positions; None for no scale.
        offset: ``[B, 1, D]`` float32 holding integers, a shift in grid steps; None for no offset.
        batch_size: B. Local shifts need this number if the samples share their coordinates.
        order: ``[B, L]`` float32, random positions from 0 to L: a sample with n positions takes the
            first n, sorted; None if positions are counted.
        count: ``[B]``, least number of entries of `order` that source and target take, so that a
            number has the same position on both sides. None if each side takes as many entries as
            it has positions.
        chance: ``[B, 1, 1]`` float32, from U(0, 1) in augmented samples. 1 in all other samples,
            in which shift, scale, offset and order have no effect. None if all samples are
            augmented.
    """

    shift: Tensor | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    batch_size: int | None = None
    order: Tensor | None = None
    count: Tensor | None = None
    chance: Tensor | None = None

    @property
    def augmented(self) -> Tensor | None:
        """``[B, 1, 1]`` bool, True for augmented samples; None if all samples are augmented."""
        return None if self.chance is None else self.chance < 1.0

    @property
    def moves(self) -> bool:
        """Whether the draw has a shift, scale, offset or order."""
        parts = (self.shift, self.scale, self.offset, self.order)
        return any(part is not None for part in parts)

    def covering(self, *counts: Tensor) -> Draw:
        """The same draw for sides with these numbers of positions, each ``[B]``, from
        :meth:`~cape_plugins.PositionEncoder.num_positions`; both sides use the largest number."""
        if self.order is None:
            return self
        count = self.count
        for other in counts:
            count = other if count is None else torch.maximum(count, other)
        return self._replace(count=count)

    def restricted_to(self, augmented: Tensor, chance: Tensor) -> Draw:
        """Returns a draw that has the same numbers where `augmented`, bool ``[B, 1, 1]``, is True,
        and numbers without effect elsewhere. `chance` ``[B, 1, 1]``, from U(0, 1), is stored for
        augmented samples."""
        identity_order = 0.0
        if self.order is not None:
            identity_order = torch.arange(self.order.shape[-1], device=self.order.device).float()
        return self._replace(
            shift=_where(augmented, self.shift, 0.0),
            scale=_where(augmented, self.scale, 1.0),
            offset=_where(augmented, self.offset, 0.0),
            order=_where(augmented[:, 0], self.order, identity_order),
            chance=_where(augmented, chance, 1.0),
        )


def draw_global(
    batch_size: int,
    num_coords: int = 1,
    *,
    max_global_shift: float = 0.0,
    max_global_scale: float = 1.0,
    max_offset: int = 0,
    max_position: int = 0,
    sampling: str = "",
    augment_probability: float = 1.0,
    partner: Draw | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> Draw:
    """Draws the numbers that all positions of a sample share. A maximum without effect, such as a
    shift of 0, consumes no random numbers.

    Args:
        batch_size: B.
        num_coords: D; the axes of an image shift independently.
        max_global_shift: Half-width of the uniform shift (Eq. 5), in the unit of the positions.
        max_global_scale: Largest scale; log scale is uniform and symmetric (Eq. 7). All axes have
            the same scale (Appendix A).
        max_offset: Largest integer offset, inclusive, in grid steps (SHAPE).
        max_position: L, number of positions among which a sample takes its positions, in grid
            steps.
        sampling: Way to take positions, a key of :data:`SAMPLINGS`; "" to take none.
        augment_probability: Probability that a sample is augmented. The chance is drawn last, so
            augmented samples get the same numbers as with probability 1.
        partner: Draw of the other side. The chances of `partner` are used again, so both sides
            augment the same samples; if the probabilities differ, the samples of one side include
            the samples of the other.
        device: Device of the positions.
        generator: Source of randomness; default the global one.

    Raises:
        ValueError: for an unknown way of sampling, or a scale below 1.
    """
    if sampling and sampling not in SAMPLINGS:
        names = ", ".join(map(repr, SAMPLINGS))
        raise ValueError(f"sampling={sampling!r} is not allowed; allowed: {names}, or '' for none.")
    if max_global_scale < 1.0:
        raise ValueError(
            f"max_global_scale={max_global_scale} is not allowed; allowed: >= 1; 1 is no scale."
        )
    shift = scale = offset = None
    if max_global_shift:
        shift = _uniform((batch_size, 1, num_coords), max_global_shift, device, generator)
    if max_offset:
        shape = (batch_size, 1, num_coords)
        offset = torch.randint(
            max_offset + 1, shape, device=device, **_generator_kwargs(generator)
        ).float()
    if max_global_scale != 1.0:
        scale = _uniform((batch_size, 1, 1), math.log(max_global_scale), device, generator).exp()
    order = None
    if sampling and max_position:
        # L positions are drawn, and a sample takes the first n later. Only the device knows n, and
        # a training step must not wait for the device.
        uniform = _unit((batch_size, max_position), device, generator)
        order = SAMPLINGS[sampling](uniform)
    draw = Draw(shift, scale, offset, batch_size, order)
    chance = None if partner is None else partner.chance
    # Drawn last, and not drawn at probability 1, so the other numbers do not depend on the
    # probability.
    if chance is None and augment_probability < 1.0:
        chance = _unit((batch_size, 1, 1), device, generator)
    return draw if chance is None else draw.restricted_to(chance < augment_probability, chance)


def _random_subset(unit: Tensor) -> Tensor:
    """``[B, L]``, 0 .. L - 1 in a random order. The first n numbers are a random subset of size n,
    and all subsets of this size are equally likely (Ruoss et al., section 3)."""
    return unit.argsort(dim=-1).float()


def _uniform_positions(unit: Tensor) -> Tensor:
    """``[B, L]``, independent numbers from U(0, L) (random float sampling)."""
    return unit * unit.shape[-1]


# Maps the name of a sampling to the function that makes an order from uniform numbers ``[B, L]``.
SAMPLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "subset": _random_subset,
    "uniform": _uniform_positions,
}


def sorted_sample(order: Tensor, count: Tensor) -> Tensor:
    """The first entries of each row in ascending order.

    Args:
        order: ``[..., L]`` from a :class:`Draw`.
        count: ``[...]``, number of entries to take.

    Returns:
        ``[..., L]`` float32; all entries after the first `count` are L, larger than any position.
    """
    length = order.shape[-1]
    is_beyond = torch.arange(length, device=order.device) >= count[..., None]
    return order.masked_fill(is_beyond, length).sort(dim=-1).values


def positions_at(sample: Tensor, number: Tensor) -> Tensor:
    """Positions by their numbers. A number that is not whole, such as alpha times an index, gets a
    position between the neighbours, by linear interpolation.

    Args:
        sample: ``[B, L]`` from :func:`sorted_sample`.
        number: ``[B or 1, T]`` from 0 on, whole or not.

    Returns:
        ``[B, T]`` float32.
    """
    number = number.expand(sample.shape[0], -1)
    low, last = number.floor(), sample.shape[-1] - 1
    below = sample.gather(1, low.long().clamp(max=last))
    above = sample.gather(1, (low.long() + 1).clamp(max=last))
    return below + (number - low) * (above - below)


def draw_local(
    coords: Tensor,
    step: Tensor | float,
    max_local_shift: float,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    augmented: Tensor | None = None,
) -> Tensor:
    """Independent shifts of single positions (Eq. 6), in the unit of the positions.

    Args:
        coords: ``[B or 1, T, D]``.
        step: Grid step, see :class:`~cape_plugins.Positions`.
        max_local_shift: Half-width in grid steps.
        batch_size: B, if the batch shares `coords`.
        generator: Source of randomness; default the global one.
        augmented: ``[B, 1 or T, 1]`` bool, :attr:`Draw.augmented`; False marks positions that are
            not shifted. None to shift all.

    Returns:
        ``[B, T, D]`` float32.
    """
    batch = coords.shape[0] if batch_size is None else batch_size
    shape = (batch, *coords.shape[1:])
    shift = times(_uniform(shape, max_local_shift, coords.device, generator), step)
    return shift if augmented is None else torch.where(augmented, shift, 0.0)


def rank_seed(rank: int) -> int:
    """A seed that differs between data-parallel ranks, made from the next number of a random stream
    that the ranks share.

    fairseq and transformers seed all ranks alike, so all ranks would draw the same positions. A
    number drawn from the shared stream on the CPU makes resumed training bit-exact, differs between
    micro-batches, costs no device synchronisation and does not change the dropout stream of a GPU.
    The rank is multiplied by 2^64 divided by the golden ratio, so that seeds of neighbouring ranks
    are far apart.
    """
    # on the CPU, also if the default device is a GPU, which would make the program wait
    common = int(torch.randint(2**31 - 1, (), device="cpu").numpy())
    return (common + rank * 0x9E3779B97F4A7C15) % 2**63


def rank_generator(device: torch.device | str, rank: int) -> torch.Generator:
    """A generator that begins at :func:`rank_seed`."""
    return torch.Generator(device=device).manual_seed(rank_seed(rank))


def augment(
    coords: Tensor,
    valid: Tensor | None = None,
    *,
    mean_normalize: bool = False,
    draw: Draw | None = None,
    local_shift: Tensor | None = None,
    step: Tensor | float = 1.0,
) -> Tensor:
    """``(coords - mean + shift + offset * step + local shift) * scale`` (CAPE Appendix A).

    The scale comes last and multiplies the shifts too. The mean is taken over valid positions.

    Args:
        coords: ``[B or 1, T, D]`` float32.
        valid: ``[B, T]`` bool, False on padding; None if nothing is padded.
        mean_normalize: Subtract the mean position, in evaluation as well.
        draw: Random numbers that the positions of a sample share; None for no augmentation.
        local_shift: ``[B, T, D]`` in the unit of `coords`; None for no local shift.
        step: Grid step, see :class:`~cape_plugins.Positions`.

    Returns:
        ``[B, T, D]`` float32, the positions to encode.
    """
    if mean_normalize:
        coords = coords - _mean(coords, valid)
    shift, scale, offset = (draw or Draw())[:3]
    parts = {"shift": shift, "scale": scale, "offset": offset, "local_shift": local_shift}
    for name, part in parts.items():
        _check_shape(name, part, coords)
    # The order of operations is fixed, so that a seed always gives the same positions: torch.lerp
    # or addcmul would save operations, but round differently.
    for term in (shift, None if offset is None else times(offset, step), local_shift):
        if term is not None:
            coords = coords + term
    return coords if scale is None else coords * scale


def times(value: Tensor, factor: Tensor | float) -> Tensor:
    """``value * factor``; `value` itself if the factor is the number 1. On a GPU a small operation
    costs about as much as a large operation, so each operation that is left out saves time."""
    return value if type(factor) is float and factor == 1.0 else value * factor


def _mean(coords: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return coords.mean(1, keepdim=True)
    valid = valid[..., None]
    # clamp: a sample without any valid position (a dummy row) keeps its coordinates; 0 / 0 is NaN
    return (coords * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)


def _uniform(
    shape: tuple[int, ...],
    half_width: float,
    device: torch.device | str | None,
    generator: torch.Generator | None,
) -> Tensor:
    """U(-half_width, half_width) in float32."""
    return times(_unit(shape, device, generator), 2.0 * half_width) - half_width


def _unit(
    shape: tuple[int, ...], device: torch.device | str | None, generator: torch.Generator | None
) -> Tensor:
    """U(0, 1) in float32, whatever torch's default dtype is: bfloat16 would draw from only 256
    values."""
    return torch.rand(shape, device=device, dtype=torch.float32, **_generator_kwargs(generator))


def _where(condition: Tensor, part: Tensor | None, neutral: Tensor | float) -> Tensor | None:
    """`part` of a draw where the condition holds, `neutral` elsewhere; None if `part` is None."""
    return None if part is None else torch.where(condition, part, neutral)


def _check_shape(name: str, part: Tensor | None, coords: Tensor) -> None:
    if part is None:
        return
    samples, length, num_coords = coords.shape
    same_batch = samples == 1 or part.shape[0] in (1, samples)
    if not same_batch or part.shape[1] not in (1, length) or part.shape[2] not in (1, num_coords):
        raise ValueError(
            f"{name} of the draw has shape {tuple(part.shape)}, the positions have shape "
            f"{tuple(coords.shape)}; draw for the same batch size, length and number of "
            "coordinates."
        )


def _generator_kwargs(generator: torch.Generator | None) -> dict[str, torch.Generator]:
    """Keyword arguments for torch; torch.compile with dynamic shapes refuses ``generator=None``."""
    return {} if generator is None else {"generator": generator}
