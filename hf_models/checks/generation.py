"""Compares the logits of generation step by step: a cache with wrong positions changes logits
before it changes tokens. With positions wrong in every step, two of three tiny models chose the
same tokens as with right positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from cape_plugins.doctor.check import Check, check, relative_difference, unless_stock_fails
from hf_models.checks.samples import Samples, pad_token, start_token

STEPS = 6  # tokens that are generated
BEAMS = 3
_TARGET = ("decoder_input_ids", "decoder_attention_mask")


class Generated(NamedTuple):
    """Generated texts, and the logits that chose their tokens.

    Attributes:
        sequences: ``[N, prompt + steps]`` tokens; N = B x beams in a beam search.
        logits: ``[N, steps, V]`` of the step that chose each token.
    """

    sequences: Tensor
    logits: Tensor

    def row(self, number: int, length: int) -> Generated:
        """The last `length` tokens of one text."""
        part = slice(number, number + 1)
        return Generated(self.sequences[part, -length:], self.logits[part])


@torch.no_grad()
def generate(
    model: Any, inputs: Mapping[str, Tensor], beams: int, cache: str | None = None
) -> Generated:
    """Generates with the cache, using the general method of transformers (Whisper's method cuts the
    recording and edits the result).

    Args:
        model: Stock model or model of this package, in evaluation mode.
        inputs: Inputs of the model; this function ignores inputs of a decoder.
        beams: 1 for the most probable token of each step.
        cache: ``cache_implementation`` of transformers, such as "static"; None for the default.
    """
    config = model.config
    settings = GenerationConfig(
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        num_beams=beams,
        num_return_sequences=beams,
        # attention over one repeated token hides distances, and did hide a wrong offset in MBart
        no_repeat_ngram_size=1,
        do_sample=False,
        use_cache=True,
        cache_implementation=cache,
        pad_token_id=pad_token(config),
        bos_token_id=start_token(config),
        eos_token_id=getattr(config, "eos_token_id", None),
        decoder_start_token_id=start_token(config) if config.is_encoder_decoder else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    source = {name: value for name, value in inputs.items() if name not in _TARGET}
    old_settings, model.generation_config = model.generation_config, settings
    try:
        result = GenerationMixin.generate(model, **source)
    finally:
        model.generation_config = old_settings
    rows = torch.arange(len(result.sequences))[:, None].expand(-1, len(result.logits))
    if getattr(result, "beam_indices", None) is not None:
        rows = result.beam_indices[:, : len(result.logits)].cpu()
    steps = [step.float()[rows[:, number]] for number, step in enumerate(result.logits)]
    return Generated(result.sequences, torch.stack(steps, dim=1))


@torch.no_grad()
def forced_logits(
    model: Any, inputs: Mapping[str, Tensor], sequences: Tensor, steps: int
) -> Tensor:
    """Logits ``[N, steps, V]`` of one forward without a cache, over texts that were generated from
    `inputs`."""
    source = {name: value for name, value in inputs.items() if name not in _TARGET}
    times = len(sequences) // len(next(iter(source.values())))
    source = {name: value.repeat_interleave(times, dim=0) for name, value in source.items()}
    if model.config.is_encoder_decoder:
        output = model(**source, decoder_input_ids=sequences[:, :-1], use_cache=False)
    else:
        output = model(input_ids=sequences[:, :-1], use_cache=False)
    return output.logits[:, -steps:].float()


def step_difference(expected: Generated, got: Generated) -> float:
    """Largest relative difference of the logits, up to the first step that chose another token."""
    steps = expected.logits.shape[1]
    tokens = (texts.sequences[:, -steps:] for texts in (expected, got))
    same_so_far = torch.eq(*tokens)[:, :-1].cumprod(dim=1).bool()
    comparable = torch.cat((torch.ones_like(same_so_far[:, :1]), same_so_far), dim=1)
    difference = (expected.logits - got.logits)[comparable].abs().max()
    difference = difference / expected.logits.abs().max().clamp(min=1e-12)
    return difference.item() if difference.isfinite() else float("inf")


# ---- the checks ----------------------------------------------------------------------------------


def generation_checks(
    cape_model: Any,
    samples: Samples,
    stock: Any | None,
    prefix: str = "",
    compare: bool = False,
) -> Iterator[Check]:
    """Compares the logits of each step with the stock model, and with one forward over all tokens.

    Args:
        cape_model: Model of this package in evaluation mode.
        samples: Samples without padding.
        stock: The stock model, if there is one. Checks that both models fail are skipped.
        prefix: Prefix of the names of the checks.
        compare: Whether both models have to compute the same.
    """
    if not cape_model.can_generate():
        return

    reference = stock if compare else cape_model
    for name, options in _METHODS.items():
        generated = _Generations(samples.rows[0], **options)
        if compare:
            row = check(name, partial(generated.difference, stock, cape_model))
            yield unless_stock_fails(row, partial(generated.difference, stock, stock))
        name = f"{prefix}{name}: cached steps against one forward"
        row = check(name, partial(generated.from_forward, cape_model))
        yield unless_stock_fails(row, stock and partial(generated.from_forward, stock))
    if cape_model.main_input_name in samples.padding:
        side = "right" if cape_model.config.is_encoder_decoder else "left"
        name = f"{prefix}greedy generation from a batch padded on the {side}"
        row = check(name, partial(from_padded, samples, side, reference, cape_model))
        # outputs of some stock encoders change with padding on the right, which excuses no
        # difference here: then only an error of the stock model skips the check
        same = partial(from_padded, samples, side, stock, stock)
        runs = partial(_runs, samples, side, stock)
        yield unless_stock_fails(row, stock and (same if side == "left" else runs))


_METHODS: dict[str, dict[str, Any]] = {
    "greedy generation": {"beams": 1},
    "beam search": {"beams": BEAMS},
    "greedy generation with a static cache": {"beams": 1, "cache": "static"},
}


class _Generations:
    """Results of generation from one sample, computed once for each model: two checks use them."""

    def __init__(self, row: Mapping[str, Tensor], **options: Any) -> None:
        self.row, self.options = row, options
        self.results: dict[int, Generated] = {}

    def of(self, model: Any) -> Generated:
        """The result of a model."""
        if id(model) not in self.results:
            self.results[id(model)] = generate(model, self.row, **self.options)
        return self.results[id(model)]

    def difference(self, reference: Any, model: Any) -> float:
        """Difference of the steps of two models."""
        return step_difference(self.of(reference), self.of(model))

    def from_forward(self, model: Any) -> float:
        """Difference of the steps from one forward over all tokens."""
        steps = self.of(model)
        forced = forced_logits(model, self.row, steps.sequences, steps.logits.shape[1])
        return relative_difference(forced, steps.logits)


def from_padded(samples: Samples, side: str, reference: Any, model: Any) -> float:
    """Largest relative difference between the steps from one padded batch of `model` and from each
    sample alone in `reference`."""
    batch = generate(model, samples.batch(side), 1)
    worst = 0.0
    for number, sample in enumerate(samples.rows):
        single = generate(reference, sample, 1)
        part = batch.row(number, single.sequences.shape[1])
        worst = max(worst, step_difference(single, part))
    return worst


def _runs(samples: Samples, side: str, model: Any) -> str:
    generate(model, samples.batch(side), 1)
    return "no error"
