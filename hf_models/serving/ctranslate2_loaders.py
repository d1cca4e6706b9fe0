"""CTranslate2's loaders of Hugging Face models, with the positions of this package instead of stock
positions: tables, and relative keys in attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ctranslate2.converters import transformers as stock
from ctranslate2.specs import attention_spec, model_spec

from cape_plugins.serving.checks import refuse_large_table
from cape_plugins.serving.ctranslate2_tables import (
    has_table,
    needs_identity,
    refuse_missing,
    relative_rows,
    rotary_options,
)
from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.serving.position_rows import rows_in_time, rows_of_tokens
from hf_models.serving.source_folder import banned_tokens
from hf_models.storage.other_files import copy_other_files

# Acts like minus infinity before a softmax, and is a number in half precision, too.
NEVER = -1e4


class TablesInPlace:
    """Mixin over a loader of CTranslate2: positions are rows of tables.

    Args:
        source_rows: Rows of the table of the encoder.
        target_rows: Rows of the table of the decoder.
    """

    def __init__(self, source_rows: int, target_rows: int) -> None:
        self.rows = {"encoder": source_rows, "decoder": target_rows}

    def write(self, model: Any, tokenizer: Any, folder: Path, quantization: str | None) -> None:
        """Writes a folder for the engine.

        Args:
            model: A copy without gradients, because conversion to int8 writes into the tensors.
            tokenizer: Tokenizer of the model.
            folder: Empty folder.
            quantization: Precision of the weights; None for the precision of the model.
        """
        with torch.no_grad():
            spec = self(model, tokenizer)
        spec.validate()
        spec.optimize(quantization=quantization)
        spec.save(str(folder))

    def set_encoder(self, spec: Any, encoder: Any) -> None:
        """See CTranslate2."""
        make_room(spec, encoder)
        super().set_encoder(spec, encoder)
        spec.position_encodings.encodings = self.table(encoder, "encoder")

    def set_decoder(self, spec: Any, decoder: Any) -> None:
        """See CTranslate2."""
        make_room(spec, decoder)
        super().set_decoder(spec, decoder)
        spec.position_encodings.encodings = self.table(decoder, "decoder")

    def set_position_encodings(self, spec: Any, module: Any) -> None:
        """Does nothing: the module of a switched model adds embeddings that are bound to the
        module; :meth:`table` gives the table of these embeddings."""

    def set_attention(self, spec: Any, attention: Any, self_attention: bool = False) -> None:
        """Sets relative keys and values as well."""
        super().set_attention(spec, attention, self_attention)
        relative = getattr(attention, "relative", None)
        if relative is not None:
            spec.relative_position_keys = relative_rows(relative.keys, relative.clip)
            spec.relative_position_values = model_spec.OPTIONAL
            if relative.values is not None:
                values = relative_rows(relative.values, relative.clip)
                spec.relative_position_values = values

    def table(self, stack: Any, side: str) -> Any:
        """``[rows, C]``, the positions that a stack adds in evaluation. Zeros if the stack adds
        nothing, because without a table CTranslate2 adds sinusoids, unless the first layer has
        relative keys."""
        if not has_table(stack.positions.config):
            return model_spec.OPTIONAL
        return rows_of_tokens(stack, self.rows[side])


class TranslationLoader(TablesInPlace, stock.BartLoader):
    """Loader of encoders and decoders of tokens, with norms before or after each block."""

    def get_model_spec(self, model: Any) -> Any:
        """See CTranslate2. The modules show where norms stand; newer configurations do not."""
        stack = model.get_encoder()
        model.config.normalize_before = hasattr(stack, "layer_norm")
        model.config.normalize_embedding = hasattr(stack, "layernorm_embedding")
        spec = super().get_model_spec(model)
        spec.decoder.num_heads = np.int16(model.config.decoder_attention_heads)
        never, _ = banned_tokens(model.generation_config)
        if never:
            bias = torch.zeros(model.lm_head.out_features)
            if getattr(model, "final_logits_bias", None) is not None:
                bias += model.final_logits_bias.flatten().to(bias)
            bias[never] += NEVER
            spec.decoder.projection.bias = bias
        return spec

    def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
        """Sets the tokens before source and target, from the settings of generation."""
        encoder, generation = model.get_encoder(), model.generation_config
        sources, targets = vocabularies(model, tokenizer)
        config.bos_token = sources[encoder.bos_token]
        config.eos_token = tokenizer.eos_token
        config.unk_token = tokenizer.unk_token
        config.add_source_bos = encoder.has_hint
        config.add_source_eos = False  # the tokenizer adds EOS and language codes
        start = generation.decoder_start_token_id
        config.decoder_start_token = None if start is None else targets[start]

    def get_vocabulary(self, model: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
        """Tokens of source and target, which may differ."""
        return vocabularies(model, tokenizer)

    def set_vocabulary(self, spec: Any, tokens: tuple[list[str], list[str]]) -> None:
        """See CTranslate2."""
        source, target = tokens
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)


class RecognitionLoader(TablesInPlace, stock.WhisperLoader):
    """Loader of Whisper, with a table of positions in time of any length."""

    def table(self, stack: Any, side: str) -> Any:
        """``[rows, C]``; positions of the encoder are times."""
        if not isinstance(stack, NaturalLengthEncoder):
            return super().table(stack, side)
        return rows_in_time(stack, self.rows[side])


def make_room(spec: Any, stack: Any) -> None:
    """Gives layers with positions in attention a place for these positions; CTranslate2 has them
    in all layers or in none."""
    config = stack.positions.config
    for index, layer in enumerate(stack.layers):
        options = {}
        if getattr(layer.self_attn, "relative", None) is not None:
            options = {"relative_position": True}
        elif config.encoding.turns and config.in_layer(index):
            options = rotary_options(config)
        if options:
            attention = attention_spec.MultiHeadAttentionSpec(self_attention=True, **options)
            spec.layer[index].self_attention = attention


def vocabularies(model: Any, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Tokens of source and target by their numbers."""
    source = target = tokenizer.get_vocab()
    if getattr(tokenizer, "separate_vocabs", False):  # Marian only
        target = tokenizer.target_encoder
    return (
        _named(tokenizer, source, model.get_encoder().embed_tokens),
        _named(tokenizer, target, model.get_decoder().embed_tokens),
    )


def _named(tokenizer: Any, vocabulary: dict[str, int], embedding: Any) -> list[str]:
    """A different name for each row of a table of words. Some models have more rows than their
    tokenizer has words, and some tokenizers hide words (M2M100: codes of languages).
    """
    names = {number: name for name, number in vocabulary.items()}
    tokens: dict[str, int] = {}
    for number in range(embedding.num_embeddings):
        token = names.get(number)
        if token is None and number >= len(vocabulary):
            try:
                token = tokenizer.convert_ids_to_tokens(number)
            except IndexError:  # Marian
                token = None
            token = None if token == tokenizer.unk_token else token
        if token is None or token in tokens:
            token = f"madeupword{number}"
        tokens[token] = number
    return list(tokens)


def write_tokenizer(source: Path, folder: Path, tokenizer: Any) -> None:
    """Copies the files of the tokenizer and of generation. Writes ``tokenizer.json``, which
    programs without transformers read, if a fast tokenizer has been saved without this file."""
    copy_other_files(source, folder)
    path = folder / "tokenizer.json"
    if tokenizer.is_fast and not path.exists():
        tokenizer.backend_tokenizer.save(str(path))


def refuse_large_tables(model: Any, rows: Mapping[str, int]) -> None:
    """Refuses more rows than the memory holds; see
    :func:`~cape_plugins.serving.checks.refuse_large_table`."""
    for side, count in rows.items():
        refuse_large_table(f"--max-{side}-tokens", count, model.config.hidden_size)


def refuse_unfit(stack: Any, beside: bool) -> None:
    """Raises for positions that CTranslate2 does not have.

    Args:
        stack: Encoder or decoder.
        beside: Whether the stack can have both a table and relative keys.

    Raises:
        ValueError: names the option, and a way that works.
    """
    config = stack.positions.config
    remedy = "serve this model by transformers, or by `cape-plugins export onnx`"
    refuse_missing(config, True, f"Otherwise {remedy}.")
    tables = (getattr(layer.self_attn, "relative", None) for layer in stack.layers)
    if any(table is not None and table.keys.shape[0] > 1 for table in tables):
        raise ValueError(
            f"relative_heads={config.relative_heads!r} is not allowed for ctranslate2, whose heads "
            f"share one table; allowed: 'shared'. Train with one table, or {remedy}."
        )
    if needs_identity(config) and not beside:
        raise ValueError(
            f"relative_context={config.relative_context} beside position embedding "
            f"{config.type!r} is not allowed for ctranslate2, which adds nothing to the content "
            "where the first layer has relative keys; allowed: one of the two alone, or an encoder "
            f"and decoder of text with norms before their blocks. Train such a model, or {remedy}."
        )
