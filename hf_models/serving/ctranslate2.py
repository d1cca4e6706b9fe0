"""Models of Hugging Face as folders for ctranslate2: ``cape-plugins export ctranslate2 FOLDER``."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

import hf_models
from cape_plugins.serving.ctranslate2_check import (
    Hypothesis,
    check_length,
    compare,
    read_sentences,
    search_options,
    translate,
)
from cape_plugins.serving.ctranslate2_readme import (
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
)
from cape_plugins.serving.output import Exported
from cape_plugins.settings.arguments import HUGGING_FACE
from hf_models.families.whisper import CapeWhisperForConditionalGeneration
from hf_models.seams.bos_hint import Generates
from hf_models.seams.natural_length import NaturalLengthEncoder
from hf_models.serving.ctranslate2_loaders import (
    TranslationLoader,
    refuse_large_tables,
    refuse_unfit,
    vocabularies,
    write_tokenizer,
)
from hf_models.serving.ctranslate2_whisper import export_recognition
from hf_models.serving.source_folder import refuse_data, saved_beside
from hf_models.storage.loading import clear_errors, load_whole

_LONGEST = 256  # tokens of a translation of a short source in a check, EOS included
# Settings of generation, and the equal options of translate_batch.
_OPTIONS = {
    "length_penalty": "length_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
}
# Settings of generation without an equal option. The engine applies repetition_penalty before the
# softmax; the host's beam search applies it after the softmax.
_WITHOUT_OPTION = (
    "repetition_penalty",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "diversity_penalty",
    "sequence_bias",
)


class Translation(NamedTuple):
    """A translation model with its tokenizer.

    Attributes:
        model: Model in evaluation mode.
        tokenizer: Tokenizer of the model.
    """

    model: PreTrainedModel
    tokenizer: Any

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Tokens of source and target by their numbers."""
        return vocabularies(self.model, self.tokenizer)


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Writes the folder of a model; see :mod:`cape_plugins.serving.command`.

    Raises:
        ValueError: for models that do not fit, naming the reason and a way that works; and if a
            check finds a difference.
    """
    refuse_data(args)
    with clear_errors(str(source)):
        model = _load(source)
    if isinstance(model.get_encoder(), NaturalLengthEncoder):
        return export_recognition(model, source, folder, args)
    sentences = [] if args.check is None else read_sentences(args.check)
    with saved_beside(source, "tokenizer", "the names of the tokens"):
        translation = Translation(model, AutoTokenizer.from_pretrained(source))
    rows = {"source": args.max_source_tokens, "target": args.max_target_tokens}
    limits = write_model(translation, folder, rows, args.quantization)
    write_tokenizer(source, folder, translation.tokenizer)
    size = (folder / "model.bin").stat().st_size / 2**20
    report = [f"ctranslate2: {_described(model)}, {size:.1f} MiB"]
    report += precision_notes(args.quantization, ctranslate2.get_supported_compute_types("cpu"))
    if sentences:
        report.append(check(translation, folder, sentences, limits, args.quantization))
    text = _readme(translation, source.resolve().name, folder, limits, args.quantization)
    return Exported(text, "\n".join(report))


def write_model(
    translation: Translation, folder: Path, rows: dict[str, int], quantization: str | None = None
) -> dict[str, int | None]:
    """Writes the folder from a copy of the model, because conversion to int8 writes into the
    tensors of the converted model.

    Args:
        translation: The model and its tokenizer.
        folder: Empty folder.
        rows: Positions in the table of each side, "source" and "target".
        quantization: Precision of the weights; None for float32.

    Returns:
        Number of rows in the table of each side; None for a side without a table, and so without
        a limit.

    Raises:
        ValueError: for positions that the engine cannot hold, and for too many rows.
    """
    refuse_large_tables(translation.model, rows)
    model = copy.deepcopy(translation.model).requires_grad_(False)
    sides = {"source": model.get_encoder(), "target": model.get_decoder()}
    limits = {
        side: rows[side] if has_table(stack.positions.config) else None
        for side, stack in sides.items()
    }
    for stack in sides.values():
        refuse_unfit(stack, beside=hasattr(stack, "layer_norm"))
        if needs_identity(stack.positions.config):
            put_identity_first(stack.layers)
    # the loader reads the numbers of layers, and a stack may have got one more
    model.config.encoder_layers = len(sides["source"].layers)
    model.config.decoder_layers = len(sides["target"].layers)
    loader = TranslationLoader(rows["source"], rows["target"])
    loader.write(model, translation.tokenizer, folder, quantization)
    return limits


def _load(source: Path) -> PreTrainedModel:
    """The model of a folder in float32, if the engine has a class for it. The engine computes in
    half precision on some devices only, and the folder must compute the same on all devices.

    Raises:
        ValueError: for another class; names the classes of the engine, and the way for others.
    """
    config = AutoConfig.from_pretrained(source)
    name = (config.architectures or ["model without architecture"])[0]
    model_class = hf_models.MODELS.get(name)
    if model_class is None:
        raise ValueError(
            f"SOURCE {source} holds a {name}, which is no model of this package; allowed: "
            f"{', '.join(_allowed())}. ct2-transformers-converter of ctranslate2 takes stock "
            "models."
        )
    if name not in _allowed():
        raise ValueError(
            f"SOURCE {source} holds a {name}, which ctranslate2 has no engine for, or none that "
            f"takes its positions; allowed: {', '.join(_allowed())}. Use `cape-plugins export "
            "onnx` for images and speech; a model with the outputs of its stock model becomes a "
            "stock model by `python -m hf_models.convert SOURCE NEW --stock`, for "
            "ct2-transformers-converter."
        )
    model, new = load_whole(model_class, str(source))
    if new:
        raise ValueError(
            f"SOURCE {source} lacks weights of its positions, {', '.join(new)}; its config.json is "
            "of another model. Take weights and config.json from one model."
        )
    return model.float().eval()


def _allowed() -> list[str]:
    """Names of the classes that are exported."""
    exported = (Generates, CapeWhisperForConditionalGeneration)
    return sorted(name for name, model in hf_models.MODELS.items() if issubclass(model, exported))


def _described(model: PreTrainedModel) -> str:
    config = model.config.position_config
    return f"{type(model).__name__}, position embedding {config.type}"


# ---- settings of the host, as options of the engine ----------------------------------------------


def _options(translation: Translation) -> dict[str, Any]:
    """Options of ``translate_batch`` that follow from the settings of generation."""
    generation, (_, names) = translation.model.generation_config, translation.names
    options = {}
    for setting, option in _OPTIONS.items():
        value = getattr(generation, setting)
        if value is not None:
            options[option] = value
    # one less: the start of the target counts in the setting
    least = max((generation.min_length or 1) - 1, generation.min_new_tokens or 0)
    options["min_decoding_length"] = least
    sequences = [ids for ids in generation.bad_words_ids or [] if len(ids) > 1]
    if sequences:
        options["suppress_sequences"] = [[names[i] for i in row] for row in sequences]
    return options


def _prefix(translation: Translation) -> str | None:
    """Beginning of every translation: the code of a language."""
    language = translation.model.generation_config.forced_bos_token_id
    return None if language is None else translation.names[1][language]


def check(
    translation: Translation,
    folder: Path,
    sentences: Sequence[str],
    limits: dict[str, int | None],
    quantization: str | None = None,
) -> str:
    """Translates texts with ``generate`` and with the folder; see
    :func:`~cape_plugins.serving.ctranslate2_check.compare`."""
    model, tokenizer = translation
    ids = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    lengths = [len(row) + model.get_encoder().has_hint for row in ids]
    longest = max(lengths)
    check_length("source", longest, limits)
    cap = min(limits["target"] or longest + _LONGEST, max(_LONGEST, 2 * longest))
    translator = ctranslate2.Translator(str(folder), device="cpu")
    options = _options(translation)
    prefix = _prefix(translation)
    if prefix:
        options["target_prefix"] = [[prefix]] * len(ids)
    names, _ = translation.names
    tokens = [[names[number] for number in row] for row in ids]
    by_engine = translate(
        translator, tokens, cap, tokenizer.eos_token, tokenizer.pad_token, **options
    )
    by_host = translate_by_host(translation, ids, cap)
    return compare(by_host, by_engine, lengths, quantization)


@torch.no_grad()
def translate_by_host(
    translation: Translation, ids: Sequence[Sequence[int]], max_tokens: int, batch: int = 16
) -> list[Hypothesis]:
    """Translations of ``generate``, in the order of the sources.

    Args:
        translation: The model and its tokenizer.
        ids: Numbers of the tokens of each source.
        max_tokens: Longest translation, EOS included.
        batch: Sources at a time.
    """
    model, tokenizer = translation
    _, names = translation.names
    eos = names.index(tokenizer.eos_token)
    hypotheses = []
    steps = range(0, len(ids), batch)
    for first in tqdm(steps, "check by the host", unit="batch", leave=False, disable=None):
        sources, mask = _padded(ids[first : first + batch], model.config.pad_token_id)
        output = model.generate(
            sources,
            attention_mask=mask,
            num_beams=search_options(max_tokens)["beam_size"],
            early_stopping=True,
            renormalize_logits=True,
            do_sample=False,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_scores=True,
            **dict.fromkeys(_WITHOUT_OPTION),  # the folder does not depend on these settings
        )
        for row, score in zip(output.sequences.tolist(), output.sequences_scores, strict=True):
            row = row[1:]  # without the start
            length = row.index(eos) if eos in row else len(row)
            tokens = tuple(names[number] for number in row[:length])
            # EOS counts among max_tokens: as the last of them, the limit may have forced EOS
            hypotheses.append(Hypothesis(tokens, score.item(), length < max_tokens - 1))
    return hypotheses


def _padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Numbers of tokens ``[B, S]``, and the mask of the tokens."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), pad)
    for row, numbers in enumerate(rows):
        ids[row, : len(numbers)] = torch.tensor(numbers)
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


# ---- README --------------------------------------------------------------------------------------


def _readme(
    translation: Translation,
    name: str,
    folder: Path,
    limits: dict[str, int | None],
    quantization: str | None,
) -> str:
    model, tokenizer = translation
    generation, encoder = model.generation_config, model.get_encoder()
    (sources, targets), prefix = translation.names, _prefix(translation)
    options = {**search_options(longest_target(limits)), **_options(translation)}
    start = generation.decoder_start_token_id
    without_option = [
        f"`{setting}={getattr(generation, setting)}`"
        for setting in _WITHOUT_OPTION
        if getattr(generation, setting, None) not in (None, 0, 0.0, 1.0, [])
    ]
    return readme(
        HUGGING_FACE,
        TRANSLATION,
        limits,
        quantization,
        title=f"{name}: {_described(model)}",
        hint=encoder.has_hint,
        bos=sources[encoder.bos_token],
        eos=tokenizer.eos_token,
        pad=tokenizer.pad_token,
        start=None if start is None else targets[start],
        biased=generation.bad_words_ids or generation.suppress_tokens,
        without_option=", ".join(without_option),
        **of_program(tokenizer, folder, options, prefix),
    )


def of_program(
    tokenizer: Any, folder: Path, options: Mapping[str, Any], prefix: str | None
) -> dict[str, Any]:
    """Values of the program in the README. The program needs one small package to make tokens.

    Args:
        tokenizer: Tokenizer of the model.
        folder: Folder with the files of the tokenizer.
        options: Options of ``translate_batch``.
        prefix: Token that every translation begins with.
    """
    names = [Path(name) for name in tokenizer.vocab_files_names.values()]
    pieces = [name for name in names if name.suffix in (".spm", ".model")]
    pieces = [name for name in pieces if (folder / name).exists()]
    package = "sentencepiece" if pieces else ""
    if (folder / "tokenizer.json").exists():
        package = "tokenizers"
    before, after = _around(tokenizer) if package == "sentencepiece" else ([], [])
    arguments = keywords(options)
    if prefix:
        arguments += f",\n    target_prefix=[[{prefix!r}]] * len(sentences)"
    return {
        "packages": f"ctranslate2 and {package}" if package else "ctranslate2",
        "tokenizers": package == "tokenizers",
        "sentencepiece": package == "sentencepiece",
        "segmented": not package,
        "source_pieces": pieces[0] if pieces else None,
        "target_pieces": pieces[-1] if pieces else None,
        "before": before,
        "after": after,
        "options": arguments,
        "prefix": prefix,
    }


def _around(tokenizer: Any) -> tuple[list[str], list[str]]:
    """Tokens that the tokenizer puts before and after a text."""
    empty = tokenizer.build_inputs_with_special_tokens([tokenizer.unk_token_id])
    index = empty.index(tokenizer.unk_token_id)
    names = tokenizer.convert_ids_to_tokens
    return names(empty[:index]), names(empty[index + 1 :])
