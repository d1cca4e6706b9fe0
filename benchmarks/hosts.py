"""Models, batches and training steps of fairseq, stock and cape, for all benchmarks."""

import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import Dictionary
from fairseq.data.language_pair_dataset import collate
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from fairseq.utils import apply_to_sample
from torch import nn

import fairseq_user_dir  # noqa: F401  (registers the cape architectures)
from benchmarks.measure import Setup, Step
from cape_plugins import TYPES, PositionConfig

warnings.filterwarnings("ignore", message=".*torch.cuda.amp.*", category=FutureWarning)

STOCK = "stock"
# alpha of WMT14 English-German (CAPE appendix D.1); "auto" would count training data
ALPHA = "1.0337"
# transformer-base, and its reduction for quick runs
BASE = {"share_all_embeddings": True}
TINY = {
    **BASE,
    **{f"{side}_embed_dim": 64 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_embed_dim": 128 for side in ("encoder", "decoder")},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
}


def variants() -> dict[str, dict[str, str]]:
    """Arguments by name: the stock arch, every type, and cape without its BOS hint, because the
    hint makes each source one token longer."""
    arguments: dict[str, dict[str, str]] = {STOCK: {}}
    for name in TYPES:
        arguments[name] = {"position_embedding": name}
        config = PositionConfig(name, "text", "seq2seq")
        if config.source_scale == "auto":
            arguments[name]["position_source_scale"] = ALPHA
        if config.source_bos:
            arguments[f"{name}, no BOS"] = {**arguments[name], "position_source_bos": "false"}
    return arguments


def make_task(vocabulary: int) -> TranslationTask:
    """A translation task with one dictionary of `vocabulary` symbols for both sides."""
    dictionary = Dictionary()
    for number in range(vocabulary - len(dictionary)):
        dictionary.add_symbol(str(number))
    return TranslationTask(
        TranslationConfig(source_lang="source", target_lang="target"), dictionary, dictionary
    )


def make_model(
    task: TranslationTask, positions: Mapping[str, object], setup: Setup, **arguments: object
) -> nn.Module:
    """A Transformer with fairseq's base architecture, except for the `arguments`. `positions` are
    the arguments of a cape model, and empty for the stock model."""
    arch = "cape_transformer" if positions else "transformer"
    args = Namespace(arch=arch, **arguments, **positions)
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(0)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(setup.device, setup.dtype)


def share_parameters(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Makes all models use the parameters of the first model that they also have, so that neither
    values of parameters nor their place in memory can make a difference. Returns the distinct
    parameters."""
    first, *others = models
    modules = dict(first.named_modules())
    for other in others:
        for path, module in other.named_modules():
            shared = modules[path]._parameters if path in modules else {}
            for name, parameter in module._parameters.items():
                if parameter is not None and shared.get(name) is not None:
                    module._parameters[name] = shared[name]
    distinct = {id(p): p for model in (first, *others) for p in model.parameters()}
    return list(distinct.values())


def make_tokens(task: TranslationTask, batch_size: int, length: int) -> list[torch.Tensor]:
    """Random sentences with 80 to 100 % of `length` tokens, EOS last, as in batches of sentences of
    similar length."""
    generator = torch.Generator().manual_seed(length)
    symbols = task.source_dictionary
    lengths = torch.randint(-(-4 * length // 5), length + 1, (batch_size,), generator=generator)
    lengths[0] = length
    sentences = []
    for size in lengths.tolist():
        sentence = torch.randint(symbols.nspecial, len(symbols), (size,), generator=generator)
        sentence[-1] = symbols.eos()
        sentences.append(sentence)
    return sentences


def make_sample(task: TranslationTask, batch_size: int, length: int, setup: Setup) -> dict:
    """A batch as fairseq collates it: source padded on the left, target on the right."""
    sentences = make_tokens(task, batch_size, length)
    symbols = task.source_dictionary
    # targets in another order, so that source and target lengths of a pair differ
    pairs = zip(sentences, sentences[1:] + sentences[:1], strict=True)
    sample = collate(
        [{"id": i, "source": source, "target": target} for i, (source, target) in enumerate(pairs)],
        symbols.pad(),
        symbols.eos(),
        left_pad_source=True,
        left_pad_target=False,
    )
    return apply_to_sample(lambda tensor: tensor.to(setup.device), sample)


def training_steps(
    task: TranslationTask, models: Mapping[str, nn.Module], sample: dict
) -> dict[str, Step]:
    """A whole training step of each model: forward, loss, backward and fairseq's Adam with its
    state in float32. The models share their parameters, and therefore the optimizer."""
    config = FairseqAdamConfig(adam_betas="(0.9, 0.98)", lr=[1e-5])
    optimizer = FairseqAdam(config, share_parameters(models.values()))
    criterion = LabelSmoothedCrossEntropyCriterion(task, sentence_avg=False, label_smoothing=0.1)

    def make_step(model: nn.Module) -> Step:
        def step() -> None:
            task.train_step(sample, model, criterion, optimizer, update_num=0)
            optimizer.multiply_grads(1 / sample["ntokens"])
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {name: make_step(model) for name, model in models.items()}
