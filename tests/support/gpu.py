"""What the tests of tests/gpu share: the device, the same random numbers on each device, and probes
of memory and of waiting.

``CAPE_TEST_DEVICE=cpu`` runs these tests on a CPU. This shows that the tests work, not that the
package works on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# before CUDA begins: products of matrices that are the same in each run
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.measure import peak_allocated
from tests.support.operations import operations

DEVICE = torch.device(os.environ.get("CAPE_TEST_DEVICE", "cuda"))
ON_GPU = DEVICE.type == "cuda"
MISSING = ON_GPU and not torch.cuda.is_available()
REASON = "needs a GPU: torch sees none"
# older compilers of torch do not follow properties of named tuples
WHOLE_GRAPH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def moved(value: Any, device: torch.device | str = DEVICE, dtype: torch.dtype | None = None) -> Any:
    """Tensors in containers on another device; numbers that are not whole in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, Mapping):
        return {name: moved(part, device, dtype) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device, dtype) for part in value)
    return value


class SameNumbers(TorchFunctionMode):
    """Draws all random numbers on the CPU and moves them, so that a step on the GPU has the random
    numbers of the step on the CPU. Dropout draws inside its kernel and is not seen."""

    DRAWING = ("rand", "randn", "randint", "randperm", "rand_like", "randn_like")

    def __init__(self) -> None:
        super().__init__()
        # of a generator on the GPU: one on the CPU that begins at the same seed
        self.twins: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") not in self.DRAWING:
            return function(*args, **kwargs)
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], Tensor):
            device, args = device or args[0].device, (args[0].cpu(), *args[1:])
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != "cpu":
            twin = torch.Generator().manual_seed(generator.initial_seed())
            _, kwargs["generator"] = self.twins.setdefault(id(generator), (generator, twin))
        return function(*args, **kwargs, device="cpu").to(device or "cpu")


def close(actual: Tensor, expected: Tensor, share: float, name: str = "") -> None:
    """Fails if a difference is larger than a share of the largest number that is expected."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, name
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    difference, largest = ((actual - expected).abs().max(), expected.abs().max())
    assert difference <= share * largest + 1e-9, (
        f"{name}: differs by {difference:.2e}, the largest is {largest:.2e}"
    )


Step = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def outcome(model: nn.Module, inputs: Any, step: Step, seed: int = 5) -> dict[str, Tensor]:
    """Outputs, loss and gradients of a step that returns outputs and loss."""
    torch.manual_seed(seed)
    model.zero_grad()
    with SameNumbers():
        outputs, loss = step(model, inputs)
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"outputs": outputs, "loss": loss, **gradients}


def same_on_both(model: nn.Module, inputs: Any, step: Step, share: float = 2e-3) -> None:
    """Fails if a step on the GPU gives other outputs, another loss or other gradients than on the
    CPU. Moves the model to the GPU."""
    expected = outcome(model, inputs, step)
    expected = {name: value.clone() for name, value in expected.items()}
    largest = max(float(value.abs().max()) for name, value in expected.items() if "." in name)
    actual = outcome(model.to(DEVICE), moved(inputs), step)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if "." in name and float(value.abs().max()) < 1e-4 * largest:
            continue  # gradients that would be 0 without rounding, such as gradients of key biases
        close(actual[name], value, share if "." in name else share / 10, name)


def half_steps(model: nn.Module, inputs: Any, step: Step, dtype: torch.dtype, share: float) -> None:
    """Fails if autocast gives outputs that are far from float32, or gradients that are not finite.
    The model is on the GPU."""
    expected = outcome(model, inputs, step)["outputs"].clone()

    def autocast_step(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE.type, dtype):
            return step(model, inputs)

    actual = outcome(model, inputs, autocast_step)
    close(actual["outputs"], expected, share, "outputs")
    for name, value in actual.items():
        assert torch.isfinite(value).all(), f"{name} is not finite"


def regular_numbers(
    shape: tuple[int, ...], device: torch.device | str | None, generator: torch.Generator | None
) -> Tensor:
    """In the place of draws from U(0, 1): a compiler may draw in another order."""
    return torch.linspace(0.05, 0.95, math.prod(shape), device=device).view(shape)


@contextlib.contextmanager
def no_random_numbers() -> Iterator[None]:
    """Fails if random numbers of the CPU or of the device are consumed inside."""
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if ON_GPU else None
    yield
    assert torch.equal(before[0], torch.get_rng_state()), "random numbers of the CPU were consumed"
    if ON_GPU:
        same = torch.equal(before[1], torch.cuda.get_rng_state())
        assert same, "random numbers of the GPU were consumed"


def waits(step: Callable[[], object]) -> list[str]:
    """Where a step waits for the GPU, as torch reports it: one line of text for each wait."""
    if not ON_GPU:
        return list(operations(step).read.elements())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [
        f"{warning.filename}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    ]


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in each run, where torch has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def peak_memory(step: Callable[[], object]) -> int:
    """Bytes that a step needs at its peak; 0 on a CPU, where the step only runs."""
    if ON_GPU:
        return peak_allocated(step)
    step()
    return 0
