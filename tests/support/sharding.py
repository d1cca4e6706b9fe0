"""A training step with FSDP2 in mixed precision, for the processes of tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def train_sharded(
    model: Any, inputs: Mapping[str, Tensor], device: str, ranks: int
) -> tuple[dict[str, Tensor], set[torch.dtype]]:
    """Two updates of a model in shards, with parameters in bfloat16.

    Returns:
        The whole state dict, and the types of the numbers that the encodings of positions got.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (ranks,))
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    seen = _positions_seen(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.isfinite()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return state, set(seen)


def _positions_seen(model: nn.Module) -> list[torch.dtype]:
    """Grows with each call of an encoding, whatever type the parameters are cast to."""
    seen: list[torch.dtype] = []

    def watched(method: Any) -> Any:
        def call(coords: Tensor) -> Any:
            seen.append(coords.dtype)
            return method(coords)

        return call

    for module in model.modules():
        encoding = getattr(getattr(module, "positions", None), "encoding", None)
        for name in ("forward", "grid"):
            if hasattr(encoding, name):
                setattr(encoding, name, watched(getattr(encoding, name)))
    return seen
