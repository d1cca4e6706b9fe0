"""Helpers that the fairseq tests share: tiny models of every kind, batches, probes and command
lines."""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fairseq import checkpoint_utils, models, options
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks.translation import TranslationConfig
from torch import Tensor, nn

import fairseq_user_dir  # noqa: F401 registers the architectures
from cape_plugins import TYPES, PositionConfig
from cape_plugins.settings.config import applies, option_fields
from tests.support.core import random_numbers_untouched  # noqa: F401 used by the tests of fairseq
from tests.support.expected import MOVED

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ROOT / "cape_plugins"

PAD, BOS, EOS, FIRST_WORD, VOCABULARY = 1, 0, 2, 4, 24
START = PAD + 1  # coordinate of the first token, as in fairseq
NO_DATA = "no-such-folder"
ALPHA = "1.25"  # exact in float32
LIMIT = 64  # rows of the stock tables, in tokens

SINUSOID = [name for name, row in TYPES.items() if row.encoding == "sinusoid"]
SAMPLED = [name for name, row in TYPES.items() if row.sampling]
# What a stock model is told to have the same positions and parameters, by encoding; relative ones
# have parameters that no stock model has.
STOCK = {
    "sinusoid": {},
    "table": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "none": {"no_token_positional_embeddings": True},
}
IDENTICAL = [name for name, row in TYPES.items() if row.encoding in STOCK]
RELATIVE = {"position_relative_context": 3, "position_relative_values": True}
# Every type with its defaults, and what can be combined with it.
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"position_embedding": name} for name in TYPES},
    "shape+synchronize": {"position_embedding": "shape", "position_synchronize": True},
    "sinpos+source": {
        "position_embedding": "sinpos",
        "position_source_scale": ALPHA,
        "position_source_bos": True,
    },
    "cape+relative": {"position_embedding": "cape", **RELATIVE},
}
# Types in attention whose augmentation is on.
MOVED_VARIANTS = {
    name: {f"position_{key.replace('type', 'embedding')}": value for key, value in row.items()}
    for name, row in MOVED.items()
}
TINY = {
    "encoder_layers": 2,
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_layers": 2,
    "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 32,
    "decoder_attention_heads": 2,
}


def switched_off(type_name: str) -> dict[str, Any]:
    """Every option of the type at the value that has no effect."""
    return {
        f"position_{option.name}": option.metadata["off"]
        for option in option_fields("text")
        if applies(option.name, type_name)
    }


# ------------------------------------------------------------------------------- in this process


def make_dictionary() -> Dictionary:
    dictionary = Dictionary()
    for index in range(VOCABULARY - len(dictionary)):
        dictionary.add_symbol(f"w{index}")
    return dictionary


class Task:
    """What a model asks of its task. By default there are no data, so alpha has to be given."""

    def __init__(self, data: object = NO_DATA) -> None:
        self.source_dictionary = self.target_dictionary = make_dictionary()
        self.cfg = TranslationConfig(
            data=str(data), source_lang="en", target_lang="de", train_subset="train",
            dataset_impl=None,
        )  # fmt: skip


def build(arch: str = "cape_transformer_tiny", seed: int = 1, **settings: Any) -> Any:
    """A small encoder-decoder in training mode, with the same parameters for the same seed."""
    args = argparse.Namespace(arch=arch, label_smoothing=0.1, **{**TINY, **settings})
    for side in ("source", "target"):
        args.__dict__.setdefault(f"max_{side}_positions", LIMIT)
    if arch.startswith("cape_") and "position_source_scale" not in settings:
        config = PositionConfig(settings.get("position_embedding", "cape"), "text", "seq2seq")
        if config.source_scale == "auto":
            args.position_source_scale = ALPHA
    torch.manual_seed(seed)
    return models.build_model(args, Task())


def build_variant(name: str, **settings: Any) -> Any:
    return build(**{**(VARIANTS | MOVED_VARIANTS)[name], **settings})


def arguments(
    *words: object, arch: str = "cape_transformer_tiny", task: str = "translation"
) -> argparse.Namespace:
    """The arguments of ``fairseq-train DATA --arch ARCH words``, from which models can be built."""
    has_encoder = "_lm" not in arch
    tiny = {name: value for name, value in TINY.items() if has_encoder or "decoder" in name}
    argv = [NO_DATA, "--task", task, "--arch", arch, "--max-tokens", "100", *flags(tiny)]
    parser = options.get_training_parser(task)
    return options.parse_args_and_arch(parser, [*argv, *map(str, words)])


def configure(*words: object, **choice: str) -> Any:
    """The configuration of such a command line, as ``fairseq-train`` makes it. Hydra takes longer
    for it than anything else takes for a tiny model."""
    return convert_namespace_to_omegaconf(arguments(*words, **choice))


def build_lm(
    *words: object, arch: str = "cape_transformer_lm", seed: int = 1, read: Callable = arguments
) -> Any:
    """A small language model in training mode, from its command line, read by `arguments` or
    `configure`."""
    args = read("--tokens-per-sample", LIMIT, *words, arch=arch, task="language_modeling")
    torch.manual_seed(seed)
    return models.build_model(getattr(args, "model", args), Task())


def pad(rows: Sequence[Sequence[int]], left: bool) -> Tensor:
    """``[B, S]`` tokens."""
    longest = max(map(len, rows))
    fill = [[PAD] * (longest - len(row)) for row in rows]
    padded = [f + list(r) if left else list(r) + f for r, f in zip(rows, fill, strict=True)]
    return torch.tensor(padded)


def sentences(seed: int = 0, lengths: Sequence[int] = (7, 5, 2, 1)) -> list[list[int]]:
    """Source sentences, EOS last."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [*torch.randint(FIRST_WORD, VOCABULARY, (n,), generator=generator).tolist(), EOS]
        for n in lengths
    ]


def decoder_input(seed: int = 50, lengths: Sequence[int] = (6, 3, 5, 2)) -> Tensor:
    """``[B, T]``: EOS first, padded on the right."""
    return pad([row[-1:] + row[:-1] for row in sentences(seed, lengths)], left=False)


def batch(seed: int = 0, left: bool = True) -> tuple[Tensor, Tensor]:
    """Source tokens ``[B, S]`` and decoder input ``[B, T]``, of different lengths."""
    return pad(sentences(seed), left), decoder_input(seed + 50)


def loss_of(model: Any, seed: int, left: bool = True) -> Tensor:
    """A loss that depends on all outputs at real tokens of one batch."""
    source, previous = batch(seed, left)
    if not hasattr(model, "encoder"):
        logits, _ = model(previous)
    else:
        logits, _ = model(source, source.ne(PAD).sum(1), previous)
    weight = previous.ne(PAD)[..., None] * torch.linspace(-1, 1, logits.shape[-1])
    return (logits.float().log_softmax(-1) * weight).sum()


def train(model: Any, updates: int = 4, loss: Callable[..., Tensor] = loss_of) -> Any:
    """Trains with Adam; random numbers are seeded at each update, as fairseq does."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for update in range(updates):
        torch.manual_seed(100 + update)
        optimizer.zero_grad()
        loss(model, update, left=update % 2 == 0).backward()
        optimizer.step()
    return model


def step_by_step(decoder: Any, previous: Tensor, **inputs: Any) -> tuple[Tensor, list[dict]]:
    """Logits ``[B, T, V]`` of incremental decoding, and the other outputs of each step."""
    steps, state = range(1, previous.shape[1] + 1), {}
    outputs = [decoder(previous[:, :n], incremental_state=state, **inputs) for n in steps]
    return torch.cat([logits for logits, _ in outputs], 1), [extra for _, extra in outputs]


def note_keys(stack: Any) -> list[Tensor]:
    """A list to which each forward of a stack appends the coordinates that its attention takes."""
    seen: list[Tensor] = []
    computes = stack.stack_attention.stack_positions
    computes.register_forward_hook(lambda _, inputs, positions: seen.append(positions.key.clone()))
    return seen


class Recorder(nn.Module):
    """Stands for an encoding and notes the coordinates that are encoded."""

    def __init__(self, encoding: nn.Module) -> None:
        super().__init__()
        self.encoding = encoding
        self.seen: list[Tensor] = []

    def forward(self, coords: Tensor) -> Tensor:
        self.seen.append(coords.clone())
        return self.encoding(coords)

    def grid(self, coords: Tensor) -> Tensor:
        self.seen.append(coords.clone())
        return self.encoding.grid(coords)


def record(stack: Any) -> Recorder:
    encoder = stack.embed_positions.encoder
    encoder.encoding = Recorder(encoder.encoding)
    return encoder.encoding


# --------------------------------------------------------------------------------- command lines


def flags(settings: dict[str, Any]) -> list[str]:
    """``{"a_b": True}`` to ``["--a-b", "true"]``."""
    return [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value).lower())
    ]


TINY_FLAGS = flags(TINY)
CLI_VARIANTS = {name: flags(row) for name, row in (VARIANTS | MOVED_VARIANTS).items()}


def train_words(
    data: object,
    save_dir: object,
    *extra: object,
    arch: str = "cape_transformer_tiny",
    updates: int = 60,
) -> list[object]:
    """A ``fairseq-train`` command line for translation."""
    return [
        "fairseq-train", data, "--user-dir", USER_DIR, "--arch", arch, *TINY_FLAGS,
        "--save-dir", save_dir, "--max-update", updates, "--batch-size", 16, "--dropout", 0.1,
        "--optimizer", "adam", "--lr", 0.005, "--criterion", "label_smoothed_cross_entropy",
        "--label-smoothing", 0.1, "--cpu", "--no-progress-bar", "--num-workers", 0,
        "--no-epoch-checkpoints", *extra,
    ]  # fmt: skip


def lm_words(
    data: object, save_dir: object, *extra: object, arch: str = "cape_transformer_lm"
) -> list[object]:
    """A ``fairseq-train`` command line for a language model."""
    tiny = flags({name: value for name, value in TINY.items() if "decoder" in name})
    return [
        "fairseq-train", data, "--task", "language_modeling", "--user-dir", USER_DIR,
        "--arch", arch, *tiny, "--save-dir", save_dir, "--max-update", 40, "--batch-size", 16,
        "--tokens-per-sample", 32, "--sample-break-mode", "none", "--optimizer", "adam",
        "--lr", 0.005, "--cpu", "--no-progress-bar", "--num-workers", 0, "--no-epoch-checkpoints",
        "--required-batch-size-multiple", 1, *extra,
    ]  # fmt: skip


def generate_words(data: object, checkpoint: object, *extra: object) -> list[object]:
    """A ``fairseq-generate`` command line: nothing about positions."""
    return [
        "fairseq-generate", data, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu",
        "--batch-size", 8, "--required-batch-size-multiple", 1, "--num-workers", 0,
        "--max-len-b", 20, *extra,
    ]  # fmt: skip


def lines(output: str, letter: str) -> dict[int, list[list[str]]]:
    """The lines ``KIND-ID\\tfield\\tfield`` of a generation, fields by sentence, in order."""
    fields: dict[int, list[list[str]]] = {}
    for line in output.splitlines():
        head, _, rest = line.partition("\t")
        start, _, number = head.partition("-")
        if start == letter and number.isdigit():
            fields.setdefault(int(number), []).append(rest.split("\t"))
    return fields


def run_here(command: str, *words: object, input: str = "") -> str:
    """What a command of fairseq prints and logs. It runs in this process, which keeps nothing of
    the commands before."""
    module = import_module(f"fairseq_cli.{command.removeprefix('fairseq-').replace('-', '_')}")
    train = import_module("fairseq_cli.train")
    for function in (checkpoint_utils.save_checkpoint, train.should_stop_early):
        for name in ("best", "num_runs"):
            function.__dict__.pop(name, None)
    metrics.reset()
    output, root = io.StringIO(), logging.getLogger()
    argv, stdin = sys.argv, sys.stdin
    handler, level = logging.StreamHandler(output), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    sys.argv, sys.stdin = [command, *map(str, words)], io.StringIO(input)
    try:
        # loaders with workers set PYTHONWARNINGS for good
        with redirect_stdout(output), mock.patch.dict(os.environ):
            module.cli_main()
    finally:
        sys.argv, sys.stdin = argv, stdin
        root.removeHandler(handler)
        root.setLevel(level)
    return output.getvalue()


def run_ranks(run_cli: Callable[..., Any], words: Sequence[object], **kwargs: Any) -> list[str]:
    """Output of two ranks on CPUs; each is a process of ``fairseq-train``."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    distributed = [
        "--distributed-world-size", 2, "--distributed-init-method", address,
        "--distributed-no-spawn", "--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp",
    ]  # fmt: skip

    def run(rank: int) -> str:
        done = run_cli(*words, *distributed, "--distributed-rank", rank, **kwargs)
        return done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def final_state(folder: Path) -> tuple[dict[str, Tensor], Any, int]:
    """Model, moments of the optimizer and number of updates at the end of a training."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    history = state["optimizer_history"][-1]
    return state["model"], state["last_optimizer_state"]["state"], history["num_updates"]


def holds(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether `values` come from a model in `dtype`; checkpoints hold float32 in any case."""
    return values.dtype == torch.float32 and torch.equal(values.to(dtype).float(), values)


def parameters(checkpoint: Path) -> dict[str, Tensor]:
    """The model of a checkpoint file."""
    return torch.load(checkpoint, weights_only=True, map_location="cpu")["model"]


def differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not bit for bit the same."""
    assert list(first) == list(second)
    return [name for name in first if not torch.equal(first[name], second[name])]


def load(checkpoint: object, data: object) -> tuple[Any, Any]:
    """Model in evaluation mode and task from a checkpoint, by fairseq's own loader."""
    loaded, _, task = load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    return loaded[0].eval(), task


@torch.no_grad()
def forced_scores(model: Any, task: Any, source: str, target: str) -> Tensor:
    """``[T]`` base-2 log-probabilities of the words of `target` and of EOS, in one pass."""
    tokens = encode(task.source_dictionary, source)[None]
    words = encode(task.target_dictionary, target)
    previous = torch.cat((words[-1:], words[:-1]))[None]
    logits, _ = model(tokens, torch.tensor([tokens.shape[1]]), previous)
    return logits[0].log_softmax(-1).gather(1, words[:, None])[:, 0] / math.log(2)


def encode(dictionary: Dictionary, sentence: str) -> Tensor:
    """``[T]`` indices, EOS last."""
    return dictionary.encode_line(sentence, add_if_not_exist=False).long()
