"""Images per second by the protocol of DeiT and CAPE (Appendix B.1): the largest batch that fits,
30 runs to warm up, the mean of 30 timed ones."""

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from recipes.lab.steps import CommandError
from recipes.vit.classifier import Classifier

T = TypeVar("T")

# what torch, cuBLAS and cuDNN say besides torch.OutOfMemoryError
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


class Throughput(NamedTuple):
    """Images per second and the batch size they were measured with."""

    rate: float
    batch: int


def is_out_of_memory(error: Exception) -> bool:
    """Whether the memory of the device or of the machine was too small."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def attempt(run: Callable[[int], T], batch: int) -> T | None:
    """What ``run(batch)`` returns; None if it runs out of memory, which is free again then."""
    try:
        return run(batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # outside the handler, whose traceback keeps the tensors of the failed run alive
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def largest_batch(run: Callable[[int], object], limit: int) -> int:
    """The largest batch up to `limit` that fits, found by doubling, then by halving the gap until
    it is below 1/64 (so exactly below 128).

    Args:
        run: Runs a batch of a given size and returns anything but None.

    Returns:
        Its size; 0 if not even one image fits.
    """
    batch, above = 0, 1
    while attempt(run, above) is not None:
        batch = above
        if batch == limit:
            return batch
        above = min(2 * above, limit)
    while above - batch > max(1, batch // 64):
        middle = (batch + above) // 2
        if attempt(run, middle) is None:
            above = middle
        else:
            batch = middle
    return batch


def images_per_second(
    run: Callable[[], object],
    batch: int,
    *,
    warmup: int = 30,
    runs: int = 30,
    synchronize: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """``batch * runs / seconds``, the clock read only when the device has nothing left to do."""
    for _ in range(warmup):
        run()
    synchronize()
    begin = clock()
    for _ in range(runs):
        run()
    synchronize()
    return batch * runs / (clock() - begin)


@torch.inference_mode()
def throughput(
    classifier: Classifier, size: int, *, limit: int, warmup: int = 30, runs: int = 30
) -> Throughput:
    """Measures random images of `size` pixels, on the device and in the type of the model.

    Args:
        limit: Largest batch to try.

    Raises:
        CommandError: if not even one image fits.
    """
    device, dtype = classifier.model.device, classifier.model.dtype

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def random_images(batch: int) -> torch.Tensor:
        shape = (batch, classifier.channels, size, size)
        return torch.randn(shape, device=device, dtype=dtype)

    def once(batch: int) -> int:
        classifier.forward(random_images(batch))
        synchronize()  # an error of the device comes to light here
        return batch

    def measure(batch: int) -> float:
        forward = partial(classifier.forward, random_images(batch))
        counts = {"warmup": warmup, "runs": runs}
        return images_per_second(forward, batch, **counts, synchronize=synchronize)

    batch = largest_batch(once, limit)
    while batch:
        rate = attempt(measure, batch)
        if rate is not None:
            return Throughput(rate, batch)
        batch = batch * 9 // 10  # memory in pieces: what fitted once need not fit again
    raise CommandError(
        f"--throughput: not one image of {size} x {size} pixels fits into memory; give smaller "
        "--sizes"
    )
