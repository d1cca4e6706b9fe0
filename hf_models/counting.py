"""Source scale alpha of raw text, counted with the tokenizer of a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from tqdm import tqdm
from transformers import AutoTokenizer

from cape_plugins.corpus.alpha import TokenCounts, count_token_lists
from cape_plugins.settings.config import parse_option
from cape_plugins.settings.options import COUNTED
from cape_plugins.utils.texts import first_line, text_lines


def token_lists(
    model: str | os.PathLike[str], eos: bool = True
) -> Callable[..., Iterator[list[int]]]:
    """Splits raw text files with a tokenizer, one sentence a line, with progress bars.

    Args:
        model: Folder or hub name of a model with a tokenizer. Tokens that the tokenizer adds to a
            sentence count (EOS, language codes), except BOS, as everywhere in this package.
        eos: Count the end-of-sentence tokens, too; the CAPE paper's notebook does not.

    Returns:
        A function that gives the tokens of each line of a text file in UTF-8 (``.gz`` is
        decompressed); ``target=True`` marks a target text.

    Raises:
        ValueError: if there is no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as error:
        raise ValueError(
            f"the tokenizer of {model} cannot be loaded ({first_line(error)}); give a folder with "
            "the files of a tokenizer, or the name of a model on the hub."
        ) from None

    def tokens(path: str | os.PathLike[str], target: bool = False) -> Iterator[list[int]]:
        side = "text_target" if target else "text"
        for line in tqdm(text_lines(path), desc=str(path), unit=" lines", disable=None):
            ids = tokenizer(**{side: line}, verbose=False)["input_ids"]
            ids = ids[1:] if ids[:1] == [tokenizer.bos_token_id] else ids
            yield ids if eos else [token for token in ids if token != tokenizer.eos_token_id]

    return tokens


def count_texts(
    source_path: str | os.PathLike[str],
    target_path: str | os.PathLike[str],
    model: str | os.PathLike[str],
    eos: bool = True,
) -> TokenCounts:
    """Counts the tokens of two parallel raw text files, the source first; see :func:`token_lists`.

    Raises:
        FileNotFoundError: if a text is missing.
        ValueError: if a text is damaged, if the line counts differ, or if there is no tokenizer.
    """
    tokens = token_lists(model, eos)
    return count_token_lists(
        tokens(source_path),
        tokens(target_path, target=True),
        names=(str(source_path), str(target_path)),
    )


def alpha_of_argument(argument: str, model: str) -> str:
    """Alpha of a command line, as text for ``source_scale``: a number, or TARGET/SOURCE counts.
    Args:
        argument: A number > 0, TARGET/SOURCE tokens, or two texts to count,
            "SOURCE.txt,TARGET.txt".
        model: Folder or hub name of the model whose tokenizer counts.

    Raises:
        ValueError: for other values, or as :func:`count_texts`.
    """
    files = argument.split(",")
    if len(files) == 2:
        counts = count_texts(*files, model)
        print(f"alpha = {counts} = {counts.alpha:.4f} target tokens per source token")
        return str(counts)
    try:
        if argument in COUNTED or len(files) > 2:
            raise ValueError
        return parse_option("source_scale", argument)
    except ValueError:
        raise ValueError(
            f"--position-source-scale {argument} is not allowed; allowed: a number > 0, "
            "TARGET/SOURCE tokens, or two texts to count, SOURCE.txt,TARGET.txt."
        ) from None
