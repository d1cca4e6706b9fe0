"""Any image classifier of transformers: loading, scores, images per second, and matching its
classes with the classes of the data."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from transformers import AutoModelForImageClassification, ViTImageProcessor

import hf_models  # noqa: F401  registers the cape types
from cape_plugins import PositionEncoder
from cape_plugins.settings.config import applies
from cape_plugins.utils.texts import first_line
from recipes.lab.hf_checkpoints import UNREADABLE, unloadable
from recipes.lab.steps import CommandError
from recipes.lab.tables import Row

# messages about lack of memory of torch, cuBLAS and cuDNN, in errors other than
# torch.OutOfMemoryError
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


class Classifier:
    """A checkpoint (a folder or a name on the hub), and the facts that its images need. `size` and
    `patch` are the sides of image and patch in pixels, by default 224 and 16; `labels` are the
    names of its classes."""

    def __init__(self, path: str, dtype: torch.dtype = torch.float32) -> None:
        self.path = path
        try:
            self.model, info = AutoModelForImageClassification.from_pretrained(
                path, dtype=dtype, output_loading_info=True
            )
        except UNREADABLE as error:
            raise unloadable(path, error) from None
        if info["missing_keys"]:
            raise CommandError(
                f"--model {path} has no weights for {', '.join(sorted(info['missing_keys'])[:3])}; "
                "give a model that was trained to classify images"
            )
        self.model.eval()
        config = self.model.config
        self.size = int(np.min(getattr(config, "image_size", 224)))
        self.patch = int(np.max(getattr(config, "patch_size", 16)))
        self.channels = getattr(config, "num_channels", 3)
        self.labels = [str(config.id2label[number]) for number in range(config.num_labels)]
        self.mean, self.std = _normalisation(path, self.channels)
        # stock models resize their positions only with this flag, which other models do not have
        parameters = inspect.signature(self.model.forward).parameters
        self.options = dict.fromkeys({"interpolate_pos_encoding"} & parameters.keys(), True)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Moves the model to `device` within the ``with`` block, and back to the CPU afterwards."""
        self.model.to(device)
        yield
        self.model.to("cpu")

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, classes]`` of normalised pixels."""
        return self.model(pixels, **self.options).logits

    @torch.inference_mode()
    def scores(self, images: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
        """Log-probabilities ``[B, classes]`` of `images` ``[B, C, h, w]`` in 0 to 1, float32;
        `gamma` multiplies the grid of positions (CAPE Table 6), on top of the factor of the
        checkpoint."""
        device = self.model.device
        height, width = images.shape[2:]
        subject = f"{self.path} on {len(images)} images of {height} x {width}"
        pixels = (images.to(device) - self.mean.to(device)) / self.std.to(device)
        try:
            with scaled_grid(self.model, gamma):
                logits = self.forward(pixels.to(self.model.dtype))
        except torch.OutOfMemoryError:
            raise CommandError(f"{subject}: out of memory; give a smaller --batch-size") from None
        scores = logits.float().log_softmax(-1)
        if scores.isnan().any():
            raise CommandError(f"{subject}: scores are not numbers; try --dtype float32")
        return scores

    def refusal(self, height: int, width: int) -> str | None:
        """The model's error for an image of this size; None if the model accepts this size."""
        try:
            self.scores(torch.zeros(1, self.channels, height, width))
        except (RuntimeError, ValueError) as error:
            return first_line(error)
        return None

    def check_gamma(self) -> None:
        """Refuses positions other than sinusoids, which have no factor on the grid."""
        settings = getattr(self.model.config, "position_embedding", None)
        type_name = settings["type"] if isinstance(settings, Mapping) else None
        if type_name is None or not applies("gamma", type_name):
            raise CommandError(
                f"--gamma scales the grid of sinusoids, {self.path} has "
                f"{f'position embedding {type_name!r}' if type_name else 'stock positions'}; leave "
                "--gamma or this model out"
            )


def _normalisation(path: str, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation ``[C, 1, 1]`` from the processor of the checkpoint; 0.5 without a
    processor."""
    mean = std = [0.5] * channels
    try:
        processor = ViTImageProcessor.from_pretrained(path)
    except OSError:
        print(f"{path}: no preprocessor_config.json; pixels are normalised by 0.5 and 0.5")
    else:
        mean, std = processor.image_mean, processor.image_std
        if not processor.do_normalize:
            mean, std = [0.0] * channels, [1.0] * channels
    return torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]


@contextlib.contextmanager
def scaled_grid(model: torch.nn.Module, gamma: float) -> Iterator[None]:
    """Multiplies the normalised grid of all position encoders by `gamma` within the ``with``
    block."""
    encoders = (module for module in model.modules() if isinstance(module, PositionEncoder))
    before = {encoder: encoder.config for encoder in encoders if gamma != 1}
    try:
        for encoder, config in before.items():
            encoder.config = config.replace(gamma=gamma * config.gamma)
        yield
    finally:
        for encoder, config in before.items():
            encoder.config = config


def match_classes(names: Sequence[str], labels: Sequence[str]) -> tuple[list[int], str]:
    """Number of the model's class for each class of the data, and how the match was found.

    Classes match by name. If names do not match, names that are whole numbers are numbers of
    classes (folders 0 to 999 of ImageNet-v2). Other classes match by order, if there are as many
    names as classes. If the model has one of the names at another number, classes match only by
    name.
    """
    data, model = (
        [name.casefold().replace("_", " ").strip() for name in part] for part in (names, labels)
    )
    if data == model:
        return list(range(len(data))), "by name"
    number_of = {name: number for number, name in enumerate(model) if model.count(name) == 1}
    if all(name in number_of for name in data):
        return [number_of[name] for name in data], "by name"
    guesses = []
    if all(name.isdecimal() for name in data):
        numbers = [int(name) for name in data]
        if max(numbers) < len(model):
            guesses.append((numbers, "by number"))
        elif len(numbers) == len(model):  # such as 1 to 1000
            order = sorted(numbers)
            guesses.append(([order.index(n) for n in numbers], "by order of their numbers"))
    if len(data) == len(model):
        guesses.append((list(range(len(model))), "by order, because their names differ"))
    for numbers, description in guesses:
        pairs = zip(data, numbers, strict=True)
        if all(number_of.get(name, number) == number for name, number in pairs):
            return numbers, description
    raise CommandError(
        f"the {len(names)} classes of the data ({_first_names(names)}) are not among the "
        f"{len(labels)} classes of the model ({_first_names(labels)}); give data with the model's "
        "classes, by name or number"
    )


def _first_names(names: Sequence[str]) -> str:
    text = ", ".join(map(repr, names[:3]))
    return f"{text} ..." if len(names) > 3 else text


def attempt(run: Callable[[int], Any], batch: int) -> Any:
    """The result of ``run(batch)``; None if memory runs out; the memory is then freed."""
    try:
        return run(batch)
    except (RuntimeError, MemoryError) as error:
        of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not of_memory and not any(text in str(error) for text in _OUT_OF_MEMORY):
            raise
    # outside the handler, whose traceback keeps the tensors of the failed run alive
    clear_device_cache(garbage_collection=True)
    return None


def largest_batch(run: Callable[[int], object], limit: int) -> int:
    """The largest batch up to `limit` that fits, found by doubling and then by bisection to within
    1/64 (so the result is exact below 128); 0 if not even one image fits."""
    batch, above = 0, 1
    while attempt(run, above) is not None:
        if above == limit:
            return limit
        batch, above = above, min(2 * above, limit)
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
    """``batch * runs / seconds``, by the protocol of DeiT and CAPE (Appendix B.1): the time is
    taken only when the device has finished its work."""
    for _ in range(warmup):
        run()
    synchronize()
    begin = clock()
    for _ in range(runs):
        run()
    synchronize()
    return batch * runs / (clock() - begin)


@torch.inference_mode()
def throughput(classifier: Classifier, size: int, *, limit: int, **counts: int) -> Row:
    """Measures random images of `size` pixels, on the device and in the type of the model, with the
    largest batch up to `limit` that fits; `counts` go to :func:`images_per_second`."""
    device, dtype = classifier.model.device, classifier.model.dtype

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def forward_of(batch: int) -> Callable[[], torch.Tensor]:
        shape = (batch, classifier.channels, size, size)
        return partial(classifier.forward, torch.randn(shape, device=device, dtype=dtype))

    def once(batch: int) -> int:
        forward_of(batch)()
        synchronize()  # raises an error of the device
        return batch

    def measure(batch: int) -> float:
        return images_per_second(forward_of(batch), batch, **counts, synchronize=synchronize)

    batch = largest_batch(once, limit)
    while batch:
        rate = attempt(measure, batch)
        if rate is not None:
            return {"size": size, "batch": batch, "images_per_second": rate}
        batch = batch * 9 // 10  # memory is fragmented: a batch that fitted once may not fit again
    raise CommandError(
        f"--throughput: not one image of {size} x {size} pixels fits into memory; give smaller "
        "--sizes"
    )
