"""The README of a folder for ONNX Runtime: inputs and outputs, conventions, and a program that runs
as it stands."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_models.natural_length import NaturalLengthEncoder
from hf_models.serving.source import banned_tokens, listed

LONGEST = 256  # tokens that the program generates at most
Puts = Sequence[tuple[str, str, Sequence[Any]]]


class Described(NamedTuple):
    """A file as ONNX Runtime sees it: name, type and axes of what goes in and comes out."""

    file: str
    inputs: Puts
    outputs: Puts

    @property
    def names(self) -> list[str]:
        """Of the inputs."""
        return [name for name, _, _ in self.inputs]


def readme(model: Any, files: Sequence[Described], opset: int) -> str:
    """Markdown for the folder of a model.

    Args:
        model: What was exported.
        files: Its graphs.
        opset: Version of the operators.
    """
    settings = (
        f"{name} = `{json.dumps(getattr(model.config, name), sort_keys=True)}`"
        for name in model.config.position_fields
    )
    notes, program = _one_graph(model, files[0]) if len(files) == 1 else _generation(model, files)
    paragraphs = (
        f"Written by `cape-plugins export onnx --opset {opset}`; to run it, `pip install "
        f"onnxruntime` is enough. {'; '.join(settings)}.",
        "Named axes may have any size in each call, 1 included. Positions are computed in the "
        "graph: nothing is cut, and no length and no size is past a table; a learned table of "
        "texts and recordings begins anew after its last row. A file with `.data` at the end of "
        "its name holds the weights of the file of that name, and stays beside it. There is no "
        "config.json, by which libraries would look for weights of their own.",
        notes,
    )
    first, *others = (textwrap.fill(text, 100, break_on_hyphens=False) for text in paragraphs)
    tables = "\n".join(map(_table, files))
    return "\n\n".join(
        (
            f"# {type(model).__name__} for ONNX Runtime",
            first,
            tables.rstrip(),
            *others,
            f"```python\n{program.strip()}\n```\n",
        )
    )


def _table(described: Described) -> str:
    """Inputs and outputs of a file; layers are alike, and have one row."""
    rows = [f"| `{described.file}` | name | type | axes |", "|---|---|---|---|"]
    for direction, puts in (("takes", described.inputs), ("gives", described.outputs)):
        for name, dtype, axes in puts:
            layer = re.search(r"_(\d+)_(?=key|value)", name)
            if layer and layer[1] != "0":
                continue
            shown = f"`{name.replace('_0_', '_N_')}`" + " of layer N = 0, 1, ..." * bool(layer)
            rows.append(f"| {direction} | {shown} | {dtype} | [{', '.join(map(str, axes))}] |")
    return "\n".join(rows) + "\n"


# ---- models of one graph -------------------------------------------------------------------------


def _one_graph(model: Any, file: Described) -> tuple[str, str]:
    output = file.outputs[0][0]
    if "pixel_values" in file.names:
        (_, _, (_, channels, _, _)), *_ = file.inputs
        notes = (
            "Images are floats, scaled and normalised as in training; preprocessor_config.json "
            "says how, if the image processor was saved beside the model. What is left over at the "
            "right and at the bottom beyond whole patches is not seen. The program takes a file of "
            f"numpy with an image [{channels}, height, width]."
        )
        lines = f"""
image = np.load(sys.argv[1]) if sys.argv[1:] else np.zeros(({channels}, 96, 128))
({output},) = session.run(["{output}"], {{"pixel_values": image[None].astype(np.float32)}})
print({output}[0].argmax(-1))
"""
    elif "cache_mask" in file.names:
        return _language_model(model, file)
    elif "input_features" in file.names:
        notes, lines = _frames(model, output)
    else:
        types = '\ngiven["token_type_ids"] = np.zeros_like(ids)' * ("token_type_ids" in file.names)
        notes = (
            "The tokenizer of this folder adds BOS, EOS and what else the model was trained with; "
            "`attention_mask` is 0 on padding, on whichever side. The program takes numbers of "
            "tokens and prints the best class at each."
        )
        lines = f"""
ids = np.array([sys.argv[1:] or [5, 6, 7]], dtype=np.int64)
given = {{"input_ids": ids, "attention_mask": np.ones_like(ids)}}{types}
({output},) = session.run(["{output}"], given)
print(*{output}[0].argmax(-1))
"""
    return notes, _program(f'session = onnxruntime.InferenceSession("{file.file}")', lines)


def _frames(model: Any, output: str) -> tuple[str, str]:
    hop, bins = round(model.config.hop_seconds * 1e9), model.config.num_mel_bins
    blank = model.config.pad_token_id
    notes = (
        "Frames are log-mel features as cape_plugins.speech.features computes them, by the "
        "settings of training; preprocessor_config.json has them, if the feature extractor was "
        "saved beside the model. Padding stands behind them, with 0 in "
        f"`attention_mask`. `hop_nanoseconds` is the distance of frames, {hop} in training. "
        "`lengths` counts the outputs of each recording that are no padding. There is neither BOS "
        f"nor EOS; class {blank} is the blank of CTC. The program takes a file of numpy with "
        f"frames [1, frames, {bins}]."
    )
    lines = f"""
frames = np.load(sys.argv[1]) if sys.argv[1:] else np.zeros((1, 100, {bins}))
given = {{"input_features": frames.astype(np.float32), "hop_nanoseconds": np.array([{hop}])}}
given["attention_mask"] = np.ones(frames.shape[:2], np.int64)
{output}, lengths = session.run(None, given)
best = {output}[0, : lengths[0]].argmax(-1)
print(*(now for now, before in zip(best, [None, *best]) if now not in (before, {blank})))
"""
    return notes, lines


def _program(sessions: str, lines: str) -> str:
    imports = "import sys\n\nimport numpy as np\nimport onnxruntime\n\n"
    return f"{imports}{sessions}\n{lines.strip()}\n"


# ---- encoder and decoder -------------------------------------------------------------------------


def _generation(model: Any, files: Sequence[Described]) -> tuple[str, str]:
    encoder, decoder = files
    settings, prompt = model.generation_config, first_tokens(model)
    takes, source = _source(model, encoder)
    notes = (
        f"{takes} The encoder gives keys and values by which the decoder sees the source, and "
        "their mask: hand all of them to each step (for beams, repeated along the batch). A text "
        f"begins with {prompt}: there stand forced_bos_token_id, or the language and the task, if "
        f"generate() is given other ones (see generation_config.json). {_about_search(settings)}"
    )
    sessions = f'("{encoder.file}", "{decoder.file}")'
    given = '    given = {"input_ids": np.array([new]), **states, **dict(zip(past, cache))}'
    lines = f"""
{source.strip()}
states = dict(zip((put.name for put in encoder.get_outputs()), encoder.run(None, given)))
{_search(settings, decoder, "decoder", str(prompt), given)}
"""
    return notes, _program(
        f"encoder, decoder = map(onnxruntime.InferenceSession, {sessions})", lines
    )


def _language_model(model: Any, file: Described) -> tuple[str, str]:
    settings = model.generation_config
    notes = (
        "The tokenizer of this folder adds BOS where the model was trained with it. "
        "`attention_mask` is for the tokens given now, `cache_mask` for those in the cache: texts "
        "of a batch are padded on the left, with 0 in both. The program takes numbers of tokens "
        f"and prints those that follow. {_about_search(settings)}"
    )
    given = """
    given = {"input_ids": np.array([new]), "attention_mask": np.ones((1, len(new)), np.int64)}
    given |= {"cache_mask": np.ones((1, cache[0].shape[2]), np.int64), **dict(zip(past, cache))}"""
    lines = f"""
start = [int(token) for token in sys.argv[1:] or [5, 6, 7]]
{_search(settings, file, "session", "start", given)}
"""
    return notes, _program(f'session = onnxruntime.InferenceSession("{file.file}")', lines)


def _search(settings: Any, decoder: Described, session: str, prompt: str, given: str) -> str:
    """Lines of a greedy search with a cache."""
    heads, width = next(
        (axes[1], axes[3]) for name, _, axes in decoder.inputs if name.startswith("past_0")
    )
    never, not_first = banned_tokens(settings)
    later = f"\n    logits[0, -1, {never}] = -np.inf" * bool(never)
    later += f"\n    if not tokens:\n        logits[0, -1, {not_first}] = -np.inf" * bool(not_first)
    ends = ", ".join(map(str, listed(settings.eos_token_id)))
    return f"""
past = [put.name for put in {session}.get_inputs() if put.name.startswith("past")]
cache = [np.zeros((1, {heads}, 0, {width}), np.float32)] * len(past)
tokens, new = [], {prompt}
while len(tokens) < {LONGEST} and not {{*tokens[-1:]}} & {{{ends}}}:
{given.strip(chr(10))}
    logits, *cache = {session}.run(None, given){later}
    new = [int(logits[0, -1].argmax())]
    tokens += new
print(*tokens)
""".strip()


def _about_search(settings: Any) -> str:
    return (
        f"A text ends with {listed(settings.eos_token_id)}. The cache begins empty, with 0 on the "
        "axis `past`, and a call may bring several tokens. Search is the caller's; the program is "
        f"greedy and ends after {LONGEST} tokens, as generate(num_beams=1, do_sample=False, "
        f"max_new_tokens={LONGEST}) of the model{_left_out(settings)}. At its limit of length a "
        "host may force EOS, where the program just ends."
    )


def _source(model: Any, encoder: Described) -> tuple[str, str]:
    """What the encoder takes, in words, and lines that make its inputs."""
    config = model.config
    if "input_ids" in encoder.names:
        (end, *_) = listed(config.eos_token_id)
        hint = getattr(model.get_encoder(), "has_hint", False)
        bos = "BOS, which this model reads before the source, is put there by the graph. " * hint
        notes = (
            f"A source ends with EOS ({end}); the tokenizer of this folder adds that, and what "
            f"else the model was trained with. {bos}`attention_mask` is 0 on padding, on whichever "
            "side. The program takes numbers of tokens and prints those of the target."
        )
        lines = f"""
source = np.array([sys.argv[1:] or [5, 6, 7, {end}]], dtype=np.int64)
given = {{"input_ids": source, "attention_mask": np.ones_like(source)}}
"""
        return notes, lines
    bins = getattr(config, "num_mel_bins", None) or config.input_feat_per_channel
    bins_first = isinstance(model.get_encoder(), NaturalLengthEncoder)
    axes, example = f"frames, {bins}", f"100, {bins}"
    if bins_first:
        axes, example = f"{bins}, frames", f"{bins}, 100"
    hop = round(config.hop_seconds * 1e9)
    masked = "attention_mask" in encoder.names
    frames = "frames.shape[2]" if bins_first else "frames.shape[1]"
    mask = f'\ngiven["attention_mask"] = np.ones((1, {frames}), np.int64)' * masked
    padding = ", padded as in training, because this model masks no padding"
    if masked:
        padding = (
            ': pad to the longest of a batch and not to 30 s (padding="longest"), with 0 on '
            "padding in `attention_mask`"
        )
    notes = (
        f"Frames are what the feature extractor of this folder makes, of any number{padding}. "
        f"`hop_nanoseconds` is their distance, {hop} in training. The program takes a file of "
        f"numpy with frames [1, {axes}], and prints tokens."
    )
    lines = f"""
frames = np.load(sys.argv[1]) if sys.argv[1:] else np.zeros((1, {example}))
given = {{"input_features": frames.astype(np.float32), "hop_nanoseconds": np.array([{hop}])}}{mask}
"""
    return notes, lines


def first_tokens(model: Any) -> list[int]:
    """What a target begins with: the start, and what generation is told of language and task."""
    settings = model.generation_config
    starts = (settings.decoder_start_token_id, model.config.decoder_start_token_id)
    (start, *_) = listed(next(token for token in starts if token is not None))
    tokens = [start, *listed(settings.forced_bos_token_id)]
    languages = getattr(settings, "lang_to_id", None)
    if languages and getattr(settings, "is_multilingual", False):
        asked = getattr(settings, "language", None)
        known = (languages.get(name) for name in (asked, f"<|{asked}|>", "<|en|>"))
        usual = min(languages.values())
        tokens.append(next((token for token in known if token is not None), usual))
        tokens.append(settings.task_to_id[getattr(settings, "task", None) or "transcribe"])
    return [*tokens, *listed(getattr(settings, "no_timestamps_token_id", None))]


# Settings that change what comes out and that a greedy program of ten lines does not have.
_MORE = (
    *("num_beams", "do_sample", "min_length", "min_new_tokens", "repetition_penalty"),
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("sequence_bias", "exponential_decay_length_penalty", "forced_decoder_ids"),
)


def _left_out(settings: Any) -> str:
    """Settings of generation that the program does not apply, in words."""
    values = {name: getattr(settings, name, None) for name in _MORE}
    asked = [f"{name}={value}" for name, value in values.items() if value not in (None, 0, 1)]
    if not asked:
        return ""
    return f", except that generation_config.json has {', '.join(asked)}, which it leaves out"
