"""The Translator of ctranslate2 on exported checkpoints of fairseq."""

from pathlib import Path

import ctranslate2

from benchmarks.engines.task import Search, Step, read_sources

FLOAT32, INT8 = "ctranslate2", "ctranslate2-int8"  # names of folders


def float32(folder: Path, search: Search) -> Step:
    """Weights in float32."""
    return _translator(folder, FLOAT32, search)


def int8(folder: Path, search: Search) -> Step:
    """Weights in 8 bits."""
    return _translator(folder, INT8, search)


def _translator(folder: Path, model: str, search: Search) -> Step:
    translator = ctranslate2.Translator(str(folder / model), intra_threads=search.threads)
    sentences = read_sources(folder, search)
    return lambda: translator.translate_batch(
        sentences,
        beam_size=search.beam,
        max_input_length=0,
        min_decoding_length=search.length,
        max_decoding_length=search.length,
    )
