"""ADMIN initialisation of deep post-LN transformers (``--admin-init``).

Liu et al. 2020, "Understanding the difficulty of training transformers" (Admin), as in Liu et al.
2020, "Very deep transformers for neural machine translation", and in the 6L-6L and 18L-18L models
of the CAPE paper. Each residual sub-layer of a post-LN stack computes

    LN(f(x) + omega * x)      instead of      LN(f(x) + x)

with one trainable vector omega [embed_dim] per sub-layer. Before training, one forward pass
measures how the variance of the residual stream grows with depth. Each omega starts at the standard
deviation of the sum in the previous sub-layer, measured before the layer norm:

    s_1 = 1,   omega_i := s_i,   s_{i+1} = sqrt(Var(s_i * x_i) + Var(f_i(x_i)))

Encoder and decoder are measured separately. The authors' program measures in a separate run and
writes the numbers to a file, which inference needs as well. In this module the omegas are
parameters of the model, profiled when the model is built, and stored in checkpoints.

The layers may be of any class of fairseq, and may already be wrapped for activation checkpointing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq import utils
from fairseq.data import data_utils, indexed_dataset
from fairseq.models.nat import FairseqNATModel
from torch import Tensor, nn

from fairseq_user_dir.host.errors import SettingsError

_FLAG = "--admin-init"

# Sentence pairs at the beginning of the training data; the profiling batch is chosen among them.
_CANDIDATES = 10_000

# The modules that open a residual sub-layer, in the order of the layer's forward pass.
_BRANCHES = ("self_attn", "encoder_attn", "fc1")


class AdminProfile(NamedTuple):
    """The constants found by profiling, in order of execution.

    encoder: 2 per layer (attention, FFN); decoder: 3 per layer (self, cross, FFN).
    """

    encoder: list[float]
    decoder: list[float]


class ProfilingBatch(NamedTuple):
    """Batch of `profile_admin`: ``src_tokens`` [B, S] and ``prev_output_tokens`` [B, T]."""

    src_tokens: Tensor
    prev_output_tokens: Tensor


class AdminResidual(nn.Module):
    """The residual connections of one layer.

    Args:
        like: a parameter of the layer, which sets dtype and device.
        embed_dim: size K of the layer's input and output.
        sublayers: number of residual sub-layers.

    Attributes:
        omega: one vector [K] per sub-layer, in order of execution; ones until profiled.
    """

    def __init__(self, like: Tensor, embed_dim: int, sublayers: int) -> None:
        super().__init__()
        self.omega = nn.ParameterList(
            nn.Parameter(like.new_ones(embed_dim)) for _ in range(sublayers)
        )
        self.current = 0

    def enter(self, index: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of the module that opens sub-layer ``index``.

        The sub-layer that was entered last decides which omega :meth:`combine` uses. A count of the
        calls of :meth:`combine` would be wrong after an exception, when a layer is recomputed for
        its gradients (which runs no hooks of the layer), or if a sub-layer is left out.
        """
        self.current = index

    def combine(self, x: Tensor, residual: Tensor) -> Tensor:
        """``omega * residual + x``, of shape [T, B, K] like both arguments."""
        return self.omega[self.current] * residual + x


def attach_admin(model: nn.Module) -> None:
    """Gives every layer of a post-LN encoder-decoder model trainable residual weights.

    Each layer gets a submodule ``admin``, so the state dict gains keys such as
    ``encoder.layers.0.admin.omega.0``. All omegas are one at first, so the model computes the same
    as before, up to rounding. Call this function when the layers are complete: an attention module
    that replaces another one later has no hook.

    Args:
        model: has ``encoder.layers`` and ``decoder.layers`` with fairseq's transformer layers.

    Raises:
        SettingsError: if the model is pre-LN or non-autoregressive, lacks an encoder or decoder
            with such layers, or has base layers or residual weights already (``--scale-resids``,
            ADMIN). Then nothing is attached.
    """
    if isinstance(model, FairseqNATModel):
        raise SettingsError(
            f"{_FLAG}: {type(model).__name__} is non-autoregressive and has no plain forward pass "
            "to profile; drop the flag, or choose an autoregressive architecture"
        )
    layers = [
        (f"{side}.layers.{index}", layer)
        for side in ("encoder", "decoder")
        for index, layer in enumerate(_layers(model, side))
    ]
    for name, layer in layers:
        _check_layer(name, layer)
    for _, layer in layers:
        branches = [b for b in _BRANCHES if getattr(layer, b, None) is not None]
        admin = AdminResidual(layer.fc1.weight, layer.embed_dim, len(branches))
        layer.admin = admin
        for index, branch in enumerate(branches):
            hook = functools.partial(admin.enter, index)  # not a closure: models are pickled
            getattr(layer, branch).register_forward_pre_hook(hook)
        layer.residual_connection = admin.combine


def _layers(model: nn.Module, side: str) -> list[nn.Module]:
    """The layers of one stack, read by index, because iterating over a stack with layer drop skips
    layers."""
    layers = getattr(getattr(model, side, None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise SettingsError(
            f"{_FLAG}: {type(model).__name__} has no stack {side}.layers; ADMIN is for "
            "encoder-decoder transformers; drop the flag, or choose such an architecture"
        )
    return [layers[index] for index in range(len(layers))]


def _check_layer(name: str, layer: nn.Module) -> None:
    """Refuses a layer to which the formula does not apply."""
    if not all(hasattr(layer, part) for part in ("residual_connection", "self_attn", "fc1")):
        raise SettingsError(
            f"{_FLAG}: {name} is a {type(layer).__name__}, not a transformer layer with residual "
            "connections; drop the flag, or the option that adds such layers (--base-layers)"
        )
    if hasattr(layer, "admin"):
        raise SettingsError(f"{_FLAG}: {name} has residual weights already; attach them only once")
    if layer.normalize_before:
        side = name.split(".")[0]
        raise SettingsError(
            f"{_FLAG}: {name} is pre-LN (--{side}-normalize-before is True, ADMIN needs False); "
            "drop that option or choose an architecture without it; pre-LN models need no ADMIN"
        )
    if getattr(layer, "w_resid", None) is not None:
        raise SettingsError(
            f"{_FLAG}: {name} scales its residual already (--scale-resids is True, ADMIN needs "
            "False); drop one of the two options"
        )


class _Measurement:
    """Running value s of one stack, and the constants given to the sub-layers so far."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self.constants: list[float] = []

    def combine(self, admin: AdminResidual, x: Tensor, residual: Tensor) -> Tensor:
        """Stand-in for `AdminResidual.combine` that sets omega before it is used."""
        admin.omega[admin.current].fill_(self.ratio)
        self.constants.append(self.ratio)
        # Population variance over all elements, padding included, in float32, as in the reference.
        residual_variance = (self.ratio * residual.float()).var(correction=0).item()
        branch_variance = x.float().var(correction=0).item()
        self.ratio = math.sqrt(residual_variance + branch_variance)
        return admin.combine(x, residual)


def profile_admin(
    model: nn.Module, src_tokens: Tensor, prev_output_tokens: Tensor, seed: int
) -> AdminProfile:
    """Sets all omegas from one forward pass in training mode, with dropout but without layer drop.

    Reproducible: the random numbers come from ``seed``, and the caller's random state and the modes
    of all modules are restored; no gradients are computed. If torch.distributed is initialised, all
    ranks must call this function. All ranks get the constants of rank 0, because ranks draw
    different augmentations, and different processors round differently.

    Args:
        model: after `attach_admin`, on the CPU.
        src_tokens: [B, S] token indices, padded.
        prev_output_tokens: [B, T] decoder input.
        seed: any integer that torch takes as a seed.

    Returns:
        The constants, also filled into ``model``; the first of each stack is 1.

    Raises:
        SettingsError: if the model has no ADMIN parameters or is not on the CPU, or if a constant
            is not finite. Then the omegas do not change.
    """
    stacks = [_layers(model, side) for side in ("encoder", "decoder")]
    layers = [layer for stack in stacks for layer in stack]
    if not all(isinstance(getattr(layer, "admin", None), AdminResidual) for layer in layers):
        raise SettingsError(
            f"{_FLAG}: {type(model).__name__} has no ADMIN weights; call attach_admin first"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise SettingsError(f"{_FLAG}: profile the model on the CPU, not on {', '.join(devices)}")

    omegas = [omega for layer in layers for omega in layer.admin.omega]
    before = [omega.detach().clone() for omega in omegas]
    try:
        with torch.no_grad(), _training_mode(model), _fixed_seed(seed):
            profile = _measure(model, stacks, src_tokens, prev_output_tokens)
            constants = _of_first_rank([*profile.encoder, *profile.decoder])
            _fill(omegas, constants)
    except BaseException:
        with torch.no_grad():
            for omega, value in zip(omegas, before, strict=True):
                omega.copy_(value)
        raise
    count = len(profile.encoder)
    return AdminProfile(constants[:count], constants[count:])


def _measure(
    model: nn.Module, stacks: Sequence[Sequence[nn.Module]], src: Tensor, prev: Tensor
) -> AdminProfile:
    """One forward pass with the measuring residual connections in place."""
    measurements = [_Measurement() for _ in stacks]
    try:
        for stack, measurement in zip(stacks, measurements, strict=True):
            for layer in stack:
                layer.residual_connection = functools.partial(measurement.combine, layer.admin)
        model(src, src.ne(model.encoder.padding_idx).sum(dim=1), prev)
    finally:
        for stack in stacks:
            for layer in stack:
                layer.residual_connection = layer.admin.combine
    return AdminProfile(*(measurement.constants for measurement in measurements))


def _fill(omegas: Sequence[Tensor], constants: Sequence[float]) -> None:
    if len(constants) != len(omegas) or not all(map(math.isfinite, constants)):
        raise SettingsError(
            f"{_FLAG}: profiling gave {constants} for {len(omegas)} sub-layers; each needs one "
            "finite number; check the initialisation of the model"
        )
    for omega, constant in zip(omegas, constants, strict=True):
        omega.fill_(constant)


@contextlib.contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules into training mode, without layer drop: a dropped layer cannot be
    measured."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        for side in ("encoder", "decoder"):
            getattr(model, side).layers.training = False  # only the list, not the layers
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def _fixed_seed(seed: int) -> Iterator[None]:
    """Seeds the random numbers of the CPU, and restores the caller's random state at the end."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the GPUs, whose state is not restored here
        torch.default_generator.manual_seed(seed)
        yield


def _of_first_rank(values: list[float]) -> list[float]:
    """Returns the list of rank 0 in every process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    on_gpu = torch.distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.broadcast(shared, src=0)
    return shared.tolist()


def profiling_batch(task: Any, max_tokens: int = 4096) -> ProfilingBatch | None:
    """Reads one training batch of a translation task, the same batch in every process and run.

    The pairs come from the first 10 000 pairs of the training data, in the first data folder. The
    batch holds the pairs whose lengths are nearest to the median, so the batch has little padding,
    like a batch in training.

    Args:
        task: a task with the fields of fairseq's ``TranslationConfig`` in ``cfg``.
        max_tokens: bound on rows x columns of each side, padding included.

    Returns:
        The batch, padded on the sides that the task pads on; None if there are no training data, as
        when a trained model is loaded for inference.

    Raises:
        SettingsError: if no pair is short enough for ``max_tokens`` and the task.
    """
    cfg = getattr(task, "cfg", None)
    prefix = None if cfg is None else _train_prefix(cfg)
    if prefix is None:
        return None
    sides = (
        (cfg.source_lang, task.source_dictionary, "max_source_positions"),
        (cfg.target_lang, task.target_dictionary, "max_target_positions"),
    )
    datasets = [
        data_utils.load_indexed_dataset(prefix + language, dictionary, cfg.dataset_impl)
        for language, dictionary, _ in sides
    ]
    limits = [min(max_tokens, getattr(cfg, option, None) or max_tokens) for *_, option in sides]
    rows = _choose_rows([np.asarray(d.sizes[:_CANDIDATES]) for d in datasets], limits, max_tokens)
    if len(rows) == 0:
        raise SettingsError(
            f"{_FLAG}: none of the first {min(len(datasets[0]), _CANDIDATES)} pairs of {prefix}* "
            f"has at most {limits[0]} source and {limits[1]} target tokens; shorten the sentences, "
            "or raise --max-source-positions and --max-target-positions"
        )
    source, target = (_read(dataset, rows) for dataset in datasets)
    pad, eos = task.source_dictionary.pad(), task.source_dictionary.eos()
    return ProfilingBatch(
        data_utils.collate_tokens(source, pad, eos, left_pad=cfg.left_pad_source),
        data_utils.collate_tokens(
            target, pad, eos, left_pad=cfg.left_pad_target, move_eos_to_beginning=True
        ),
    )


def _train_prefix(cfg: Any) -> str | None:
    """Path of the training data up to the language, such as ``data-bin/train.de-en.``."""
    source, target = getattr(cfg, "source_lang", None), getattr(cfg, "target_lang", None)
    if not (getattr(cfg, "data", None) and source and target):
        return None
    folder = utils.split_paths(cfg.data)[0]
    for pair in (f"{source}-{target}", f"{target}-{source}"):
        prefix = os.path.join(folder, f"{cfg.train_subset}.{pair}.")
        if all(
            indexed_dataset.dataset_exists(prefix + language, cfg.dataset_impl)
            for language in (source, target)
        ):
            return prefix
    return None


def _choose_rows(sizes: Sequence[np.ndarray], limits: Sequence[int], max_tokens: int) -> np.ndarray:
    """Rows of a batch of similar length: as many rows around the median length as ``max_tokens``
    allows.

    Args:
        sizes: number of tokens of each sentence, [N] per side.
        limits: longest sentence to be used, per side.
        max_tokens: bound on rows x longest of each side.

    Returns:
        Indices into ``sizes``, [n]; empty only if every pair exceeds the limits.
    """
    source, target = sizes
    short = np.flatnonzero((source <= limits[0]) & (target <= limits[1]))
    order = short[np.lexsort((target[short], source[short]))]

    def around_median(count: int) -> np.ndarray:
        start = min(max(len(order) // 2 - count // 2, 0), len(order) - count)
        return order[start : start + count]

    rows = around_median(min(1, len(order)))
    while len(rows) < len(order):
        wider = around_median(len(rows) + 1)
        if len(wider) * max(source[wider].max(), target[wider].max()) > max_tokens:
            break
        rows = wider
    return rows


def _read(dataset: Any, rows: np.ndarray) -> list[Tensor]:
    if getattr(dataset, "supports_prefetch", False):  # a cached dataset reads nothing before this
        dataset.prefetch(rows)
    return [dataset[int(row)].long() for row in rows]
