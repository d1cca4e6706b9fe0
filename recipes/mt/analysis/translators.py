"""One interface over trained translation models of fairseq and of Hugging Face.

A subclass for each of the two hosts (fairseq, Hugging Face) defines how to load a model, how to
read its vocabulary and how to run a padded batch. This module builds the functions of the analyses
from these definitions.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cape_plugins import ENCODINGS, TYPES, PositionConfig, PositionEncoder
from recipes.lab.steps import CommandError, progress
from recipes.mt.corpus import Pair

Ids = list[int]


@dataclass(frozen=True)
class Running:
    """Options for running models."""

    device: torch.device
    half: bool = False  # run in half precision
    max_tokens: int = 4000  # number of tokens of a padded batch, per side
    offset: int = 0  # added to all positions of source and target


@dataclass(frozen=True)
class Decoding:
    """Beam search; a hypothesis has at most `max_len_a` x source tokens + `max_len_b` tokens."""

    beam: int = 4
    length_penalty: float = 1.0
    max_len_a: float = 2.0
    max_len_b: int = 20


class Translator:
    """A trained model from a checkpoint or folder, with weights in memory only during their use.

    A subclass has these attributes and methods; tokens of texts include the end of sentence.

    * ``kind``: host, architecture and position embedding, as text for reports;
    * ``files()``: files of the model for a fingerprint, without files that make its tokens;
    * ``source_ids(text)``, ``target_ids(text)``: tokens;
    * ``subwords(ids)``, ``text(ids)``: target tokens as strings, and as text;
    * ``load()``: the model, with its weights in single precision, on the CPU;
    * ``position_config(model)``: settings of the position embedding; None for a model that is not
      of this package;
    * ``score(model, sources, targets)``: ``[B, T]`` log probabilities (nats) of the target tokens,
      by teacher forcing;
    * ``generate(model, sources, decoding)``: the best hypothesis for each source, as text;
    * ``states(model, sources)``: the sum of embeddings and the output of each encoder layer before
      any final layer norm, each ``[B, S, C]``; and ``[B, S]`` bool, False on padding.
    """

    title = ""  # name and number of the seed, for progress and stored translations

    def __init__(self, path: Path, running: Running):
        self.path, self.running = path, running

    def plain(self, text: str) -> str:
        """Returns a line of the test text in the form of ``text(ids)``, for scoring."""
        return text

    def check_offset(self, offset: int) -> None:
        """Refuses, before hours of work, a model to whose positions no offset can be added."""
        model = self.load()
        try:
            with shifted(model, self.position_config(model), offset):
                pass
        except CommandError as error:
            raise CommandError(f"--model {self.path}: {error}") from None

    def target_length(self, text: str) -> int:
        """Number of subwords of a target text, without the end of sentence."""
        return len(self.target_ids(text)) - 1

    def log_probabilities(self, pairs: Sequence[Pair]) -> list[np.ndarray]:
        """Log probabilities (nats) of all target tokens, the end of sentence last."""
        ids = [(self.source_ids(source), self.target_ids(target)) for source, target in pairs]

        def score(model: nn.Module, rows: list[int]) -> list[np.ndarray]:
            sources, targets = map(list, zip(*(ids[row] for row in rows), strict=True))
            scores = self.score(model, sources, targets).cpu().double().numpy()
            # not named `ids`: Python 3.12 and 3.13 would then lose the `ids` above
            return [row[: len(target)] for row, target in zip(scores, targets, strict=True)]

        return self.over_batches([max(map(len, pair)) for pair in ids], score)

    def translate(self, sources: Sequence[str], decoding: Decoding, order: str = "") -> list[str]:
        """The best hypothesis for each source; `order` is added to the title."""
        ids = [self.source_ids(source) for source in sources]

        def generate(model: nn.Module, rows: list[int]) -> list[str]:
            return self.generate(model, [ids[row] for row in rows], decoding)

        return self.over_batches([len(row) * decoding.beam for row in ids], generate, order)

    def over_batches(
        self, lengths: Sequence[int], run: Callable[[nn.Module, list[int]], Any], order: str = ""
    ) -> list[Any]:
        """Results for all rows. `run` gets the model and the indices of the rows of a batch, and
        returns a result for each row."""
        result = {}
        title = f"{self.title} {order}".strip()
        with (
            self.at_work() as model,
            progress(title=title, total=len(lengths), unit="sentence") as bar,
        ):
            for rows in batches(lengths, self.running.max_tokens):
                result |= zip(rows, run(model, rows), strict=True)
                bar.update(len(rows))
        return [result[row] for row in range(len(lengths))]

    @contextmanager
    def at_work(self) -> Iterator[nn.Module]:
        """The model in evaluation mode on its device, with its positions moved by the offset."""
        running = self.running
        model = self.load().eval().to(running.device)
        if running.half:
            model.half()
        with shifted(model, self.position_config(model), running.offset), torch.no_grad():
            yield model


def batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Returns batches of indices of sentences with similar lengths. A batch has at most
    `max_tokens` tokens, padding included, or a single longer sentence. The longest sentences come
    first, so a lack of memory shows at once."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > max_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


def pad(rows: Sequence[Ids], value: int, device: torch.device) -> Tensor:
    """``[B, T]``, padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value).to(device)


@contextmanager
def shifted(model: nn.Module, config: PositionConfig | None, offset: int) -> Iterator[None]:
    """Moves all positions of a model by `offset` tokens, on the source and on the target side. The
    default offset is 0, as in the SHAPE paper; the released code uses K, one more than the largest
    offset of training. An offset for a learned table is an error.

    Models use a draw in training only, so the offset is set in the position encoder, which all
    calls use, including incremental decoding. Types that add nothing to the tokens ignore the
    offset: only distances count there, and large coordinates would be rounded.
    """
    if offset and (config is None or config.encoding.counts):
        without = [name for name, row in TYPES.items() if not ENCODINGS[row.encoding].adds]
        owner = "a learned table has" if config else "this architecture has"
        raise CommandError(
            f"offset {offset}: {owner} no positions to which an offset can be added; give models "
            "with sinusoids (sinpos, shape, cape) or without absolute positions "
            f"({', '.join(without)})"
        )
    encoders = (module for module in model.modules() if isinstance(module, PositionEncoder))
    starts = {encoder: encoder.start for encoder in encoders if encoder.config.encoding.adds}
    try:
        for encoder, start in starts.items():
            encoder.start = start + offset
        yield
    finally:
        for encoder, start in starts.items():
            encoder.start = start
