"""Translation models of fairseq with every position embedding, and texts to translate."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary

from cape_plugins import TYPES, PositionConfig
from tests.support.fairseq_models import EOS, FIRST_WORD
from tests.support.translation_models import SIZES, save_fairseq

WORDS = 20
PRE_LN = ("--encoder-normalize-before", "--decoder-normalize-before")
NORMS = {"post-LN": (), "pre-LN": PRE_LN}
ALPHA = "1.25"


def flags_of(name: str, architecture: str = "seq2seq") -> tuple[str, ...]:
    """Flags of a type of position embedding, beside its own defaults; learned tables have 12
    rows."""
    flags = ("--position-embedding", name)
    config = PositionConfig(name, "text", architecture)
    if config.encoding.counts:
        sides = {"seq2seq": ("source", "target"), "decoder": ("target",)}[architecture]
        flags += tuple(word for side in sides for word in (f"--max-{side}-positions", "12"))
    if config.encoding.relative:
        flags += ("--position-relative-context", "4")
    if config.source_scale == "auto":
        flags += ("--position-source-scale", ALPHA)
    return flags


TYPE_FLAGS = {name: flags_of(name) for name in TYPES}


class ServedModels:
    """Checkpoints of models that are not trained, and texts to translate.

    Args:
        folder: For all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = write_dictionaries(folder / "shared", "w", "w")
        self.separate = write_dictionaries(folder / "separate", "w", "v")
        self.lm_data = folder / "language"
        self.lm_data.mkdir()
        shutil.copy(self.data / "binary" / "dict.en.txt", self.lm_data / "dict.txt")
        rng = random.Random(5)
        self.lines = [*draw(rng, 20, 1, 8), *draw(rng, 20, 9, 16)]
        self.text = folder / "text.en"
        self.text.write_text("".join(f"{line}\n" for line in self.lines), encoding="utf-8")

    def save(
        self, name: str, norm: str, *flags: object, separate: bool = False, admin: bool = False
    ) -> Path:
        """A checkpoint with these flags.

        Args:
            name: Of the file.
            norm: Key of :data:`NORMS`.
            flags: Of ``fairseq-train``.
            separate: No embeddings are shared, and the dictionaries are not the same.
            admin: With residual weights of ADMIN between 0.8 and 1.2.
        """
        corpus = self.separate if separate else self.data
        path = self.folder / f"{name}-{norm}.pt"
        save_fairseq(corpus, path, *flags, *NORMS[norm], shared=not separate)
        state = torch.load(path, weights_only=True)
        if admin:
            _add_admin(state)
        let_end(state["model"])
        torch.save(state, path)
        return path


def let_end(parameters: dict[str, torch.Tensor]) -> None:
    """Changes the last norm of a decoder so that scores differ clearly, many translations end by
    themselves, and none has a symbol that is no word."""
    norm = "decoder.layer_norm"
    if f"{norm}.weight" not in parameters:
        norm = f"decoder.layers.{SIZES['layers'] - 1}.final_layer_norm"
    words = parameters["decoder.output_projection.weight"]
    parameters[f"{norm}.weight"] *= 4
    for index in range(FIRST_WORD):
        score = 4 if index == EOS else -12
        parameters[f"{norm}.bias"] += score * words[index] / words[index].square().sum()


def _add_admin(state: dict[str, Any]) -> None:
    state["cfg"].model.admin_init = state["cfg"].model.admin_profiled = True
    for side, branches in (("encoder", 2), ("decoder", 3)):
        for number in range(SIZES["layers"] * branches):
            layer, branch = divmod(number, branches)
            omega = 0.8 + 0.4 * torch.rand(SIZES["embed-dim"])
            state["model"][f"{side}.layers.{layer}.admin.omega.{branch}"] = omega


def write_dictionaries(folder: Path, source: str, target: str) -> Path:
    """Writes ``binary/dict.*`` with :data:`WORDS` words of either letter; one word more on the
    target side, where the letters differ."""
    (folder / "binary").mkdir(parents=True)
    for language, letter, more in (("en", source, 0), ("de", target, source != target)):
        dictionary = Dictionary()
        for number in range(WORDS + more):
            dictionary.add_symbol(f"{letter}{number}")
        dictionary.save(str(folder / "binary" / f"dict.{language}.txt"))
    return folder


def draw(rng: random.Random, count: int, low: int, high: int) -> list[str]:
    """Lines of words, `low` to `high` in each: ``w3 w14``."""
    return [
        " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(low, high)))
        for _ in range(count)
    ]
