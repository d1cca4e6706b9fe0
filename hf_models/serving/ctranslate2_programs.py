"""The program in the README of a translation model for ctranslate2: plain text in and out, with the
files of the tokenizer that stand in the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = """
import sys

import ctranslate2
{imports}

folder, file = sys.argv[1:]  # this folder; a text, one sentence a line
translator = ctranslate2.Translator(folder)
{tokenizer}
with open(file, encoding="utf-8", newline="\\n") as lines:
    sentences = [{encode} for line in lines]
results = translator.translate_batch(
    sentences,
    max_batch_size=32,
    {options},
)
for result in results:
    tokens = result.hypotheses[0]{rest}
    print({decode})
"""


def program(tokenizer: Any, folder: Path, options: Mapping[str, Any], prefix: Sequence[str]) -> str:
    """About twenty lines of Python that need ctranslate2 and one small package for the tokens.

    Args:
        tokenizer: That of the model.
        folder: With its files.
        options: Of ``translate_batch``.
        prefix: Tokens that every translation begins with.
    """
    lines = [f"{name}={value!r}" for name, value in options.items()]
    if prefix:
        lines.append(f"target_prefix=[{list(prefix)!r}] * len(sentences)")
    saved = (folder / "tokenizer.json").exists()
    parts = _with_tokenizers() if saved else _with_sentencepiece(tokenizer, folder)
    rest = f"[{len(prefix)}:]" if prefix else ""
    return _PROGRAM.format(**parts, options=",\n    ".join(lines), rest=rest)


def _with_tokenizers() -> dict[str, str]:
    return {
        "imports": "import tokenizers",
        "tokenizer": 'tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")\n'
        "tokenizer.no_truncation()",
        "encode": "tokenizer.encode(line.strip()).tokens",
        "decode": "tokenizer.decode([tokenizer.token_to_id(token) for token in tokens])",
    }


def _with_sentencepiece(tokenizer: Any, folder: Path) -> dict[str, str]:
    names = tokenizer.vocab_files_names.values()
    models = [name for name in names if Path(name).suffix in (".spm", ".model")]
    models = [name for name in models if (folder / name).exists()]
    if not models:
        return {
            "imports": "",
            "tokenizer": "# the text consists of tokens with spaces between them",
            "encode": "line.split()",
            "decode": '" ".join(tokens)',
        }
    before, after = _around(tokenizer)
    load = "sentencepiece.SentencePieceProcessor"
    return {
        "imports": "import sentencepiece",
        "tokenizer": f'source = {load}(model_file=f"{{folder}}/{models[0]}")\n'
        f'target = {load}(model_file=f"{{folder}}/{models[-1]}")',
        "encode": f"{before!r} + source.encode(line.strip(), out_type=str) + {after!r}",
        "decode": "target.decode(tokens)",
    }


def _around(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Tokens that the tokenizer puts before and after a text."""
    empty = tokenizer.build_inputs_with_special_tokens([tokenizer.unk_token_id])
    place = empty.index(tokenizer.unk_token_id)
    names = tokenizer.convert_ids_to_tokens
    return names(empty[:place]), names(empty[place + 1 :])
