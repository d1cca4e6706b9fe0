"""The file format of whisper.cpp: header, mel filters, words, tensors; all numbers little-endian.

The format has no names for its numbers, no version and no fields for what other models may want:
whisper.cpp takes 16 kHz, windows of 400 samples every 160, GELU, feed-forward layers of four times
the width, and special tokens at places that follow from the number of tokens.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

MAGIC = 0x67676D6C
FLOAT32, FLOAT16 = 0, 1  # types of tensors
ENCODER_POSITIONS = "encoder.positional_embedding"
DECODER_POSITIONS = "decoder.positional_embedding"
SAMPLING_RATE, WINDOW, HOP = 16000, 400, 160  # samples
FEED_FORWARD = 4  # width of feed-forward layers, in widths of the model
MOST_POSITIONS = 1500  # of a recording; whisper.cpp reads recordings in segments of 30 s

_LEAST = 51864  # tokens of a model for English alone, which has the fewest
_END = 50256  # end of a text in a model for English alone; one more in all others
_TIMESTAMPS = 1501  # the last tokens of a vocabulary
# Tokens before the first timestamp, and their distance from the first timestamp.
_BEFORE_TIMESTAMPS = {"<|translate|>": 6, "<|transcribe|>": 5, "<|notimestamps|>": 1}
# Names in transformers, and in the file, in the order in which they are replaced.
_RENAMED = (
    (r"\.layers\.", ".blocks."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.(q|k|v)_proj\.", lambda found: f".{_PARTS[found[1]]}."),
    (r"\.out_proj\.", ".out."),
    (r"\.final_layer_norm\.", ".mlp_ln."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
)
_PARTS = {"q": "query", "k": "key", "v": "value"}
# Tables of positions, which the file has in another form.
_POSITIONS = re.compile(r"^(?:en|de)coder\.(?:embed_positions|positions)\.")


class Header(NamedTuple):
    """Sizes of a model, in the order of the file."""

    tokens: int
    audio_positions: int
    audio_width: int
    audio_heads: int
    audio_layers: int
    text_positions: int
    text_width: int
    text_heads: int
    text_layers: int
    bins: int
    weights: int = FLOAT16


def special_tokens(tokens: int) -> dict[str, int]:
    """Numbers of the special tokens, which whisper.cpp derives from the number of tokens.

    Args:
        tokens: Number of tokens in the header.

    Raises:
        ValueError: for fewer tokens than whisper.cpp has special tokens for.
    """
    if tokens < _LEAST:
        raise ValueError(
            f"the model has {tokens} tokens, so whisper.cpp would look for its special tokens, "
            f"such as {_END} for the end of a text, behind its last token; allowed: {_LEAST} "
            "tokens or more, in the order of the tokenizers of OpenAI. Begin the training with a "
            "tokenizer of OpenAI, or use `cape-plugins export ctranslate2` or `onnx`."
        )
    end = _END + (tokens > _LEAST)
    first = {"<|endoftext|>": end, "<|startoftranscript|>": end + 1}
    if tokens > _LEAST:
        first["<|en|>"] = end + 2
    stamps = tokens - _TIMESTAMPS
    return first | {name: stamps - before for name, before in _BEFORE_TIMESTAMPS.items()}


def tensors(weights: Mapping[str, Tensor], tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names in the file.

    Args:
        weights: Weights of a Whisper without its last layer, by the names in transformers.
        tables: Tables of positions ``[rows, C]`` by the names in the file.

    Returns:
        weights with their new names, biases of convolutions as ``[C, 1]``; then the tables.
    """
    renamed = {}
    for name, weight in weights.items():
        if _POSITIONS.match(name):
            continue
        for pattern, replacement in _RENAMED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = weight[:, None] if re.search(r"\.conv\d\.bias$", name) else weight
    return {**renamed, **tables}


def type_of(name: str, tensor: Tensor) -> int:
    """Type of a tensor in a file. Matrices have float16: whisper.cpp stops at convolutions in
    float32 (1.8.5). Vectors, biases and tables of positions have float32, as whisper.cpp expects.
    """
    exact = tensor.dim() < 2 or name.endswith((".bias", ".positional_embedding"))
    return FLOAT32 if exact else FLOAT16


def write_file(
    path: Path,
    header: Header,
    filters: Any,
    words: Sequence[bytes],
    weights: Mapping[str, Tensor],
) -> None:
    """Writes a model for whisper.cpp.

    Args:
        path: The new file.
        header: Sizes of the model.
        filters: ``[bins, frequencies]``, the mel filters.
        words: Words of the tokens before the end of a text, by number. whisper.cpp names the tokens
            that follow.
        weights: Tensors by their names in the file; see :func:`tensors`.

    Raises:
        ValueError: for weights that float16 does not hold.
    """
    filters = torch.as_tensor(filters, dtype=torch.float32)
    with path.open("wb") as file:
        _write_numbers(file, MAGIC, *header, *filters.shape)
        _write_values(file, filters)
        _write_numbers(file, len(words))
        for word in words:
            _write_numbers(file, len(word))
            file.write(word)
        for name, weight in weights.items():
            kind, label = type_of(name, weight), name.encode()
            weight = weight.half() if kind == FLOAT16 else weight.float()
            _refuse_overflow(name, weight)
            _write_numbers(file, weight.dim(), len(label), kind, *reversed(weight.shape))
            file.write(label)
            _write_values(file, weight)


def _refuse_overflow(name: str, weight: Tensor) -> None:
    if not weight.isfinite().all():
        raise ValueError(
            f"{name} has values beyond 65504, the largest number of float16, which the weights of "
            "the file have; allowed: smaller ones. Use `cape-plugins export ctranslate2` or `onnx`."
        )


def _write_numbers(file: BinaryIO, *numbers: int) -> None:
    file.write(struct.pack(f"<{len(numbers)}i", *numbers))


def _write_values(file: BinaryIO, values: Tensor) -> None:
    array = values.detach().cpu().contiguous().numpy()
    file.write(array.astype(array.dtype.newbyteorder("<")).tobytes())
