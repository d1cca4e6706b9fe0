"""Registers ``cape_<arch>`` for the Transformer and Transformer language-model families."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from fairseq import utils
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.nat import FairseqNATModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import LearnedPositionalEmbedding
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from cape_plugins import PositionConfig, build_position_encoder
from cape_plugins.alpha import TokenCounts, count_binarized
from fairseq_user_dir.admin import attach_admin, profile_admin, profiling_batch
from fairseq_user_dir.attention import add_relative_positions
from fairseq_user_dir.embedding import TokenPositionEmbedding, WrappingPositionalEmbedding
from fairseq_user_dir.options import (
    add_admin_arg,
    add_position_args,
    config_from_args,
    dataclass_with_positions,
    set_missing,
)
from fairseq_user_dir.stacks import DecoderPositions, EncoderPositions

logger = logging.getLogger(__name__)

PREFIX = "cape_"
# Stock architectures that do not run, so their variants cannot either.
NOT_RUNNABLE = {
    "nacrf_transformer": "uses np.float, gone from numpy",
    "transformer_from_pretrained_xlm": "needs a pretrained XLM",
    "model_parallel_transformer": "needs megatron",
    "model_parallel_transformer_lm": "needs megatron",
}
ADMIN_SEED = 20080
_OLD_TABLES = ("embed_positions.weights", "embed_positions._float_tensor")


class _CapeModel:
    """What every cape model does around its stock ``build_model``."""

    architecture: str

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Builds the stock model, then puts cape positions in; the settings that were resolved
        (such as alpha) are written into `args`, which fairseq stores in the checkpoint.

        Raises:
            ValueError: for settings that are not allowed, naming flag, value, range and remedy.
        """
        config = config_from_args(args, cls.architecture)
        check_stock_args(args, config)
        if config.source_scale == "auto":
            config = config.replace(source_scale=str(_count_tokens(task)))
            set_args(args, position_source_scale=config.source_scale)
        _set_stock_args(args, config)
        model = super().build_model(args, task)
        if not isinstance(model, cls):  # transformer_align names its own class
            model.__class__ = cls
        model.position_config = config
        if hasattr(model, "encoder"):
            install(model.encoder, EncoderPositions, config, config.alpha)
        install(model.decoder, DecoderPositions, config, 1.0)
        if getattr(args, "admin_init", False):
            _initialize_admin(model, args, task)
        logger.info("position embedding: %s", config)
        return model

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Refuses a checkpoint whose positions are of another kind, with a reason; drops the
        sinusoid tables that old fairseq versions stored, as the stock model does."""
        for name in [n for n in state_dict if n.endswith(_OLD_TABLES)]:
            del state_dict[name]
        check_state_dict(state_dict, self)
        super().upgrade_state_dict(state_dict)


class _CapeSeq2Seq(_CapeModel):
    architecture = "seq2seq"

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Adds the stock arguments of the model and ours."""
        super().add_args(parser)
        add_position_args(parser)
        add_admin_arg(parser)


class _CapeLanguageModel(_CapeModel):
    architecture = "decoder"


def check_stock_args(args: Any, config: PositionConfig) -> None:
    """Refuses stock flags that contradict the position embedding."""
    if config.encoding != "none" and getattr(args, "no_token_positional_embeddings", False):
        raise ValueError(
            f"--no-token-positional-embeddings contradicts --position-embedding {config.type}; "
            "leave it out, or choose a type that adds nothing to the tokens."
        )


def _set_stock_args(args: Any, config: PositionConfig) -> None:
    """Lets the stock model build the parameters that the encoding needs, and no others."""
    learned = config.encoding == "table"
    values = {
        "no_token_positional_embeddings": config.encoding == "none",
        "decoder_learned_pos": learned,
    }
    if config.architecture == "seq2seq":
        values["encoder_learned_pos"] = learned
    set_args(args, **values)


def set_args(args: Any, **values: Any) -> None:
    """Sets attributes of a namespace or of a configuration with a fixed set of keys."""
    with open_dict(args) if OmegaConf.is_config(args) else nullcontext():
        for name, value in values.items():
            setattr(args, name, value)


def install(stack: nn.Module, mixin: type, config: PositionConfig, source_scale: float) -> None:
    """Replaces ``embed_positions`` of a built stack and puts `mixin` over its class."""
    stock = stack.embed_positions
    if (stock is None) != (config.encoding == "none"):
        raise ValueError(
            f"{type(stack).__name__} has no place for position embedding {config.type!r}: its "
            f"embed_positions is {stock!r}."
        )
    if isinstance(stock, LearnedPositionalEmbedding):
        stack.embed_positions = WrappingPositionalEmbedding.take_over(stock)
    elif stock is not None:
        encoder = build_position_encoder(
            config, stock.embedding_dim, frequencies="fairseq", layout="sin_cos_blocks"
        )
        stack.embed_positions = TokenPositionEmbedding(encoder, stock.padding_idx, source_scale)
    if config.relative_context:
        add_relative_positions(stack.layers, config)
    stack.position_config = config
    stack.__class__ = type(f"Cape{type(stack).__name__}", (mixin, type(stack)), {})


def _count_tokens(task: Any) -> TokenCounts:
    """Counts the binarised training data of the task.

    Raises:
        ValueError: if they are not there.
    """
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    source, target = (getattr(settings, f"{side}_lang", None) for side in ("source", "target"))
    try:
        if not source or not target:
            raise ValueError(f"task {type(task).__name__} has no single language pair")
        folders = utils.split_paths(settings.data)
        split = getattr(settings, "train_subset", None) or "train"
        counts = count_binarized(folders, source, target, split)
    except (OSError, ValueError) as error:
        raise ValueError(
            "--position-source-scale auto cannot count the training data: "
            f"{error}. Give the ratio of target to source tokens, for example "
            "--position-source-scale 1.03; `cape-plugins alpha` counts it."
        ) from error
    logger.info(
        "source scale alpha = %.5f (%d target / %d source tokens)",
        counts.alpha,
        counts.target,
        counts.source,
    )
    return counts


def _initialize_admin(model: nn.Module, args: Any, task: Any) -> None:
    """Attaches ADMIN's weights; profiles them unless `args` come from a checkpoint."""
    attach_admin(model)
    if getattr(args, "admin_profiled", False):
        return
    batch = profiling_batch(task)
    if batch is None:
        settings = getattr(task, "cfg", None)
        raise ValueError(
            f"--admin-init needs the training data in {getattr(settings, 'data', None)!r} to "
            "profile the model, and they are not there; give the binarised data folder."
        )
    constants = profile_admin(model, *batch, seed=ADMIN_SEED)
    set_args(args, admin_profiled=True)
    logger.info("ADMIN initial weights of the residual branches: %s", constants)


def check_state_dict(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Compares the positional parameters of a checkpoint with those of the model.

    Raises:
        ValueError: naming what differs, the flags of the model and what to do.
    """
    config = model.position_config
    own = model.state_dict()
    for part, flag in (
        ("embed_positions.weight", "--position-embedding"),
        (".positions.encoding.", "--position-embedding"),
        (".relative.", "--position-relative-context"),
        (".admin.", "--admin-init"),
    ):
        in_checkpoint = any(part in name for name in state_dict)
        in_model = any(part in name for name in own)
        if in_checkpoint != in_model:
            has, has_not = ("the checkpoint", "this model")
            if in_model:
                has, has_not = has_not, has
            raise ValueError(
                f"{has} has parameters '*{part}*', {has_not} has none: they were built with "
                f"different settings of {flag}. This model has --position-embedding {config.type} "
                f"--position-relative-context {config.relative_context}; give the settings that "
                "the checkpoint was trained with, or train anew."
            )


def _arch_function(stock: Callable[[Any], None], defaults: dict[str, Any]) -> Callable:
    def arch(args: Any) -> None:
        for name, value in defaults.items():
            if getattr(args, name, None) is None:
                setattr(args, name, value)
        set_missing(args)
        stock(args)

    return arch


def _register(name: str, stock: type, mixin: type) -> type:
    """One stock model with all of its architectures."""
    dataclass = MODEL_DATACLASS_REGISTRY.get(name)
    cape = type(f"Cape{stock.__name__}", (mixin, stock), {"__doc__": stock.__doc__})
    if dataclass is not None:
        dataclass = dataclass_with_positions(f"Cape{dataclass.__name__}", dataclass)
    cape = register_model(PREFIX + name, dataclass=dataclass)(cape)
    defaults: dict[str, Any] = {}
    if issubclass(stock, TransformerModel):
        defaults["admin_init"] = False
    if issubclass(stock, FairseqNATModel):
        # their task, translation_lev, puts BOS before the source itself
        defaults["position_source_bos"] = False
    for arch in ARCH_MODEL_INV_REGISTRY[name]:
        if dataclass is None or arch != name:  # a dataclass model registers its own name
            function = _arch_function(ARCH_CONFIG_REGISTRY[arch], defaults)
            register_model_architecture(PREFIX + name, PREFIX + arch)(function)
    return cape


def register_all() -> dict[str, type]:
    """Registers every runnable model of both families.

    Returns:
        The cape class for each stock model name.
    """
    classes = {}
    for name, stock in list(MODEL_REGISTRY.items()):
        if name in NOT_RUNNABLE or name.startswith(PREFIX):
            continue
        if issubclass(stock, TransformerModel):
            classes[name] = _register(name, stock, _CapeSeq2Seq)
        elif issubclass(stock, TransformerLanguageModel):
            classes[name] = _register(name, stock, _CapeLanguageModel)
    return classes


CLASSES = register_all()
CapeTransformerModel = CLASSES["transformer"]
CapeTransformerLanguageModel = CLASSES["transformer_lm"]
