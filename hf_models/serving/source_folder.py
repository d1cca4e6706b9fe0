"""Checks of the SOURCE of exports of Hugging Face models beside the model: files of tokenizers, and
tokens that the settings of generation forbid."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def refuse_data(args: Namespace) -> None:
    """Refuses ``--data``, which is for checkpoints of fairseq.

    Raises:
        ValueError: if ``--data`` is given.
    """
    if args.data:
        raise ValueError(
            f"--data {args.data} is not allowed for a Hugging Face model, whose folder has all it "
            "needs. Leave it out."
        )


@contextmanager
def saved_beside(source: Path, name: str, needed: str) -> Iterator[None]:
    """Turns errors of transformers about missing or damaged files beside a model into an error that
    shows how to write the files.

    Args:
        source: Folder of the model.
        name: Name of the loaded part, such as "tokenizer".
        needed: Why the engine needs the part, in words.

    Raises:
        ValueError: names the reason, and the call that writes the files.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the {name} of {source} cannot be loaded ({reason}); the engine needs {needed}. Save "
            f"it there: {name}.save_pretrained(SOURCE)."
        ) from None


def banned_tokens(generation: Any) -> tuple[list[int], list[int]]:
    """Tokens that generation never chooses, and tokens that generation does not choose first.

    Args:
        generation: Settings of generation.
    """
    single = (ids[0] for ids in generation.bad_words_ids or () if len(ids) == 1)
    never = {*single, *listed(generation.suppress_tokens)}
    return sorted(never), sorted(listed(generation.begin_suppress_tokens))


def listed(tokens: Any) -> list[int]:
    """List of the numbers of tokens, from one number, several or none."""
    return [tokens] if isinstance(tokens, int) else [*(tokens or ())]
