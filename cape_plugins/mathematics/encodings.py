"""Embeddings of coordinates: sinusoids of any domain.

A sinusoid is a frequency matrix W ``[D, K/2]`` and a layout of channels; text, audio, images and
videos differ only in W: ``phase = coords @ W``. Frequencies and cached rows are not in buffers:
``.half()`` would round a buffer, and loaders that materialise models from "meta" would lose it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cape_plugins.settings.domains import each_domain

Frequencies = Callable[[int, torch.device], Tensor]
_GOLDEN = (math.sqrt(5) - 1) / 2  # the multiples modulo 1 are spread evenly over [0, 1]


def text_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-2k/K) rad per token, k = 1 .. K/2 (CAPE Eq. 1)."""
    exponent = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device) * (2 / dim)
    return torch.pow(10000.0, -exponent)[None]


def audio_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 30 * 10000^(-2k/K) rad per second (CAPE section 3, sound)."""
    return 30.0 * text_frequencies(dim, device)


def image_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[2, K/2]``, pi 10^(2k/K) (cos k, sin k) for x and y, k = 1 .. K/2 (CAPE Eq. 3 and 4)."""
    k = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device)
    return math.pi * torch.pow(10.0, k * (2 / dim)) * torch.stack((k.cos(), k.sin()))


def video_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[3, K/2]`` for x, y and time, k = 1 .. K/2: vectors of the lengths of
    :func:`image_frequencies`, in directions that are spread over the sphere. Direction k is turned
    by k rad around the axis of time; heights along this axis are spread evenly. Frequencies in time
    are then halved, because a second has fewer frames than half a side has patches."""
    k = torch.arange(1, dim // 2 + 1, dtype=torch.float32, device=device)
    height = 2.0 * torch.frac(k * _GOLDEN) - 1.0
    radius = (1.0 - height.square()).sqrt()
    directions = torch.stack((radius * k.cos(), radius * k.sin(), 0.5 * height))
    return math.pi * torch.pow(10.0, k * (2 / dim)) * directions


def fairseq_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-k/(K/2 - 1)), k = 0 .. K/2 - 1: the formula of tensor2tensor, which
    fairseq and Speech2Text use. The order of operations is the same as in fairseq, so that results
    agree bit for bit."""
    half = dim // 2
    rate = math.log(10000) / (half - 1)
    return torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -rate)[None]


def marian_frequencies(dim: int, device: torch.device) -> Tensor:
    """``[1, K/2]``, 10000^(-2k/K), k = 0 .. K/2 - 1 (Vaswani et al.), in float64 as in Marian, to
    agree bit for bit; in float32 on devices without float64."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    return torch.pow(10000.0, exponent).reciprocal()[None]


FREQUENCIES: dict[str, Frequencies] = {
    "text": text_frequencies,
    "audio": audio_frequencies,
    "image": image_frequencies,
    "video": video_frequencies,
    "fairseq": fairseq_frequencies,
    "marian": marian_frequencies,
}
# Number of rows that an encoder caches. Without the cache, the 22 small operations of an embedding
# took up to 3 % of the time of a generation step, and each training step on long texts would
# compute the rows again.
KEPT_ROWS = 4096  # 8 MiB at 512 channels
# size of the cache for longer inputs, in each encoder of a model: 8192 rows of 512 channels
KEPT_BYTES = 2**24
# Frequencies and phases at 0 of all channels, by function, K, layout and device. Computing these
# two small tensors in each forward would take a dozen operations. These tensors are neither saved
# nor part of a module.
_FREQUENCIES_AND_PHASES: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
COMBINATIONS = ("add", "concat")
LAYOUTS = ("cos_sin_interleaved", "sin_cos_blocks")


class Sinusoid(nn.Module):
    """Sines and cosines of any coordinates (CAPE Eq. 1 and 3); owns no parameters or buffers.

    Args:
        dim: K, even and at least 4.
        frequencies: Key of :data:`FREQUENCIES`, or a function like the values there.
        layout: "cos_sin_interleaved" (the paper's equations: channel 2k cosine, 2k + 1 sine) or
            "sin_cos_blocks" (fairseq: all sines, then all cosines).

    Raises:
        ValueError: for an odd or too small `dim`, unknown frequencies or an unknown layout.
    """

    # key and rows; neither saved nor copied
    _kept_rows: tuple[object, Tensor | None] = (None, None)

    def __init__(
        self,
        dim: int,
        frequencies: str | Frequencies = "text",
        layout: str = "cos_sin_interleaved",
    ) -> None:
        super().__init__()
        if dim < 4 or dim % 2:
            raise ValueError(
                f"embedding dimension {dim} is not allowed for sinusoids; allowed: even, >= 4, "
                "because sines and cosines come in pairs. Change the model's embedding dimension."
            )
        for name, value, allowed in (
            ("frequencies", frequencies, FREQUENCIES),
            ("layout", layout, LAYOUTS),
        ):
            if not callable(value) and value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}.")
        self.dim = dim
        self.frequencies = frequencies
        self.interleaved = layout == "cos_sin_interleaved"

    def __getstate__(self) -> dict[str, Any]:
        """State without the cached rows, which copies and pickles compute again."""
        return {name: value for name, value in vars(self).items() if name != "_kept_rows"}

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.dim}, frequencies={self.frequencies!r}, interleaved={self.interleaved}"

    def weights(self, device: torch.device) -> Tensor:
        """Frequency matrix ``[D, K/2]``."""
        by_name = isinstance(self.frequencies, str)
        function = FREQUENCIES[self.frequencies] if by_name else self.frequencies
        return function(self.dim, device)

    def aliased(self, *sizes: int, gamma: float = 1.0, seconds: float | None = None) -> int:
        """Number of the K channels that alias on a grid. The phase of such a channel moves by more
        than pi from one cell to the next along some axis, so the channel appears to turn more
        slowly or backwards.

        Args:
            sizes: Cells along each axis, the slowest first, as for
                :func:`~cape_plugins.patch_positions`.
            gamma: Factor on the grid.
            seconds: Distance of neighbours along the slowest axis, if this axis is time.
        """
        # on the CPU, even if the model is built on "meta"; an axis of one cell has no neighbours
        distance = [2.0 * gamma / (size - 1) if size > 1 else 0.0 for size in sizes]
        if seconds is not None:
            distance[0] = gamma * seconds
        step = torch.tensor(distance[::-1], dtype=torch.float32, device="cpu")[:, None]
        weights, _ = self._frequencies_and_phases(step)
        return int((weights.abs() * step > math.pi).any(0).sum())

    def grid(self, grid: Tensor) -> Tensor:
        """Encodes few rows exactly, as sine and cosine of the same phases, like the tables of the
        stock models: text without augmentation equals fairseq's table bit for bit.

        Args:
            grid: ``[T, D]`` float32.

        Returns:
            ``[T, K]`` float32.
        """
        weights = self.weights(grid.device)
        phase = _phase(grid, weights)
        parts = phase.sin().float(), phase.cos().float()
        if self.interleaved:
            return torch.stack(parts[::-1], dim=-1).flatten(-2)
        return torch.cat(parts, dim=-1)

    def counted(
        self, numbers: Tensor, first: int | Tensor | None, start: float, step: float
    ) -> Tensor:
        """:meth:`grid` of ``start + numbers * step``. Rows of counted positions are cached, so a
        step of generation costs one look-up, as in stock models.

        Args:
            numbers: ``[T, 1]`` float32; ``first, first + 1, ...`` if `first` is not None.
            first: Number of the first row; None if rows are not counted.
            start: Coordinate of number 0.
            step: Distance of neighbours.

        Returns:
            ``[T, K]`` float32, cached rows, which the caller must not change.
        """
        if self._cacheable(numbers) and isinstance(first, int) and not _in_graph_capture(numbers):
            end = first + numbers.shape[0]
            # A long input caches as many rows as fit, because rows are small compared with the
            # states of a model; a single far position caches no rows.
            if end <= max(KEPT_ROWS, min(numbers.shape[0], KEPT_BYTES // (4 * self.dim))):
                return self._rows_up_to(end, start, step, numbers.device)[first:end]
        return self.grid(start + numbers * step)

    def _rows_up_to(self, end: int, start: float, step: float, device: torch.device) -> Tensor:
        """``[>= end, K]`` :meth:`grid` of ``start + i * step``, i = 0, 1, ...; kept for later
        calls."""
        kept_key, rows = self._kept_rows
        key = start, step, device
        if rows is None or key != kept_key or rows.shape[0] < end:
            # a second call with the same key may be a step of generation, which needs more rows in
            # each step, so the cache doubles; a single input gets as many rows as it has
            grown = min(KEPT_ROWS, max(64, 2 ** math.ceil(math.log2(end))))
            count = max(end, grown) if key == kept_key else end
            with torch.inference_mode(False):  # later calls may train
                number = torch.arange(count, dtype=torch.float32, device=device)
                rows = self.grid(start + number[:, None] * step)
            self._kept_rows = key, rows
        return rows

    def forward(self, coords: Tensor) -> Tensor:
        """Encodes many positions in one pass over memory, with cos(p) = sin(p + pi / 2).

        Args:
            coords: ``[B, T, D]`` float32.

        Returns:
            ``[B, T, K]`` float32; differs from :meth:`grid` by float32 rounding of the phase.
        """
        return _phase(coords, *self._frequencies_and_phases(coords)).sin_()

    def _cacheable(self, coords: Tensor) -> bool:
        """Whether results may be cached: traced programs and fake tensors have no values, and the
        caller's frequencies may be learned or change."""
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        is_fixed = type(self) is Sinusoid and isinstance(self.frequencies, str)
        return is_fixed and not is_traced and type(coords) is Tensor

    def _frequencies_and_phases(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        """Frequencies ``[D, K]`` and phases at 0 ``[K]`` of all channels, in float32, on the device
        of the coordinates."""
        if not self._cacheable(coords):
            return self._make_frequencies_and_phases(coords.device)
        key = FREQUENCIES[self.frequencies], self.dim, self.interleaved, coords.device
        if key not in _FREQUENCIES_AND_PHASES:
            with torch.inference_mode(False):  # later calls may train
                computed = self._make_frequencies_and_phases(coords.device)
            if _in_graph_capture(coords):
                return computed
            _FREQUENCIES_AND_PHASES[key] = computed
        return _FREQUENCIES_AND_PHASES[key]

    def _make_frequencies_and_phases(self, device: torch.device) -> tuple[Tensor, Tensor]:
        weights = self.weights(device).float()
        cosine = weights.new_full((self.dim // 2,), math.pi / 2)
        if self.interleaved:
            return weights.repeat_interleave(2, dim=1), F.pad(cosine[:, None], (0, 1)).flatten()
        return torch.cat((weights, weights), dim=1), F.pad(cosine, (self.dim // 2, 0))


def _in_graph_capture(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured. Memory of the graph has other values in each replay
    and must not be cached. Memory that the graph reads must not be freed, and cached rows are freed
    when more rows are needed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_of_coarse_grid(
    sinusoid: Sinusoid,
    size: Sequence[int],
    paper_size: Sequence[int],
    gamma: float,
    seconds: float | None = None,
) -> None:
    """Warns if more channels alias on a grid of this size than on the grid of the papers, on which
    12 to 16 % of the channels alias already.

    Args:
        sinusoid: The encoding of a model.
        size: Size of the model's inputs, the slowest axis first.
        paper_size: Size of the inputs in the papers.
        gamma: Factor on the grid of the model.
        seconds: Distance of neighbours along the slowest axis, if this axis is time.
    """
    if type(sinusoid.weights(torch.device("cpu"))) is not torch.Tensor:
        return  # a model of fake tensors, which have no values
    count = sinusoid.aliased(*size, gamma=gamma, seconds=seconds)
    paper_count = sinusoid.aliased(*paper_size, seconds=seconds)
    if count <= paper_count:
        return
    share, paper_share = (100 * number / sinusoid.dim for number in (count, paper_count))
    shape, paper_shape = (" x ".join(map(str, sides)) for sides in (size, paper_size))
    sides = list(zip(size, paper_size, strict=True))[seconds is not None :]
    largest_gamma = min((n - 1) / (m - 1) for n, m in sides if min(n, m) > 1)
    warnings.warn(
        f"{count} of {sinusoid.dim} channels ({share:.0f} %) of the position "
        f"embedding alias on a grid of {shape} patches (gamma={gamma:g}): their phase moves by "
        "more than pi from one patch to the next, so they do not show how far apart patches "
        f"are. On the papers' {paper_shape} patches {paper_share:.0f} % alias. Use smaller "
        f"patches or larger images, or gamma={math.floor(100 * largest_gamma) / 100:g} or less.",
        stacklevel=2,
    )


def _phase(coords: Tensor, weights: Tensor, offset: Tensor | None = None) -> Tensor:
    """``coords @ weights + offset`` element by element: autocast would round a matrix product to
    half precision, in which positions from 257 on are wrong."""
    columns = coords.unbind(-1)
    if len(columns) != len(weights):
        raise ValueError(
            f"positions have {len(columns)} coordinates, the frequencies are for {len(weights)}; "
            f"make positions and encoder for one domain ({each_domain('num_coords', named=True)})."
        )
    if offset is None:
        phase = columns[0][..., None] * weights[0]
    else:
        phase = torch.addcmul(offset, columns[0][..., None], weights[0])
    for dim in range(1, len(columns)):  # a slice of no rows would stay in exported programs
        phase.addcmul_(columns[dim][..., None], weights[dim])
    return phase


def combine(
    content: Tensor, embedding: Tensor | None, mode: str = "add", dim: int | None = None
) -> Tensor:
    """Combines content with position embeddings: adds them (Vaswani et al.), or concatenates them
    as more channels, as in the phone classifier of recipes/phones.

    Args:
        content: ``[B, T, C]``.
        embedding: ``[B or 1, T, K]`` of a :class:`PositionEncoder`; None for no positions.
        mode: One of :data:`COMBINATIONS`: "add" (K = C) or "concat".
        dim: K; needed by "concat" without an embedding. The K channels are zero then, so a model
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
    channels = content.shape[-1]
    if mode == "add" and width != channels:
        raise ValueError(
            f"mode='add': the embedding has {width} channels, the content {channels}; allowed: "
            f"equal numbers. Build the position encoder for {channels} channels, or take "
            "mode='concat'."
        )
    if dim not in (None, width):
        raise ValueError(
            f"dim={dim} differs from the {width} channels of the embedding; allowed: {width} or "
            f"None. Correct dim, or build the position encoder for {dim} channels."
        )
    if mode == "add":
        return content + embedding
    return torch.cat((content, embedding.expand(*content.shape[:-1], width)), dim=-1)
