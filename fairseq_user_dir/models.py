"""Registers ``cape_<arch>`` for the Transformer and Transformer language-model families."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from fairseq import utils
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.nat import FairseqNATDecoder, FairseqNATModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor, nn

from cape_plugins import PositionConfig, build_position_encoder
from cape_plugins.corpus.alpha import count_binarized
from cape_plugins.settings.options import COUNTED
from fairseq_user_dir.admin import attach_admin, profile_admin, profiling_batch
from fairseq_user_dir.attention import add_positions_to_attention
from fairseq_user_dir.checkpoints import PositionalModel
from fairseq_user_dir.embedding import TokenPositionEmbedding, WrappingPositionalEmbedding
from fairseq_user_dir.flags import (
    add_admin_arg,
    add_position_args,
    config_from_args,
    dataclass_with_positions,
    record,
    set_args,
    set_missing,
)
from fairseq_user_dir.host.errors import SettingsError, named_by_flags
from fairseq_user_dir.stacks import DecoderPositions, EncoderPositions

logger = logging.getLogger(__name__)

PREFIX = "cape_"
# Stock architectures that do not run; a cape architecture could not run either.
NOT_RUNNABLE = {
    "nacrf_transformer": "uses np.float, which numpy has removed",
    "transformer_from_pretrained_xlm": "needs a pretrained XLM",
    "model_parallel_transformer": "needs megatron",
    "model_parallel_transformer_lm": "needs megatron",
}
ADMIN_SEED = 20080  # fixed, so that the constants do not depend on --seed


class _CapeModel(PositionalModel):
    """Code that every cape model runs around its stock ``build_model``."""

    architecture: str

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Builds the stock model, then replaces its positions. All settings, including defaults and
        alpha, are written into `args`, which fairseq stores in the checkpoint.

        Raises:
            SettingsError: for settings that are not allowed; names flag, value, range and remedy.
        """
        config = config_from_args(args, cls.architecture)
        check_stock_args(args, config)
        if config.source_scale in COUNTED:
            is_explicit = getattr(args, "position_source_scale", None) is not None
            config = config.replace(
                source_scale=_count_tokens(task, config.source_scale, is_explicit)
            )
        # alpha is stored as two integers in the arguments, not as a buffer, so state dicts equal
        # the stock model's, and checkpoints load both ways
        record(args, config)
        _set_stock_args(args, config)
        model = super().build_model(args, task)
        if not isinstance(model, cls):  # transformer_align builds the stock class by its name
            model.__class__ = cls
        model.position_config = config
        if hasattr(model, "encoder"):
            install(model.encoder, EncoderPositions, config, "source")
        install(model.decoder, DecoderPositions, config, "target")
        if getattr(args, "admin_init", False):
            _initialize_admin(model, args, task)
        logger.info("position embedding: %s", config)
        return model


class _CapeSeq2Seq(_CapeModel):
    architecture = "seq2seq"

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Adds the stock arguments of the model and the arguments of this package."""
        super().add_args(parser)
        add_position_args(parser)
        add_admin_arg(parser)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        prev_output_tokens: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """See fairseq. The encoder, which draws for both sides, gets the length of the target if
        the draw depends on this length."""
        lengths = None
        if self.position_config.sampling:
            lengths = self._target_lengths(prev_output_tokens, *args, **kwargs)
        with self.encoder.using(lengths):
            return super().forward(src_tokens, src_lengths, prev_output_tokens, *args, **kwargs)

    def _target_lengths(self, prev_output_tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        """``[B]``, largest number of target tokens that the decoder reads in a forward."""
        return prev_output_tokens.ne(self.decoder.padding_idx).sum(1)


class _CapeNonautoregressive(_CapeSeq2Seq):
    def _target_lengths(
        self, prev_output_tokens: Tensor, tgt_tokens: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """See the base class. Some of these decoders read a draft, in which tokens are left out,
        and in the same forward the whole target."""
        lengths = super()._target_lengths
        return torch.maximum(lengths(prev_output_tokens), lengths(tgt_tokens))


class _CapeLanguageModel(_CapeModel):
    architecture = "decoder"


def check_stock_args(args: Any, config: PositionConfig) -> None:
    """Refuses stock flags that contradict the position embedding."""
    if config.encoding.adds and getattr(args, "no_token_positional_embeddings", False):
        raise SettingsError(
            f"--no-token-positional-embeddings contradicts --position-embedding {config.type}; "
            "leave the flag out, or choose a type that adds nothing to the tokens."
        )


def _set_stock_args(args: Any, config: PositionConfig) -> None:
    """Sets stock arguments so that the stock model builds the parameters that the encoding needs,
    and no others."""
    sides = ("encoder", "decoder") if config.architecture == "seq2seq" else ("decoder",)
    set_args(args, **stock_values(config, *sides))


def stock_values(config: PositionConfig, *sides: str) -> dict[str, bool]:
    """Stock arguments that make the stacks have a module ``embed_positions``, and a learned table
    under its stock name: initialisation and checkpoints stay stock."""
    learned = {f"{side}_learned_pos": config.encoding.counts for side in sides}
    return {"no_token_positional_embeddings": not config.encoding.adds, **learned}


def install(stack: nn.Module, mixin: type, config: PositionConfig, side: str) -> None:
    """Replaces ``embed_positions`` of a built stack and puts `mixin` over its class. The first
    token is at ``padding_idx + 1``, as in fairseq, so an unaugmented sinusoid equals fairseq's
    sinusoid bit for bit."""
    stock = stack.embed_positions
    if (stock is None) == config.encoding.adds:
        raise SettingsError(
            f"{type(stack).__name__} has no place for position embedding {config.type!r}: its "
            f"embed_positions is {stock!r}."
        )
    encoder = None
    if isinstance(stock, LearnedPositionalEmbedding):
        stack.embed_positions = WrappingPositionalEmbedding.take_over(stock)
    else:
        with named_by_flags():
            encoder = build_position_encoder(
                config,
                stack.embed_tokens.embedding_dim if stock is None else stock.embedding_dim,
                side=side,
                start=stack.padding_idx + 1,
                frequencies="fairseq",
                layout="sin_cos_blocks",
            )
    if encoder is not None and stock is not None:
        stack.embed_positions = TokenPositionEmbedding(encoder, stack.padding_idx)
    causal = side == "target" and not isinstance(stack, FairseqNATDecoder)
    stack.stack_attention = add_positions_to_attention(
        stack.layers, config, encoder, stack.padding_idx, causal
    )
    stack.position_config = config
    stack.__class__ = type(f"Cape{type(stack).__name__}", (mixin, type(stack)), {})


def _count_tokens(task: Any, mode: str, is_explicit: bool) -> str:
    """Counts the binarised training data of the task: TARGET/SOURCE. `mode`, one of
    :data:`~cape_plugins.settings.options.COUNTED`, decides whether EOS counts. A task without one
    source and one target language has no such ratio and gets 1, unless `is_explicit`. The ratio 1
    is exact for denoising, in which both sides are the same text; for several languages it leaves
    the indices unchanged. A resumed training counts again, and stops if the data have another
    ratio.

    Raises:
        SettingsError: if the data cannot be counted.
    """
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    source, target = (getattr(settings, f"{side}_lang", None) for side in ("source", "target"))
    without_pair = f"task {type(task).__name__} has no single language pair to count"
    if not ((source and target) or is_explicit):
        logger.warning(
            "%s: source scale alpha = 1; set another alpha by --position-source-scale", without_pair
        )
        return "1"
    try:
        if not source or not target:
            raise ValueError(without_pair)
        folders = utils.split_paths(settings.data)
        split = getattr(settings, "train_subset", None) or "train"
        counts = count_binarized(folders, source, target, split, eos=COUNTED[mode])
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"--position-source-scale {mode} cannot count the training data: "
            f"{str(error).rstrip('.')}. Give the ratio of target to source tokens, for example "
            "--position-source-scale 1.03; `cape-plugins alpha` counts it."
        ) from error
    logger.info(
        "source scale alpha = %.5f (%d target / %d source tokens%s)",
        counts.alpha,
        counts.target,
        counts.source,
        "" if COUNTED[mode] else ", EOS not counted",
    )
    if counts.doubt:
        logger.warning("%s", counts.doubt)
    return str(counts)


def _initialize_admin(model: nn.Module, args: Any, task: Any) -> None:
    """Attaches ADMIN's weights; profiles them unless `args` come from a checkpoint."""
    attach_admin(model)
    if getattr(args, "admin_profiled", False):
        return
    batch = profiling_batch(task)
    if batch is None:
        settings = getattr(task, "cfg", None)
        raise SettingsError(
            f"--admin-init needs the training data in {getattr(settings, 'data', None)!r} to "
            "profile the model, but the folder has no training data; give the folder of the "
            "binarised data."
        )
    constants = profile_admin(model, *batch, seed=ADMIN_SEED)
    set_args(args, admin_profiled=True)
    logger.info("ADMIN initial weights of the residual branches: %s", constants)


def _arch_function(stock: Callable[[Any], None], defaults: dict[str, Any]) -> Callable:
    def arch(args: Any) -> None:
        for name, value in defaults.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
        set_missing(args)
        stock(args)

    return arch


def _register(name: str, stock: type, mixin: type) -> type:
    """Registers one stock model with all its architectures."""
    dataclass = MODEL_DATACLASS_REGISTRY.get(name)
    cape = type(f"Cape{stock.__name__}", (mixin, stock), {"__doc__": stock.__doc__})
    if dataclass is not None:
        dataclass = dataclass_with_positions(f"Cape{dataclass.__name__}", dataclass)
    cape = register_model(PREFIX + name, dataclass=dataclass)(cape)
    defaults: dict[str, Any] = {}
    if issubclass(stock, TransformerModel):
        defaults["admin_init"] = False
    if issubclass(stock, FairseqNATModel):
        # translation_lev, the task of these models, already puts BOS before the source
        defaults["position_source_bos"] = False
    for arch in ARCH_MODEL_INV_REGISTRY[name]:
        if dataclass is None or arch != name:  # a dataclass model registers its name itself
            function = _arch_function(ARCH_CONFIG_REGISTRY[arch], defaults)
            register_model_architecture(PREFIX + name, PREFIX + arch)(function)
    return cape


def register_all() -> dict[str, type]:
    """Registers every runnable model of both families.

    Returns:
        The cape class for each stock model name.
    """
    classes = {}
    for name, stock in list(MODEL_REGISTRY.items()):  # a copy, because the registry grows
        if name in NOT_RUNNABLE or name.startswith(PREFIX):
            continue
        if issubclass(stock, FairseqNATModel):  # first, because it is a TransformerModel too
            classes[name] = _register(name, stock, _CapeNonautoregressive)
        elif issubclass(stock, TransformerModel):
            classes[name] = _register(name, stock, _CapeSeq2Seq)
        elif issubclass(stock, TransformerLanguageModel):
            classes[name] = _register(name, stock, _CapeLanguageModel)
    return classes


CLASSES = register_all()
CapeTransformerModel = CLASSES["transformer"]
CapeTransformerLanguageModel = CLASSES["transformer_lm"]
