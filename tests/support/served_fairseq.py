"""Translation models of fairseq with every position embedding that end their translations by
themselves: one is trained for seconds, and the others begin with its parameters."""

from __future__ import annotations

import functools
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from cape_plugins import TYPES
from tests.support.fairseq_models import EOS, FIRST_WORD, PAD, load, pad
from tests.support.translation_models import SIZES, flags_of, save_fairseq

WORDS = 20
LONGEST = 8  # words of a source in training
PRE_LN = ("--encoder-normalize-before", "--decoder-normalize-before")
NORMS = {"post-LN": (), "pre-LN": PRE_LN}
TYPE_FLAGS = {name: flags_of(name) for name in TYPES}


class ServedModels:
    """Checkpoints with trained parameters, and texts to translate.

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
        self.lines = [*map(spell, [*draw(rng, 20, 1, LONGEST), *draw(rng, 20, LONGEST, 16)])]
        self.text = folder / "text.en"
        self.text.write_text("".join(f"{line}\n" for line in self.lines), encoding="utf-8")

    @functools.cache  # noqa: B019 lives as long as the tests
    def trained(self, norm: str) -> dict[str, torch.Tensor]:
        """Parameters of a model that has learned the task halfway: no two sources have the same
        translation, and most of those longer than in training end."""
        path = self.folder / f"trained-{norm}.pt"
        flags = (*TYPE_FLAGS["cape"], "--dropout", 0, *NORMS[norm])
        save_fairseq(self.data, path, *flags)
        return train(path, self.data, updates=150)

    def save(
        self, name: str, norm: str, *flags: object, separate: bool = False, admin: bool = False
    ) -> Path:
        """A checkpoint with these flags: begins with the trained parameters, where it has them, and
        goes on for some updates, so that translations end here, too.

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
        weights = state["model"]
        for parameter, value in self.trained(norm).items():
            if parameter in weights and weights[parameter].shape[1:] == value.shape[1:]:
                weights[parameter][: len(value)] = value  # a dictionary may have more words
        if admin:
            _add_admin(state)
        torch.save(state, path)
        state["model"] = train(path, corpus, updates=15)
        torch.save(state, path)
        return path


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


def draw(
    rng: random.Random, count: int, low: int, high: int, words: int = WORDS
) -> list[list[int]]:
    """Rows of numbers of words, `low` to `high` in each."""
    return [[rng.randrange(words) for _ in range(rng.randint(low, high))] for _ in range(count)]


def spell(row: list[int]) -> str:
    """``w3 w14``"""
    return " ".join(f"w{number}" for number in row)


def train(path: Path, data: Path, updates: int) -> dict[str, torch.Tensor]:
    """Trains the model of a checkpoint on sources of up to :data:`LONGEST` words, each of which
    becomes the next word of the dictionary; gives its parameters."""
    model, task = load(path, data / "binary")
    model.train()
    torch.manual_seed(1)
    rng, rate = random.Random(0), 5e-3
    count = len(task.source_dictionary) - FIRST_WORD
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (update + 1) / 30) * (1 - update / updates) ** 0.5
        rows = draw(rng, 48, 1, LONGEST, count)
        words = [[FIRST_WORD + (number + 1) % count for number in row] for row in rows]
        rows = [[*(FIRST_WORD + number for number in row), EOS] for row in rows]
        source = pad(rows, left=True)
        logits, _ = model(
            source, source.ne(PAD).sum(1), pad([[EOS, *row] for row in words], left=False)
        )
        wanted = pad([[*row, EOS] for row in words], left=False)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}
