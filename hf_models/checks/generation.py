"""Generation, step by step as numbers: what a cache of wrong positions changes is seen in logits
before it is in tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from cape_plugins.checks import Check, check, relative_difference
from hf_models.checks.samples import Samples, pad_token, start_token

STEPS = 6  # tokens that are generated
BEAMS = 3
_TARGET = ("decoder_input_ids", "decoder_attention_mask")


class Generated(NamedTuple):
    """Texts and what they were chosen by.

    Attributes:
        sequences: ``[N, prompt + steps]`` tokens; of a beam search all N = B x beams of them.
        logits: ``[N, steps, V]``, of the step that chose each token.
    """

    sequences: Tensor
    logits: Tensor

    def row(self, number: int, length: int) -> Generated:
        """One text, the last `length` tokens of it."""
        part = slice(number, number + 1)
        return Generated(self.sequences[part, -length:], self.logits[part])


@torch.no_grad()
def generate(model: Any, inputs: Mapping[str, Tensor], beams: int) -> Generated:
    """Generates with the cache, by the general method of transformers (Whisper's own cuts the
    recording and edits what it returns).

    Args:
        model: Stock or of this package, in evaluation mode.
        inputs: Of the model; what belongs to a decoder is left out.
        beams: 1 for the most probable token of each step.
    """
    config = model.config
    settings = GenerationConfig(
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        num_beams=beams,
        num_return_sequences=beams,
        no_repeat_ngram_size=1,  # attention over one token again and again would hide distances
        do_sample=False,
        use_cache=True,
        pad_token_id=pad_token(config),
        bos_token_id=start_token(config),
        eos_token_id=getattr(config, "eos_token_id", None),
        decoder_start_token_id=start_token(config) if config.is_encoder_decoder else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    source = {name: value for name, value in inputs.items() if name not in _TARGET}
    before, model.generation_config = model.generation_config, settings
    try:
        result = GenerationMixin.generate(model, **source)
    finally:
        model.generation_config = before
    rows = torch.arange(len(result.sequences))[:, None].expand(-1, len(result.logits))
    if getattr(result, "beam_indices", None) is not None:
        rows = result.beam_indices[:, : len(result.logits)].cpu()
    steps = [step.float()[rows[:, number]] for number, step in enumerate(result.logits)]
    return Generated(result.sequences, torch.stack(steps, dim=1))


@torch.no_grad()
def forced_logits(
    model: Any, inputs: Mapping[str, Tensor], sequences: Tensor, steps: int
) -> Tensor:
    """``[N, steps, V]`` of one forward over texts that were generated from `inputs`, without a
    cache."""
    source = {name: value for name, value in inputs.items() if name not in _TARGET}
    times = len(sequences) // len(next(iter(source.values())))
    source = {name: value.repeat_interleave(times, dim=0) for name, value in source.items()}
    if model.config.is_encoder_decoder:
        output = model(**source, decoder_input_ids=sequences[:, :-1], use_cache=False)
    else:
        output = model(input_ids=sequences[:, :-1], use_cache=False)
    return output.logits[:, -steps:].float()


def step_difference(expected: Generated, got: Generated) -> float:
    """Largest relative difference of the logits, up to the step that first chose another token."""
    steps = expected.logits.shape[1]
    tokens = (texts.sequences[:, -steps:] for texts in (expected, got))
    same = torch.eq(*tokens)[:, :-1].cumprod(dim=1).bool()
    comparable = torch.cat((torch.ones_like(same[:, :1]), same), dim=1)
    difference = (expected.logits - got.logits)[comparable].abs().max()
    difference = difference / expected.logits.abs().max().clamp(min=1e-12)
    return difference.item() if difference.isfinite() else float("inf")


# ---- the checks ----------------------------------------------------------------------------------


def generation_checks(
    cape_model: Any, samples: Samples, stock: Any | None = None, prefix: str = ""
) -> Iterator[Check]:
    """Logits of each step: of the stock model, and of one forward over all tokens."""
    if not cape_model.can_generate():
        return
    for beams, name in ((1, "greedy generation"), (BEAMS, "beam search")):
        generated = _Once(partial(generate, cape_model, samples.rows[0], beams))
        if stock is not None:
            yield check(name, partial(_against_stock, stock, samples.rows[0], beams, generated))
        yield check(
            f"{prefix}{name}: cached steps against one forward",
            partial(_against_forward, cape_model, samples.rows[0], generated),
        )
    if cape_model.config.is_encoder_decoder or cape_model.main_input_name not in samples.padding:
        return
    yield check(
        f"{prefix}greedy generation from a batch padded on the left",
        partial(_from_padded, cape_model if stock is None else stock, cape_model, samples),
    )


class _Once:
    """The result of a call that two checks need, or its error for both."""

    def __init__(self, call: Callable[[], Generated]) -> None:
        self.call, self.result = call, None

    def __call__(self) -> Generated:
        if self.result is None:
            self.result = self.call()
        return self.result


def _against_stock(
    stock: Any, row: Mapping[str, Tensor], beams: int, generated: Callable[[], Generated]
) -> float:
    return step_difference(generate(stock, row, beams), generated())


def _against_forward(
    cape_model: Any, row: Mapping[str, Tensor], generated: Callable[[], Generated]
) -> float:
    steps = generated()
    return relative_difference(
        forced_logits(cape_model, row, steps.sequences, steps.logits.shape[1]), steps.logits
    )


def _from_padded(reference: Any, cape_model: Any, samples: Samples) -> float:
    together = generate(cape_model, samples.batch("left"), 1)
    worst = 0.0
    for number, row in enumerate(samples.rows):
        alone = generate(reference, row, 1)
        part = together.row(number, alone.sequences.shape[1])
        worst = max(worst, step_difference(alone, part))
    return worst
