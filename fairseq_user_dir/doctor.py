"""Checks of ``cape-plugins doctor`` for models of fairseq. A model of this package that has the
type of the stock model must compute the same as the stock model, also step by step with a cache. A
model with any other type must train."""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models import MODEL_REGISTRY, build_model
from fairseq.models.nat import FairseqNATModel
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf
from torch import Tensor, nn

from cape_plugins import PositionConfig
from cape_plugins.checkpoints.families import find_fairseq_family
from cape_plugins.doctor.check import (
    NOTE,
    Check,
    Mismatch,
    NotApplicable,
    check,
    relative_difference,
    wishes,
)
from cape_plugins.settings.arguments import PREFIX, TYPE_ARG
from fairseq_user_dir.checkpoints import position_config
from fairseq_user_dir.embedding import TokenPositionEmbedding
from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.models import CLASSES, stock_values
from fairseq_user_dir.serving.source_checkpoint import load_trained

BEAM, LENGTH = 3, 8
LENGTHS = (7, 4)  # words of the two samples
_NEW_TABLES = 0.5  # standard deviation of new tables, large enough to show a wrong distance
_STEP = 1e-3  # learning rate of the training step
_TINY = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {
        "layers": 2,
        "embed_dim": 32,
        "ffn_embed_dim": 64,
        "attention_heads": 4,
    }.items()
}
Rows = Iterator[tuple[str, Check]]


class Subject(NamedTuple):
    """A model to check.

    Attributes:
        name: Name of the stock model, such as "transformer".
        arguments: Arguments that the model was built from.
        model: Stock model or model of this package, in evaluation mode and float32.
        task: Task of the model, with dictionaries.
    """

    name: str
    arguments: dict[str, Any]
    model: Any
    task: Any


def doctor(args: argparse.Namespace, settings: Mapping[str, Any] | None) -> Rows:
    """Checks a checkpoint of a translation or language model, or a tiny Transformer.

    Args:
        args: Arguments of ``cape-plugins doctor``.
        settings: ``{"type": ..., option: value}`` to train with; None for the default type, and a
            type with relative attention.

    Raises:
        ValueError: for models of other kinds, files that cannot be read, missing dictionaries, and
            settings that the model cannot have.
    """
    model_name = args.model or "fairseq transformer"
    subject = _built_in() if args.model is None else _loaded(Path(args.model), args.data)
    config = position_config(subject.model)
    level = logging.root.manager.disable
    logging.disable(logging.INFO)  # each model logs its settings when it is built
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for row in _checks(subject, config, settings):
                yield model_name, row
    finally:
        logging.disable(level)


def _checks(
    subject: Subject, config: PositionConfig | None, settings: Mapping[str, Any] | None
) -> Iterator[Check]:
    cape_class = CLASSES[subject.name]
    to_train = wishes(settings, "text", cape_class.architecture)
    if config is None:
        family = find_fairseq_family(subject.model.state_dict())
        side = next(iter(family.sides))
        stock_type = {"type": family.stock_type(subject.arguments, side)}
        build = partial(_twin, subject, wishes(stock_type, "text", cape_class.architecture)[0])
        yield from _against_stock(subject, lambda: subject.model, build)
    else:
        yield from _model_checks(subject, subject.model, f"{config.type} of the checkpoint: ")
        if reason := _differs(subject, config):
            yield Check("against the stock model", NOTE, reason)
        else:
            stock = partial(_stock, subject, config)
            yield from _against_stock(subject, stock, lambda: subject.model)
    for wish in to_train:
        cape_model, prefix = _twin(subject, wish), f"{wish['type']}: "
        yield from _model_checks(subject, cape_model, prefix)
        yield check(
            f"{prefix}training draws positions", partial(_augmentation, subject, cape_model)
        )
        yield check(f"{prefix}one training step", partial(_training, subject, cape_model))


# ---- models --------------------------------------------------------------------------------------


def _built_in() -> Subject:
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    settings = TranslationConfig(source_lang="a", target_lang="b")
    task = TranslationTask(settings, dictionary, dictionary)
    arguments = argparse.Namespace(arch="transformer", **_TINY)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(arguments, task).eval()
    return Subject("transformer", vars(arguments), model, task)


def _loaded(path: Path, data: str | None) -> Subject:
    model, cfg, task = load_trained(path, data)
    classes = {cape_class: name for name, cape_class in CLASSES.items()}
    classes |= {MODEL_REGISTRY[name]: name for name in CLASSES}
    name = classes.get(type(model))
    if name is None or isinstance(model, FairseqNATModel):
        raise SettingsError(
            f"{path} holds a {type(model).__name__}, which the doctor does not know; allowed: "
            "translation and language models of fairseq (transformer, transformer_lm, and with "
            "cape_ in front). Compare others by fairseq-generate."
        )
    arguments = cfg.model
    if not isinstance(arguments, argparse.Namespace):
        arguments = argparse.Namespace(**OmegaConf.to_container(arguments, enum_to_str=True))
    return Subject(name, dict(vars(arguments)), model.float().eval(), task)


def _twin(subject: Subject, settings: Mapping[str, Any]) -> Any:
    """A model of this package with the weights of the subject. Parameters that the subject lacks,
    such as relative tables, get random numbers."""
    options = {PREFIX + name: value for name, value in settings.items() if name != "type"}
    ours = {name for name in subject.arguments if name.startswith(PREFIX)}
    arguments = {name: value for name, value in subject.arguments.items() if name not in ours}
    new_arguments = argparse.Namespace(**{**arguments, TYPE_ARG: settings["type"], **options})
    model = CLASSES[subject.name].build_model(new_arguments, subject.task)
    return _with_weights(model, subject.model)


def _stock(subject: Subject, config: PositionConfig) -> Any:
    """The stock model with the weights of a model of this package."""
    sides = [side for side in ("encoder", "decoder") if hasattr(subject.model, side)]
    new_arguments = argparse.Namespace(**{**subject.arguments, **stock_values(config, *sides)})
    return _with_weights(
        MODEL_REGISTRY[subject.name].build_model(new_arguments, subject.task), subject.model
    )


def _with_weights(model: Any, source: nn.Module) -> Any:
    weights = source.state_dict()
    # not fairseq's method, which refuses weights of another position embedding
    nn.Module.load_state_dict(model, weights, strict=False)
    with torch.no_grad():
        for name, table in model.named_parameters():
            if name not in weights:
                table.normal_(std=_NEW_TABLES)
    return model.eval()


def _differs(subject: Subject, config: PositionConfig) -> str:
    """Text on the settings that make the model differ from the stock model; "" without any."""
    family = find_fairseq_family(subject.model.state_dict())
    values = stock_values(config, *family.sides)
    stock_type = family.stock_type(values, next(iter(family.sides)))
    stock = PositionConfig(stock_type, config.domain, config.architecture)
    if config.architecture != stock.architecture or not (changes := config.changes(stock)):
        return ""
    differences = ", ".join(
        f"{name} {here} (stock {there})" for name, (here, there) in changes.items()
    )
    return f"not compared, because the settings differ: {differences}"


# ---- comparisons ---------------------------------------------------------------------------------


def _against_stock(
    subject: Subject, build_stock: Callable[[], Any], build_cape: Callable[[], Any]
) -> Iterator[Check]:
    models: list[Any] = []

    def build() -> str:
        models.extend((build_stock(), build_cape()))
        return type(models[1]).__name__

    built = check("twin of the stock model", build)
    yield built
    if built.failed:
        return
    stock, cape_model = models
    samples = _samples(subject)
    yield check("logits", partial(_logits, stock, cape_model, samples))
    if hasattr(cape_model, "encoder"):
        for side in ("left", "right"):
            name = f"padding of the source on the {side}"
            yield check(name, partial(_padding, stock, cape_model, samples, side))
        yield check("beam search", partial(_beams, subject, stock, cape_model, samples))
    yield from _model_checks(subject, cape_model)


def _model_checks(subject: Subject, cape_model: Any, prefix: str = "") -> Iterator[Check]:
    samples = _samples(subject)
    yield check(
        f"{prefix}evaluation draws no random numbers", partial(_evaluation, cape_model, samples)
    )
    name = f"{prefix}cached steps against one forward"
    yield check(name, partial(_cached, cape_model, samples))
    if hasattr(cape_model, "encoder"):
        name = f"{prefix}beam search: cached steps against one forward"
        yield check(name, partial(_cached_beams, subject, cape_model, samples))


class Sample(NamedTuple):
    """``[1, S]`` source tokens, EOS last, and ``[1, T]`` target tokens, EOS first."""

    source: Tensor
    target: Tensor


def _samples(subject: Subject) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)

    def draw(dictionary: Dictionary, length: int) -> Tensor:
        return torch.randint(dictionary.nspecial, len(dictionary), (1, length), generator=generator)

    target = subject.task.target_dictionary
    source, samples = getattr(subject.task, "source_dictionary", None) or target, []
    for length in LENGTHS:
        end = torch.full((1, 1), target.eos())
        words = draw(source, length), draw(target, length - 1)
        samples.append(Sample(torch.cat((words[0], end), 1), torch.cat((end, words[1]), 1)))
    return samples


@torch.no_grad()
def _forward(model: Any, source: Tensor, target: Tensor) -> Tensor:
    """``[B, T, V]`` logits."""
    return _output(model, source, target)


def _output(model: Any, source: Tensor, target: Tensor) -> Tensor:
    if not hasattr(model, "encoder"):
        return model(target)[0]
    lengths = source.ne(model.encoder.padding_idx).sum(1)
    return model(source, lengths, target)[0]


def _logits(stock: Any, cape_model: Any, samples: list[Sample]) -> float:
    return max(relative_difference(_forward(stock, *s), _forward(cape_model, *s)) for s in samples)


def _padding(stock: Any, cape_model: Any, samples: list[Sample], side: str) -> float:
    sources = [sample.source[0] for sample in samples]
    padding = cape_model.encoder.padding_idx
    together = collate_tokens(sources, padding, left_pad=side == "left")
    target = samples[0].target
    logits = _forward(cape_model, together, target.expand(len(samples), -1))
    alone = torch.cat([_forward(stock, sample.source, target) for sample in samples])
    return relative_difference(alone, logits)


def _evaluation(cape_model: Any, samples: list[Sample]) -> str:
    config = position_config(cape_model)
    if config.random_evaluation:
        raise NotApplicable("the settings ask for random positions in evaluation")
    before = torch.get_rng_state()
    first, second = (_forward(cape_model, *samples[0]) for _ in range(2))
    if not torch.equal(before, torch.get_rng_state()):
        raise Mismatch("a forward in evaluation mode has drawn random numbers")
    if not torch.equal(first, second):
        raise Mismatch("two forwards in evaluation mode differ")
    return "none drawn, two forwards are equal"


@torch.no_grad()
def _cached(cape_model: Any, samples: list[Sample]) -> float:
    """Feeds tokens one by one with a cache, and compares logits, because the choice of tokens often
    is the same with wrong positions."""
    source, target = samples[0]
    memory = {}
    if hasattr(cape_model, "encoder"):
        lengths = torch.tensor([source.shape[1]])
        memory = {"encoder_out": cape_model.encoder(source, src_lengths=lengths)}
    state: dict[str, Any] = {}
    steps = [
        cape_model.decoder(target[:, :end], incremental_state=state, **memory)[0][:, -1]
        for end in range(1, target.shape[1] + 1)
    ]
    return relative_difference(_forward(cape_model, source, target), torch.stack(steps, dim=1))


def _translations(subject: Subject, model: Any, source: Tensor) -> list[dict[str, Tensor]]:
    """All beams of fairseq's search, with the log-probability of each token."""
    options = argparse.Namespace(beam=BEAM, nbest=BEAM, max_len_b=LENGTH, min_len=LENGTH)
    generator = subject.task.build_generator([model], options)
    inputs = {"src_tokens": source, "src_lengths": torch.tensor([source.shape[1]])}
    (beams,) = subject.task.inference_step(generator, [model], {"net_input": inputs})
    return beams


def _beams(subject: Subject, stock: Any, cape_model: Any, samples: list[Sample]) -> float:
    worst = 0.0
    for source, _ in samples:
        pairs = zip(*(_translations(subject, m, source) for m in (stock, cape_model)), strict=True)
        for expected, got in pairs:
            scores = expected["positional_scores"], got["positional_scores"]
            if scores[0].shape != scores[1].shape:
                raise Mismatch("the translations differ in length")
            worst = max(worst, relative_difference(*scores))
    return worst


@torch.no_grad()
def _cached_beams(subject: Subject, cape_model: Any, samples: list[Sample]) -> float:
    worst = 0.0
    for source, target in samples:
        for beam in _translations(subject, cape_model, source):
            tokens = beam["tokens"].cpu()
            previous = torch.cat((target[0, :1], tokens[:-1]))[None]
            scores = _forward(cape_model, source, previous)[0].log_softmax(-1)
            expected = scores.gather(1, tokens[:, None])[:, 0]
            worst = max(worst, relative_difference(expected, beam["positional_scores"].cpu()))
    return worst


def _augmentation(subject: Subject, cape_model: Any) -> str:
    """Checks that draws reach the positions. Only the position embeddings are in training mode, so
    that nothing else is random."""
    cape_model = copy.deepcopy(cape_model)
    modules = [
        module for module in cape_model.modules() if isinstance(module, TokenPositionEmbedding)
    ]
    if not any(module.encoder.train().draws for module in modules):
        raise NotApplicable("nothing is random")
    for module in modules:
        module.train()
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(_forward(cape_model, *_samples(subject)[0]))
    if torch.equal(*outputs):
        raise Mismatch("training forwards of two seeds are equal: no draw reaches the positions")
    return "forwards of two seeds differ"


def _training(subject: Subject, cape_model: Any) -> str:
    samples = _samples(subject)
    cape_model.train()
    optimizer = torch.optim.SGD(cape_model.parameters(), _STEP)
    losses = []
    for source, target in samples:
        logits = _output(cape_model, source, target)
        if logits.shape[:2] != target.shape:
            raise Mismatch(f"logits have shape {tuple(logits.shape)} for {tuple(target.shape)}")
        scores = logits.log_softmax(-1)[:, :-1].flatten(0, 1)
        losses.append(nn.functional.nll_loss(scores, target[:, 1:].flatten()))
    loss = torch.stack(losses).mean()
    loss.backward()
    gradients = {n: p.grad for n, p in cape_model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise Mismatch(f"the gradient of {name} is not finite")
    optimizer.step()
    cape_model.eval()
    if not _forward(cape_model, *samples[0]).isfinite().all():
        raise Mismatch("the logits are not finite after the step")
    return f"loss {loss.item():.3g}, {len(gradients)} gradients are finite"
