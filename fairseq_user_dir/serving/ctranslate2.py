"""Models of fairseq as folders for ctranslate2: ``cape-plugins export ctranslate2 CHECKPOINT``.

ctranslate2's converter for fairseq sets the weights of stock layers. This file and folding.py write
the parts that the converter refuses or leaves out: tables of positions, the BOS hint, ADMIN, and
positions in attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import fairseq as stock
from ctranslate2.converters.converter import Converter
from ctranslate2.specs import model_spec, transformer_spec
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec
from fairseq.data import Dictionary
from fairseq.tokenizer import tokenize_line
from torch import nn

from cape_plugins import RelativePositions
from cape_plugins.serving.checks import refuse_large_table
from cape_plugins.serving.ctranslate2_check import (
    check_length,
    compare,
    largest_of,
    read_sentences,
    refuse_difference,
    search_options,
    translate,
)
from cape_plugins.serving.ctranslate2_readme import (
    LANGUAGE_MODEL,
    TRANSLATION,
    keywords,
    longest_target,
    precision_notes,
    readme,
)
from cape_plugins.serving.ctranslate2_tables import (
    has_table,
    needs_identity,
    put_identity_first,
    refuse_missing,
    relative_rows,
    rotary_options,
)
from cape_plugins.serving.output import Exported
from cape_plugins.settings.arguments import FAIRSEQ
from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.serving.folding import empty_table, folded, layers_of, width_of
from fairseq_user_dir.serving.source_checkpoint import Source, load_source, score, start_of
from fairseq_user_dir.serving.source_checkpoint import translate as translate_by_fairseq

_PAD = "<blank>"  # ctranslate2's name of padding
_LONGEST = 200  # fairseq-generate's --max-len-b
_REMEDY = "Serve it by fairseq-generate, or train a Hugging Face model and export that to onnx."


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Converts a checkpoint into a folder; see :mod:`cape_plugins.serving.command`.

    Raises:
        SettingsError: for models that do not fit; names the reason, and what works instead.
        ValueError: if a check finds a difference.
    """
    sentences = [] if args.check is None else read_sentences(args.check, _words)
    loaded = load_source(source, args.data)
    rows = {"source": args.max_source_tokens, "target": args.max_target_tokens}
    limits = write_model(loaded, folder, rows, args.quantization)
    is_translation = "encoder" in loaded.stacks
    config = loaded.model.decoder.position_config
    title = f"{type(loaded.model).__name__}, position embedding {config.type}"
    size = (folder / "model.bin").stat().st_size / 2**20
    report = [f"ctranslate2: {title}, {size:.1f} MiB"]
    report += precision_notes(args.quantization, ctranslate2.get_supported_compute_types("cpu"))
    if sentences:
        check = check_translations if is_translation else check_scores
        report.append(check(loaded, folder, sentences, limits, args.quantization))
    text = _readme(loaded, f"{source.name}: {title}", limits, args.quantization)
    return Exported(text, "\n".join(report))


def write_model(
    source: Source, folder: Path, rows: dict[str, int], quantization: str | None = None
) -> dict[str, int | None]:
    """Writes a copy of the model, because conversion to int8 writes into the tensors of the
    converted model.

    Args:
        source: The model.
        folder: Empty folder.
        rows: Positions in the table of each side, "source" and "target".
        quantization: Precision of the weights; None for the precision of the model.

    Returns:
        Rows of the table of each side; None for a side without a table, which has no limit.

    Raises:
        ValueError: for positions that the engine lacks, and for too many rows.
    """
    sides = {"encoder": "source", "decoder": "target"}
    for name, stack in source.stacks.items():
        refuse_missing(stack.position_config, "encoder" in source.stacks, _REMEDY)
        _check_relative(name, stack)
        refuse_large_table(f"--max-{sides[name]}-tokens", rows[sides[name]], width_of(stack))
    plain = folded(source.model, rows["source"], rows["target"]).requires_grad_(False)
    copied = Source(plain, source.task)
    limits = {sides[name]: _fit(stack, rows[sides[name]]) for name, stack in copied.stacks.items()}
    _Converter(copied, limits).convert(str(folder), quantization=quantization, force=True)
    return limits


# ---- stacks --------------------------------------------------------------------------------------


def _fit(stack: nn.Module, rows: int) -> int | None:
    """Adds the parts that the engine needs to a plain stack. Returns the number of rows of the
    table of positions; None without a table."""
    config = stack.position_config
    if needs_identity(config):
        put_identity_first(stack.layers)
    if not config.encoding.adds:
        stack.embed_positions = empty_table(stack, rows if has_table(config) else 1)
    return rows if has_table(config) else None


def _check_relative(side: str, stack: nn.Module) -> None:
    """Refuses relative attention that the engine lacks."""
    config = stack.position_config
    layers = layers_of(stack)
    tables = [layer.self_attn.relative for layer in layers if hasattr(layer.self_attn, "relative")]
    if not tables:
        return
    if tables[0].keys.shape[0] > 1:
        raise SettingsError(
            f"--position-relative-heads {config.relative_heads} is not in ctranslate2, whose heads "
            "share one table; allowed: shared. Serve the model by fairseq-generate, or train with "
            "--position-relative-heads shared."
        )
    if needs_identity(config) and not layers[0].normalize_before:
        raise SettingsError(
            f"--position-relative-context {config.relative_context} beside --position-embedding "
            f"{config.type} is not in ctranslate2 for a post-LN model: ctranslate2 adds no "
            "positions to the content if the first layer has relative keys. Allowed: a pre-LN "
            f"model (--{side}-normalize-before), or one of the two options alone. Serve this "
            "model by fairseq-generate."
        )


class _Converter(Converter):
    """Makes the specification of plain stacks; the base class writes the specification to files.

    Args:
        source: A copy of the model with plain stacks.
        limits: Rows of the table of each side; None without a table.
    """

    def __init__(self, source: Source, limits: dict[str, int | None]) -> None:
        self.source = source
        self.limits = limits

    def _load(self) -> model_spec.ModelSpec:
        if "encoder" in self.source.stacks:
            return self._translation()
        return self._language_model()

    def _translation(self) -> transformer_spec.TransformerSpec:
        model, task = self.source
        encoder = transformer_spec.TransformerEncoderSpec(**_sizes(model.encoder))
        decoder = transformer_spec.TransformerDecoderSpec(
            **_sizes(model.decoder),
            **_projections(model.decoder),
            **_alignment(model),
        )
        spec = transformer_spec.TransformerSpec(encoder, decoder)
        stock.set_transformer_encoder(spec.encoder, model.encoder)
        stock.set_transformer_decoder(spec.decoder, model.decoder)
        _finish(spec.encoder, model.encoder, self.limits["source"])
        _finish(spec.decoder, model.decoder, self.limits["target"])
        spec.register_source_vocabulary(_vocabulary(task.source_dictionary))
        spec.register_target_vocabulary(_vocabulary(task.target_dictionary))
        _name_symbols(spec.config, task.source_dictionary)
        spec.config.add_source_bos = model.encoder.position_config.source_bos
        spec.config.add_source_eos = True
        spec.config.decoder_start_token = spec.config.eos_token
        return spec

    def _language_model(self) -> transformer_spec.TransformerDecoderModelSpec:
        model, task = self.source
        decoder = transformer_spec.TransformerDecoderSpec(
            **_sizes(model.decoder), **_projections(model.decoder), with_encoder_attention=False
        )
        spec = transformer_spec.TransformerDecoderModelSpec(decoder)
        stock.set_transformer_decoder(spec.decoder, model.decoder, with_encoder_attention=False)
        _finish(spec.decoder, model.decoder, self.limits["target"])
        spec.register_vocabulary(_vocabulary(task.target_dictionary))
        _name_symbols(spec.config, task.target_dictionary)
        spec.config.bos_token = start_of(self.source)
        return spec


def _sizes(stack: nn.Module) -> dict[str, Any]:
    """Arguments of a specification that encoders and decoders share."""
    layers, activation = layers_of(stack), stack.cfg.activation_fn
    activations = stock._SUPPORTED_ACTIVATIONS
    if activation not in activations:
        raise SettingsError(
            f"--activation-fn {activation} is not in ctranslate2; allowed: "
            f"{', '.join(activations)}. Serve the model by fairseq-generate."
        )
    return {
        "num_layers": len(layers),
        "num_heads": layers[0].self_attn.num_heads,
        "pre_norm": layers[0].normalize_before,
        "no_final_norm": stack.layer_norm is None,
        "activation": activations[activation],
        "layernorm_embedding": stack.layernorm_embedding is not None,
    }


def _projections(decoder: nn.Module) -> dict[str, bool]:
    present = {decoder.project_in_dim is not None, decoder.project_out_dim is not None}
    if len(present) > 1:
        raise SettingsError(
            "--decoder-input-dim and --decoder-output-dim differ, and one of them differs from "
            "--decoder-embed-dim; allowed in ctranslate2: all three equal, or the first two "
            "equal. Serve the model by fairseq-generate."
        )
    return {"project_in_out": present.pop()}


def _alignment(model: nn.Module) -> dict[str, int]:
    """The attention that the engine returns: for transformer_align the attention of the layer that
    was trained for alignment, for other models the mean over all heads of the last layer."""
    layer, heads = getattr(model, "alignment_layer", -1), getattr(model, "alignment_heads", 0)
    num_trained = model.decoder.num_layers  # without an identity layer before the trained layers
    if not 0 <= layer < num_trained:  # the engine would read memory outside of its tensors
        return {"alignment_layer": -1, "alignment_heads": 0}
    return {
        "alignment_layer": layer + len(model.decoder.layers) - num_trained,
        "alignment_heads": heads,
    }


def _finish(spec: Any, stack: nn.Module, limit: int | None) -> None:
    """Sets the values that ctranslate2's converter does not know."""
    if limit is None:
        spec.position_encodings.encodings = model_spec.OPTIONAL
    config = stack.position_config
    if config.encoding.biases:
        spec.alibi = True
    for index, layer in enumerate(layers_of(stack)):
        tables = getattr(layer.self_attn, "relative", None)
        if tables is not None:
            _set_relative(spec.layer[index], tables)
        elif config.encoding.turns and config.in_layer(index):
            _change_attention(spec.layer[index], **rotary_options(config))


def _change_attention(layer_spec: Any, **options: Any) -> MultiHeadAttentionSpec:
    """Gives a layer another specification of self-attention with the same weights."""
    plain = layer_spec.self_attention
    layer_spec.self_attention = MultiHeadAttentionSpec(self_attention=True, **options)
    layer_spec.self_attention.layer_norm = plain.layer_norm
    layer_spec.self_attention.linear = plain.linear
    return layer_spec.self_attention


def _set_relative(layer_spec: Any, tables: RelativePositions) -> None:
    attention = _change_attention(layer_spec, relative_position=True)
    attention.relative_position_keys = relative_rows(tables.keys, tables.clip).numpy()
    attention.relative_position_values = model_spec.OPTIONAL
    if tables.values is not None:
        attention.relative_position_values = relative_rows(tables.values, tables.clip).numpy()


def _vocabulary(dictionary: Dictionary) -> list[str]:
    symbols = list(dictionary.symbols)
    symbols[dictionary.pad()] = _PAD
    return symbols


def _name_symbols(config: Any, dictionary: Dictionary) -> None:
    config.bos_token = dictionary[dictionary.bos()]
    config.eos_token = dictionary[dictionary.eos()]
    config.unk_token = dictionary[dictionary.unk()]


# ---- check ---------------------------------------------------------------------------------------


def check_translations(
    source: Source,
    folder: Path,
    sentences: Sequence[str],
    limits: dict[str, int | None],
    quantization: str | None = None,
) -> str:
    """Translates with fairseq and with the folder; see
    :func:`~cape_plugins.serving.ctranslate2_check.compare`."""
    tokens = [tokenize_line(sentence) for sentence in sentences]
    _check_symbols(source.task.source_dictionary, tokens)
    added = 1 + source.model.encoder.position_config.source_bos
    lengths = [len(line) + added for line in tokens]
    longest = max(lengths)
    check_length("source", longest, limits)
    cap = min(limits["target"] or longest + _LONGEST, max(_LONGEST, 2 * longest))
    translator = ctranslate2.Translator(str(folder), device="cpu")
    eos = source.task.target_dictionary.eos_word
    by_engine = translate(translator, tokens, cap, eos)
    by_host = translate_by_fairseq(source, sentences, cap)
    return compare(by_host, by_engine, lengths, quantization)


def check_scores(
    source: Source,
    folder: Path,
    sentences: Sequence[str],
    limits: dict[str, int | None],
    quantization: str | None = None,
) -> str:
    """Compares the log-probabilities of texts in fairseq and in ctranslate2, for a language model.

    Raises:
        ValueError: if log-probabilities differ by more than rounding although the weights were not
            rounded.
    """
    ends = [start_of(source)], [source.task.target_dictionary.eos_word]
    tokens = [tokenize_line(sentence) for sentence in sentences]
    _check_symbols(source.task.source_dictionary, tokens)
    texts = [[*ends[0], *line, *ends[1]] for line in tokens]
    longest = max(map(len, texts)) - 1
    check_length("target", longest, limits)
    generator = ctranslate2.Generator(str(folder), device="cpu")
    results = generator.score_batch(texts, max_batch_size=32, max_input_length=0)
    largest = largest_of(
        abs(ours - theirs)
        for result, scores in zip(results, score(source, sentences), strict=True)
        for ours, theirs in zip(scores, result.log_probs, strict=True)
    )
    report = (
        f"check: log-probabilities of the tokens of {len(texts)} texts of up to {longest} tokens "
        f"differ by at most {largest:.1e}"
    )
    refuse_difference(largest, report, quantization)
    return report


def _words(line: str) -> int:
    return len(tokenize_line(line))


def _check_symbols(dictionary: Dictionary, lines: Sequence[Sequence[str]]) -> None:
    """Refuses symbols that are not words: ctranslate2 reads such a symbol by its meaning in the
    vocabulary, and fairseq by its name in the dictionary.

    Raises:
        SettingsError: names the symbol.
    """
    special = {*dictionary.symbols[: dictionary.nspecial], _PAD} - {dictionary.unk_word}
    for line in lines:
        for word in line:
            if word in special:
                raise SettingsError(
                    f"--check: fairseq and ctranslate2 may read the symbol {word} of a sentence "
                    f"differently; allowed: words. Leave {', '.join(sorted(special))} out."
                )


def _readme(
    source: Source, title: str, limits: dict[str, int | None], quantization: str | None
) -> str:
    is_translation = "encoder" in source.stacks
    dictionary = source.task.source_dictionary if is_translation else source.task.target_dictionary
    if is_translation:
        values = {
            "segmented": True,
            **dict.fromkeys(("tokenizers", "sentencepiece", "prefix"), False),
            "options": keywords(search_options(longest_target(limits))),
            "hint": source.model.encoder.position_config.source_bos,
            "pad": _PAD,
        }
    else:
        values = {"start": start_of(source)}
    return readme(
        FAIRSEQ,
        TRANSLATION if is_translation else LANGUAGE_MODEL,
        limits,
        quantization,
        title=title,
        packages="ctranslate2",
        bos=dictionary.bos_word,
        eos=dictionary.eos_word,
        unk=dictionary.unk_word,
        **values,
    )
