"""What one forward of a model knows, for the seams below the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cape_plugins import Draw, PositionEncoder
from cape_plugins.mathematics.binding import Bound
from hf_models.host import find_cache, is_generation_step
from hf_models.switching.modeling import process_generator


class Scope:
    """The arguments and the draws of one forward, bound to each seam below the model while the
    stock forward runs.

    A model inside a model opens a scope with its arguments inside the outer scope. Both share the
    draws, so the sides of a model see the same ones. The outermost model decides whether anything
    is drawn: a part that a generating model calls draws nothing.

    Args:
        names: Names of the arguments that the stock forward takes.
        call: Arguments of this call as the caller gave them, by name.
        outer: Scope of the model around this model; None for the outermost model.
        draw: Random numbers of the caller, which all seams take; None to draw.

    Attributes:
        draws: Whether seams may draw. A step of generation draws nothing, unless the settings ask
            for random evaluation.
        for_layers: What the layers of a stack need, by a key of the stack.
        moved: What a seam has moved, by a key of the seam: stock models may ask for the same
            positions more than once, and must get the same answer. Each model inside a model has
            other arguments, and so its separate positions.
    """

    def __init__(
        self,
        names: Sequence[str],
        call: dict[str, Any],
        outer: Scope | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.names, self.call, self.outer = names, call, outer
        self.draws = not is_generation_step(call) if outer is None else outer.draws
        self.injected = draw if draw is not None or outer is None else outer.injected
        self.drawn: dict[str, Draw | None] = {} if outer is None else outer.drawn
        self.for_layers: dict[str, Any] = {} if outer is None else outer.for_layers
        self.moved: dict[Any, Any] = {}

    def argument(self, name: str) -> Any:
        """An argument of the innermost model whose stock forward takes the name; None if the
        argument is not given, or no forward takes it."""
        if name in self.names or name in self.call or self.outer is None:
            return self.call.get(name)
        return self.outer.argument(name)

    def mask(self, batch_size: int, length: int, prefix: str = "") -> Tensor | None:
        """``[B, T]`` bool, False on padding; None where the mask has another form, as masks of
        scores and of other inputs have.

        Args:
            batch_size: B.
            length: T, the last tokens of the mask.
            prefix: Beginning of the name of the mask, such as "decoder_".
        """
        mask = self.argument(f"{prefix}attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < length:
            return None
        return mask[:, -length:].bool() if mask.shape[0] == batch_size else None

    def size(self, *names: str) -> tuple[int, ...] | None:
        """Shape of the first tensor among the arguments with these names, such as "pixel_values";
        None if none is given."""
        given_tensors = (self.argument(name) for name in names)
        return next((tuple(t.shape) for t in given_tensors if isinstance(t, Tensor)), None)

    @property
    def packed(self) -> bool:
        """Whether the caller's `position_ids` may mark borders of packed texts, as in transformers:
        without a mask and without a cache."""
        positions = self.argument("position_ids")
        if positions is None or self.argument("attention_mask") is not None:
            return False
        return find_cache(*self.call.values()) is None

    def draw(self, encoder: PositionEncoder, batch_size: int, device: torch.device) -> Draw | None:
        """The random numbers of an encoder of positions: the caller's, or one draw for each domain
        and forward. None in evaluation, and if nothing is random."""
        if self.injected is not None:
            return self.injected
        if not (self.draws or encoder.config.random_evaluation):
            return None
        domain = encoder.config.domain
        if self.drawn.get(domain) is None:
            self.drawn[domain] = encoder.draw(batch_size, device, process_generator)
        return self.drawn[domain]


class OpenScope:
    """Binds a scope to several seams, for the body of a ``with`` statement only."""

    def __init__(self, seams: Sequence[Bound], scope: Scope) -> None:
        self.bindings = [seam.using(scope) for seam in seams]

    def __enter__(self) -> None:
        for binding in self.bindings:
            binding.__enter__()

    def __exit__(self, *error: object) -> None:
        for binding in reversed(self.bindings):
            binding.__exit__(*error)
