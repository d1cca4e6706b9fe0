"""Whisper as a file for whisper.cpp: ``cape-plugins export ggml FOLDER``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

import hf_models
from cape_plugins.serving.checks import refuse_large_table
from cape_plugins.serving.output import Exported
from cape_plugins.serving.templates import fill
from hf_models.families.whisper import CapeWhisperForConditionalGeneration
from hf_models.seams.natural_length import STRIDE
from hf_models.serving.ggml_file import (
    DECODER_POSITIONS,
    ENCODER_POSITIONS,
    FEED_FORWARD,
    HOP,
    MOST_POSITIONS,
    SAMPLING_RATE,
    WINDOW,
    Header,
    special_tokens,
    tensors,
    write_file,
)
from hf_models.serving.position_rows import is_centred, rows_in_time, rows_of_tokens
from hf_models.serving.source_folder import saved_beside
from hf_models.storage.loading import clear_errors, load_whole

FILE = "ggml-model.bin"
TEMPLATE = Path(__file__).with_name("ggml.md")
_OTHER_ENGINES = "`cape-plugins export ctranslate2` and `onnx` take the model"


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Writes the file of a model; see :mod:`cape_plugins.serving.command`.

    Raises:
        ValueError: for a model that whisper.cpp would compute differently, or that does not fit
            into the file; names the reason and a way that works.
    """
    with clear_errors(str(source)):
        model = _load(source)
    with saved_beside(source, "processor", "the bytes of the tokens and the kind of features"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        extractor = AutoFeatureExtractor.from_pretrained(source)
    rows = {
        "source": args.max_source_tokens or min(MOST_POSITIONS, model.config.max_source_positions),
        "target": args.max_target_tokens or model.config.max_target_positions,
    }
    write_model(model, tokenizer, extractor, folder / FILE, rows)
    size = (folder / FILE).stat().st_size / 2**20
    title = f"{type(model).__name__}, position embedding {model.config.position_config.type}"
    text = _readme(model, f"{source.resolve().name}: {title}", rows)
    return Exported(text, f"ggml: {title}, {size:.1f} MiB")


def write_model(
    model: PreTrainedModel,
    tokenizer: Any,
    extractor: Any,
    path: Path,
    rows: Mapping[str, int],
) -> None:
    """Writes a model, with its words and mel filters.

    Args:
        model: A Whisper of this package that writes texts.
        tokenizer: Tokenizer of the model.
        extractor: Feature extractor of the model.
        path: The new file.
        rows: Positions in the table of each side, "source" and "target"; a source position takes 20
            ms.

    Raises:
        ValueError: see :func:`export`.
    """
    config, encoder, decoder = model.config, model.get_encoder(), model.get_decoder()
    if rows["source"] > MOST_POSITIONS:
        raise ValueError(
            f"--max-source-tokens {rows['source']} is not allowed for ggml; allowed: up to "
            f"{MOST_POSITIONS}, because whisper.cpp reads longer recordings in segments of 30 s. "
            "Give fewer."
        )
    for side, count in rows.items():
        refuse_large_table(f"--max-{side}-tokens", count, config.d_model)
    _refuse_positions(config)
    _refuse_settings(model)
    _refuse_features(config, extractor)
    end = _refuse_tokens(config, tokenizer)
    tables = {
        ENCODER_POSITIONS: rows_in_time(encoder, rows["source"]),
        DECODER_POSITIONS: rows_of_tokens(decoder, rows["target"]),
    }
    header = Header(
        config.vocab_size,
        rows["source"],
        config.d_model,
        config.encoder_attention_heads,
        len(encoder.layers),
        rows["target"],
        config.d_model,
        config.decoder_attention_heads,
        len(decoder.layers),
        config.num_mel_bins,
    )
    weights = tensors(model.model.state_dict(), tables)
    write_file(path, header, extractor.mel_filters.T, _words(tokenizer, end), weights)


def _load(source: Path) -> PreTrainedModel:
    """The model of a folder in float32.

    Raises:
        ValueError: for another class.
    """
    config = AutoConfig.from_pretrained(source)
    name = (config.architectures or ["model without architecture"])[0]
    model_class = hf_models.MODELS.get(name)
    allowed = CapeWhisperForConditionalGeneration
    if model_class is None or not issubclass(model_class, allowed):
        raise ValueError(
            f"SOURCE {source} holds a {name}; allowed for export ggml: {allowed.__name__}. "
            "Converters of whisper.cpp take stock models; `cape-plugins export ctranslate2` and "
            "`onnx` take other models of this package."
        )
    model, new = load_whole(model_class, str(source))
    if new:
        raise ValueError(
            f"SOURCE {source} lacks weights of its positions, {', '.join(new)}; its config.json is "
            "of another model. Take weights and config.json from one model."
        )
    return model.float().eval()


def _refuse_positions(config: Any) -> None:
    for field in config.position_fields:
        settings = config.position_settings(field)
        if settings.in_attention:
            raise ValueError(
                f"{field}={getattr(config, field)!r} is not allowed for ggml: the file has a table "
                "of positions for each side, and no place for positions in attention; allowed: "
                "types that add to the content. Train with such a type, or see whether "
                f"{_OTHER_ENGINES}."
            )
        if settings.random_evaluation:
            raise ValueError(
                f"{field}={getattr(config, field)!r} is not allowed for ggml, which has the same "
                "positions in each call; allowed: random_evaluation=False. Set it in config.json."
            )


def _refuse_settings(model: Any) -> None:
    """Refuses settings that whisper.cpp has as constants, and the file has no number for."""
    config = model.config
    width = FEED_FORWARD * config.d_model
    fixed = {
        "activation_function": "gelu",
        "scale_embedding": False,
        "encoder_ffn_dim": width,
        "decoder_ffn_dim": width,
        "hop_seconds": HOP / SAMPLING_RATE,
    }
    for name, allowed in fixed.items():
        if getattr(config, name) != allowed:
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not allowed for ggml, whose file has no "
                f"number for {name}; allowed: {allowed!r}. Train with this value, or see whether "
                f"{_OTHER_ENGINES}."
            )
    if not model.proj_out.weight.equal(model.get_decoder().embed_tokens.weight):
        raise ValueError(
            "tie_word_embeddings=False is not allowed for ggml: the last layer has other weights "
            "than the table of words, and the file has one tensor for both; allowed: equal "
            f"weights. Train with tied weights, or see whether {_OTHER_ENGINES}."
        )


def _refuse_features(config: Any, extractor: Any) -> None:
    fixed = {
        "sampling_rate": SAMPLING_RATE,
        "n_fft": WINDOW,
        "hop_length": HOP,
        "feature_size": config.num_mel_bins,
    }
    for name, allowed in fixed.items():
        value = getattr(extractor, name, None)
        if value != allowed:
            raise ValueError(
                f"{name}={value!r} of the feature extractor is not allowed for ggml, whose engine "
                f"computes the features itself; allowed: {allowed!r}. Take the extractor that the "
                f"model was trained with, or see whether {_OTHER_ENGINES}."
            )


def _refuse_tokens(config: Any, tokenizer: Any) -> int:
    """The number of the end of a text, if all special tokens are where whisper.cpp looks for
    them."""
    for name, number in special_tokens(config.vocab_size).items():
        actual = tokenizer.convert_tokens_to_ids(name)
        if actual != number:
            raise ValueError(
                f"token {name} has number {actual}, but with {config.vocab_size} tokens whisper.cpp"
                f" takes number {number} for it; allowed: the order of the tokenizers of OpenAI, "
                "with as many rows in the table of words as the tokenizer has tokens "
                f"(model.resize_token_embeddings). Else see whether {_OTHER_ENGINES}."
            )
    return special_tokens(config.vocab_size)["<|endoftext|>"]


def _words(tokenizer: Any, end: int) -> list[bytes]:
    """Bytes of the tokens before the end of a text, by number.

    Raises:
        ValueError: for tokens that are no bytes, or a space that is no token, without which
            whisper.cpp stops.
    """
    numbers = {letter: byte for byte, letter in bytes_to_unicode().items()}
    names = tokenizer.convert_ids_to_tokens(list(range(end)))
    try:
        words = [bytes(numbers[letter] for letter in name or "") for name in names]
    except KeyError as error:
        raise ValueError(
            f"the tokenizer has a token with {error.args[0]!r}, which stands for no byte; allowed: "
            f"byte-level tokens, as of OpenAI's tokenizers. Else see whether {_OTHER_ENGINES}."
        ) from None
    if b" " not in words:
        raise ValueError(
            "the tokenizer has no token for one space, which whisper.cpp looks up at the beginning "
            "of each text; allowed: tokenizers with all bytes. Take one of OpenAI."
        )
    return words


def _readme(model: Any, title: str, rows: Mapping[str, int]) -> str:
    centred, natural = is_centred(model), model.config.at_natural_length
    step = STRIDE * HOP
    return fill(
        TEMPLATE,
        title=title,
        file=FILE,
        rows=rows["source"],
        step=step,
        seconds=f"{rows['source'] * step / SAMPLING_RATE:g}",
        room=rows["target"] // 2 - 4,  # tokens of a text, as whisper.cpp limits them
        centred=centred,
        natural_length=natural and not centred,
        padded=not natural and not centred,
    )
