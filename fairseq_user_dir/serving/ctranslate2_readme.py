"""The README of a folder for ctranslate2 that holds a model of fairseq."""

from __future__ import annotations

from cape_plugins.serving.ctranslate2_notes import readme, search_options, translation_options
from fairseq_user_dir.serving.source import Source, start_of

_TRANSLATE = """
import sys

import ctranslate2

folder, file = sys.argv[1:]  # this folder; a text, one sentence a line, see below
translator = ctranslate2.Translator(folder)
with open(file, encoding="utf-8", newline="\\n") as lines:
    sentences = [line.split() for line in lines]
results = translator.translate_batch(
    sentences,
    max_batch_size=32,
    {options},
)
for result in results:
    print(" ".join(result.hypotheses[0]))
"""
_CONTINUE = """
import sys

import ctranslate2

folder, file = sys.argv[1:]  # this folder; a text, one beginning a line, see below
generator = ctranslate2.Generator(folder)
with open(file, encoding="utf-8", newline="\\n") as lines:
    beginnings = [["{start}", *line.split()] for line in lines]
results = generator.generate_batch(beginnings, max_batch_size=32, max_length={length})
for result in results:
    print(" ".join(result.sequences[0]))
"""
_TOKENS = (
    "A text is segmented as the training data were before fairseq-preprocess (words, BPE or "
    "SentencePiece) and split at spaces. Tokens that the dictionary does not have are read as "
    "`{unk}`; `<s>`, `</s>` and `<blank>`, padding, are the engine's own and never part of a text."
)


def translation_readme(
    source: Source, name: str, limits: dict[str, int | None], quantization: str | None
) -> str:
    """README of a translation model.

    Args:
        source: The model.
        name: Of its checkpoint.
        limits: Side to rows of its table; None without.
        quantization: Precision of the weights.
    """
    dictionary = source.task.source_dictionary
    bos, eos = dictionary.bos_word, dictionary.eos_word
    with_bos = source.model.encoder.position_config.source_bos
    source_text = f"`{bos}` before and `{eos}` after" if with_bos else f"`{eos}` after"
    longest = limits["target"] or 1024
    options = ",\n    ".join(f"{key}={value}" for key, value in search_options(longest).items())
    return readme(
        f"{name}: {described(source)}",
        program=_TRANSLATE.format(options=options),
        conventions=[
            f"The engine puts {source_text} the source (`config.json` says so) and starts the "
            f"target with `{eos}`. Give none of them.",
            _TOKENS.format(unk=dictionary.unk_word),
        ],
        rows=limits,
        options=[
            *translation_options(
                f"`fairseq-generate --beam 5 --min-len 0 --max-len-b {longest}` (which prints "
                "scores with base 2 and, by default, never gives an empty translation)"
            ),
            "`length_penalty` is fairseq's `--lenpen`, and batches of any size give the same. "
            "`target_prefix` is not quite `--prefix-size`: its tokens count nothing in the score "
            "here, in fairseq they do, so that beam search may end elsewhere.",
        ],
        quantization=quantization,
    )


def language_model_readme(
    source: Source, name: str, limits: dict[str, int | None], quantization: str | None
) -> str:
    """README of a language model; arguments as for translations."""
    dictionary, start = source.task.target_dictionary, start_of(source)
    return readme(
        f"{name}: {described(source)}",
        program=_CONTINUE.format(start=start, length=limits["target"] or 1024),
        conventions=[
            f"A text begins with `{start}`, as in training, which the caller puts there. The "
            f"engine ends it with `{dictionary.eos_word}`; a text to be scored has it at its end.",
            _TOKENS.format(unk=dictionary.unk_word),
        ],
        rows=limits,
        options=[
            "The result has the beginning, without its first token; `max_length` counts it, is 512 "
            "by default and leaves longer texts open, without a word.",
            "`generator.score_batch(texts, max_input_length=0)` gives the natural "
            "log-probabilities of fairseq-eval-lm, of all tokens but the first. Its default, 1024, "
            "cuts longer texts without a word.",
        ],
        quantization=quantization,
    )


def described(source: Source) -> str:
    """What a model is: "CapeTransformerModel, position embedding cape"."""
    config = source.model.decoder.position_config
    return f"{type(source.model).__name__}, position embedding {config.type}"
