"""The kinds of seams of generated families, by their keys in rows of data."""

from __future__ import annotations

from hf_models.seams.base import Seam
from hf_models.seams.detection import DetectionPositions
from hf_models.seams.grids import PatchGrid
from hf_models.seams.optional_grids import OptionalTable
from hf_models.seams.packed_grids import PackedTable
from hf_models.seams.patch_angles import PatchAngles
from hf_models.seams.rotary import RotaryAngles
from hf_models.seams.rows import RowTable
from hf_models.seams.sinusoids import SinusoidTable
from hf_models.seams.spectrograms import SpectrogramTable
from hf_models.seams.video import VideoPositions
from hf_models.seams.video_angles import VideoAngles

SEAMS: dict[str, type[Seam]] = {
    "angles": RotaryAngles,
    "rows": RowTable,
    "sinusoids": SinusoidTable,
    "grid": PatchGrid,
    "optional grid": OptionalTable,
    "packed grid": PackedTable,
    "detection": DetectionPositions,
    "spectrogram": SpectrogramTable,
    "patch angles": PatchAngles,
    "video": VideoPositions,
    "video angles": VideoAngles,
}
