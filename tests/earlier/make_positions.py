"""Writes the positions that training encodes, augmented with fixed seeds.

Run at the commit whose positions are wanted, as make.py says:

    cd OLD && python -m tests.earlier.make_positions

and copy positions.safetensors back. What is there now was written at commit be8eaf3, which had no
augment_probability, by torch 2.13.0 on a CPU. Padding is 0. The functions below call the core as it
was then: alpha and the first coordinate were arguments of the positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cape_plugins import (
    PositionConfig,
    PositionEncoder,
    Positions,
    build_position_encoder,
    frame_positions,
    patch_positions,
    token_positions,
)

FILE = Path("tests/earlier/positions.safetensors")
BATCH, DIM, SEED = 3, 8, 16
SOURCE, TARGET = (7, 5, 1), (4, 6, 2)  # tokens of each sample
START = 2.0  # of tokens, as in fairseq
FRAMES, HOPS, FIRST_FRAME = (6, 4, 1), (0.03, 0.02, 0.04), 0.0125
GRID = (2, 3)
SCALED = {"max_global_scale": 1.3}  # by default text is not scaled
# Name to type, domain and options.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "shape-text": ("shape", "text", {"source_scale": "11/10"}),
    "shape-text-synchronized": ("shape", "text", {"source_scale": "11/10", "synchronize": True}),
    "cape-text": ("cape", "text", {"source_scale": "11/10", **SCALED}),
    "cape-text-apart": ("cape", "text", {"source_scale": "11/10", "synchronize": False, **SCALED}),
    "shape-audio": ("shape", "audio", {}),
    "cape-audio": ("cape", "audio", {}),
    "cape-audio-one-hop": ("cape", "audio", {"mean_normalize": False}),
    "shape-image": ("shape", "image", {}),
    "cape-image": ("cape", "image", {}),
}


def configure(name: str, **more: Any) -> PositionConfig:
    """The settings of a case."""
    type_name, domain, options = CASES[name]
    architecture = "seq2seq" if domain == "text" else "encoder"
    return PositionConfig(type_name, domain, architecture, **options, **more)


def mask(lengths: tuple[int, ...]) -> Tensor:
    """``[B, T]`` bool, False on padding."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def hops(name: str) -> Tensor | float:
    """Seconds per frame: one for all, or one for each sample."""
    return HOPS[0] if name.endswith("one-hop") else torch.tensor(HOPS)


class Readout(nn.Module):
    """Stands for an encoding and returns the coordinates."""

    def forward(self, coords: Tensor) -> Tensor:
        """Returns a copy, because padding is overwritten."""
        return coords.clone()

    grid = forward


def make_encoder(name: str) -> PositionEncoder:
    """In training mode, as modules are born."""
    encoder = build_position_encoder(configure(name), DIM)
    encoder.encoding = Readout()
    return encoder


def sides(name: str) -> list[Positions]:
    """Raw positions of a batch: of source and target, of frames or of patches."""
    domain = CASES[name][1]
    if domain == "text":
        alpha = configure(name).alpha
        return [
            token_positions(mask(SOURCE), alpha, START),
            token_positions(mask(TARGET), 1.0, START),
        ]
    if domain == "audio":
        return [frame_positions(torch.tensor(FRAMES), hops(name), FIRST_FRAME)]
    return [patch_positions(*GRID)]


def main() -> None:
    stored = {}
    for name in CASES:
        encoder, raw = make_encoder(name), sides(name)
        torch.manual_seed(SEED)
        draws = [encoder.draw(BATCH)]
        if len(raw) == 2:
            draws.append(draws[0] if encoder.config.synchronize else encoder.draw(BATCH))
        for side, positions, draw in zip(("source", "target"), raw, draws, strict=False):
            stored[f"{name}/{side}"] = encoder(positions, draw)
        stored[f"{name}/next"] = torch.rand(2)  # shows how many numbers were drawn
    save_file(stored, FILE)


if __name__ == "__main__":
    main()
