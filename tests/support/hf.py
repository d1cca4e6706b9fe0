"""Tiny models of every family and type, with their stock counterparts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import hf_models
from cape_plugins import PositionConfig, PositionEncoder
from cape_plugins.checkpoints.families import Side, find_family
from cape_plugins.settings.registry import types_of
from hf_models.checks.tiny import SIZES, fill_zeros
from tests.support.expected import IN_ATTENTION, moved_types

PAD, EOS = 59, 0
ALPHA = "11/10"


class Family(NamedTuple):
    """A model class, its configuration, their stock counterparts (None if there are none) and tiny
    sizes.

    Attributes:
        stock_type: The type that is the stock model.
        batch: Makes inputs, with labels where the model has a loss.
        auto: Auto class that loads it.
        noise: Settings of dropout, with which the stock model and ours draw the same masks.
        stock_call: Arguments with which the stock model takes images of any size.
        adapted: Ends of names of the layers that adapters change.
        counts_items: Whether all items of a step divide the loss, as the Trainer counts them.
        reasons: Names of tests that leave the family out, and why.
    """

    model: Any
    config: Any
    stock_model: Any
    stock_config: Any
    sizes: dict[str, Any]
    stock_type: str | None
    batch: Callable[[], dict[str, Tensor]]
    auto: Any
    noise: dict[str, float] = {}  # noqa: RUF012
    stock_call: dict[str, bool] = {}  # noqa: RUF012
    adapted: tuple[str, ...] = ("q_proj", "v_proj")
    counts_items: bool = False
    reasons: dict[str, str] = {}  # noqa: RUF012

    def build(self, settings: dict[str, Any], seed: int = 0, **sizes: Any) -> Any:
        torch.manual_seed(seed)
        config = self.config(**{**self.sizes, **sizes}, position_embedding=settings)
        return fill_zeros(self.model(config).eval())

    def build_stock(self, seed: int = 0, **sizes: Any) -> Any:
        torch.manual_seed(seed)
        config = self.stock_config(**{**self.sizes, **sizes})
        return fill_zeros(self.stock_model(config).eval())


# ---- batches -------------------------------------------------------------------------------------


def sentences(left: bool = False, lengths: tuple[int, ...] = (9, 6, 4)) -> dict[str, Tensor]:
    """A batch of source sentences of different lengths."""
    generator = torch.Generator().manual_seed(1)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randint(1, PAD, (length,), generator=generator)
        columns = slice(width - length, width) if left else slice(0, length)
        ids[row, columns], mask[row, columns] = words, 1
    return {"input_ids": ids, "attention_mask": mask}


def targets(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randint(1, PAD, (rows, length), generator=torch.Generator().manual_seed(2))


def frames(lengths: tuple[int, ...] = (50, 41, 22)) -> dict[str, Tensor]:
    """A batch of log-mel frames."""
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(len(lengths), max(lengths), 8, generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_features": features * mask[..., None], "attention_mask": mask.long()}


def translations() -> dict[str, Tensor]:
    return {**sentences(), "labels": targets()}


def labelled_tokens() -> dict[str, Tensor]:
    """Sentences whose tokens are to be predicted."""
    inputs = sentences()
    labels = targets(3, 9).masked_fill(inputs["attention_mask"].eq(0), -100)
    return {**inputs, "labels": labels}


def images() -> dict[str, Tensor]:
    """A batch of images that are not square, of another size than the stock table."""
    generator = torch.Generator().manual_seed(3)
    return {"pixel_values": torch.randn(3, 3, 24, 40, generator=generator)}


def labelled_images() -> dict[str, Tensor]:
    return {**images(), "labels": torch.tensor([0, 3, 1])}


def transcribed() -> dict[str, Tensor]:
    # neither blank nor padding
    return {**frames(), "labels": targets(3, 4) % 9 + 3}


def spelled() -> dict[str, Tensor]:
    inputs = transcribed()
    inputs["labels"][2, 2:] = -100
    return inputs


# ---- the table of families -----------------------------------------------------------------------


def small(*names: str) -> dict[str, Any]:
    """The sizes that `cape-plugins doctor` has for these fields."""
    return {name: SIZES[name] for name in names}


ENCODER_SIZES = small(
    *("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "init_std")
)
DECODER_SIZES = small("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim")
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
SEQ2SEQ = {
    **ENCODER_SIZES,
    **DECODER_SIZES,
    **NO_DROPOUT,
    **small("vocab_size", "max_position_embeddings"),
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
    "eos_token_id": EOS,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "scale_embedding": True,
}
STACK = small(
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "initializer_range",
)
IMAGES = {**STACK, **small("image_size", "patch_size"), "num_labels": 5}
SPEECH = {**ENCODER_SIZES, **NO_DROPOUT}
BEIT = {
    "use_absolute_position_embeddings": True,
    "use_relative_position_bias": True,
    "drop_path_rate": 0.0,
}
# heads of this family that read four layers
FOUR_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "pool_scales": [1]}
SIZES_OF_HEADS = {"CapeBeitForSemanticSegmentation": FOUR_LAYERS}
FLAG = {"interpolate_pos_encoding": True}


def row(
    name: str, head: str, sizes: dict[str, Any], stock_type: str, auto: str, **more: Any
) -> Any:
    """A row of classes that are named as in transformers."""
    classes = [f"{name}{head}", f"{name}Config"]
    cape_classes = [getattr(hf_models, f"Cape{title}") for title in classes]
    stock = [getattr(transformers, title) for title in classes]
    return Family(
        *cape_classes, *stock, sizes, stock_type, auto=getattr(transformers, auto), **more
    )


def translator(
    name: str, stock_type: str, head: str = "ForConditionalGeneration", **sizes: Any
) -> Any:
    more = {"batch": translations, "noise": {"dropout": 0.1, "attention_dropout": 0.1}}
    return row(name, head, {**SEQ2SEQ, **sizes}, stock_type, "AutoModelForSeq2SeqLM", **more)


def classifier(name: str, sizes: dict[str, Any] | None = None, **more: Any) -> Any:
    noise = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    more = {"batch": labelled_images, "noise": noise, **more}
    head, auto = "ForImageClassification", "AutoModelForImageClassification"
    return row(name, head, {**IMAGES, **(sizes or {})}, "abspos", auto, **more)


def language_model(name: str) -> Any:
    more = {"batch": labelled_tokens, "noise": {"attention_dropout": 0.1}, "counts_items": True}
    sizes = {**TOKENS, "num_key_value_heads": 2}
    return row(name, "ForCausalLM", sizes, "rope", "AutoModelForCausalLM", **more)


MARIAN = translator("Marian", "sinpos", "MTModel")
VIT = classifier("ViT", stock_call=FLAG)
CTC = Family(
    hf_models.CapeSpeechForCTC,
    hf_models.CapeSpeechConfig,
    None,
    None,
    {
        **SPEECH,
        "initializer_range": 0.2,
        "feature_dropout": 0.0,
        "vocab_size": 12,
        "num_mel_bins": 8,
        "max_position_embeddings": 9,
        "ctc_zero_infinity": True,
    },
    None,
    spelled,
    transformers.AutoModelForCTC,
)
SPEECH_TO_TEXT = row(
    "Speech2Text",
    "ForConditionalGeneration",
    {
        **SPEECH,
        **DECODER_SIZES,
        **small("conv_channels", "input_feat_per_channel"),
        **small("max_source_positions", "max_target_positions"),
        "vocab_size": 40,
    },
    "sinpos",
    "AutoModelForSpeechSeq2Seq",
    batch=transcribed,
)
TOKENS = {
    **STACK,
    **small("vocab_size"),
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
ENDS = {"cls_token_id": 1, "sep_token_id": EOS, "local_attention": 6}
ENDS["global_attn_every_n_layers"] = 2
BERT_NOISE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES = {
    "marian": MARIAN,
    "vit": VIT,
    "speech_ctc": CTC,
    "speech_to_text": SPEECH_TO_TEXT,
    "bert": row(
        *("Bert", "ForMaskedLM"),
        {**TOKENS, **BERT_NOISE, "max_position_embeddings": 40},
        *("abspos", "AutoModelForMaskedLM"),
        batch=labelled_tokens,
        noise=dict.fromkeys(BERT_NOISE, 0.1),
        adapted=("query", "value"),
    ),
    "llama": language_model("Llama"),
    "modernbert": row(
        *("ModernBert", "ForMaskedLM", {**TOKENS, **ENDS}, "rope", "AutoModelForMaskedLM"),
        batch=labelled_tokens,
        noise={"attention_dropout": 0.1, "embedding_dropout": 0.1, "mlp_dropout": 0.1},
        adapted=("Wqkv",),
        counts_items=True,
    ),
    "m2m_100": translator(  # padding is told by its token, for which the table has a row
        *("M2M100", "sinpos"), max_position_embeddings=60, decoder_start_token_id=EOS
    ),
    "bart": translator("Bart", "abspos"),
    "mbart": translator("MBart", "abspos"),
    "pegasus": translator("Pegasus", "sinpos"),
    "qwen2": language_model("Qwen2"),
    "deit": classifier("DeiT", stock_call=FLAG),
    "dinov2": classifier("Dinov2"),
    "dinov2_with_registers": classifier(
        "Dinov2WithRegisters",
        reasons={"pictures": "its table is smoothed when it shrinks, in pictures it is not"},
    ),
    "beit": classifier("Beit", BEIT),
    "siglip_vision_model": row(
        *("SiglipVision", "Model", IMAGES, "abspos", "AutoModel"),
        batch=images,
        noise={"attention_dropout": 0.1},
        stock_call=FLAG,
    ),
}
# One family of each kind of stack has all types; the others, which share its code, have a few.
STACKS = ("marian", "vit", "speech_ctc", "speech_to_text", "bert", "llama", "modernbert")
WITH_STOCK = [name for name, family in FAMILIES.items() if family.stock_model]


def side_of(family: str) -> Side:
    """The row of the side whose settings are `position_embedding`."""
    row = find_family(FAMILIES[family].config.model_type)
    return next(iter(row.sides.values()))


def families_of(architecture: str) -> list[str]:
    """Families whose main side is of this architecture."""
    return [name for name in FAMILIES if side_of(name).architecture == architecture]


def each_type(domain: str, architecture: str) -> dict[str, dict[str, Any]]:
    """Settings of each type; alpha is given where it would be counted."""
    settings = {}
    for name in types_of(architecture, domain):
        counted = PositionConfig(name, domain, architecture).source_scale == "auto"
        settings[name] = {"type": name, **({"source_scale": ALPHA} if counted else {})}
    return settings


# One of each type, and combinations.
TEXT = each_type("text", "seq2seq")
TEXT["rfs+table"] = {**TEXT.pop("rfs"), "learned_table": True}
TEXT["cape+relative"] = {**TEXT["cape"], "relative_context": 3, "relative_values": True}
TEXT["sinpos+bos"] = {"type": "sinpos", "source_bos": True, "source_scale": ALPHA}
TEXT["relpos+first"] = {"type": "relpos", "relative_context": 2, "layers": "first"}
IMAGE = each_type("image", "encoder")
IMAGE["cape+relative"] = {"type": "cape", "relative_context": 3}
IMAGE["sinpos+gamma"] = {"type": "sinpos", "gamma": 0.5}
AUDIO = each_type("audio", "encoder")
AUDIO["cape+relative"] = {"type": "cape", "relative_context": 3, "relative_beyond": "zero"}
AUDIO["sinpos+mean"] = {"type": "cape", "max_global_shift": 0, "max_local_shift": 0}
AUDIO["sinpos+mean"]["max_global_scale"] = 1
ENCODER = each_type("text", "encoder")
ENCODER["cape+relative"] = {"type": "cape", "relative_context": 3}
ROTARY = each_type("text", "rotary")
ROTARY["cape+scale"] = {"type": "cape", "max_global_scale": 1.4}
OF_SIDE = {
    ("text", "seq2seq"): TEXT,
    ("image", "encoder"): IMAGE,
    ("audio", "encoder"): AUDIO,
    ("text", "encoder"): ENCODER,
    ("text", "rotary"): ROTARY,
}
VARIANTS, OF_FAMILY, MOVED, _seen = {}, {}, [], set()
# families with a part of the types: the stock type, cape, and one that acts in attention
_some = [name for name in FAMILIES if name not in STACKS]
for _name, _family in FAMILIES.items():
    _side = side_of(_name).domain, side_of(_name).architecture
    _types, _moved = OF_SIDE[_side], moved_types(_side[1])
    OF_FAMILY[_name] = _types | _moved
    if _name in STACKS:
        VARIANTS[_name] = _types
        # types in attention with augmentation: all in one stack of a side, one in the others
        MOVED += [(_name, name) for name in [*_moved][: 1 if _side in _seen else None]]
        _seen.add(_side)
    else:
        _chosen = _family.stock_type, "cape", IN_ATTENTION[_some.index(_name) % len(IN_ATTENTION)]
        VARIANTS[_name] = {key: _types[key] for key in _chosen if key in _types}
ALL = [(family, name) for family, variants in VARIANTS.items() for name in variants]


def config_of(family: str, name: str) -> PositionConfig:
    """What these settings are on the main side."""
    side = side_of(family)
    return PositionConfig.from_dict(OF_FAMILY[family][name], side.domain, side.architecture)


RANDOM = [pair for pair in ALL + MOVED if config_of(*pair).random]


def make(family: str, name: str, **sizes: Any) -> Any:
    """A model in evaluation mode, attention weights returned on request."""
    return FAMILIES[family].build(OF_FAMILY[family][name], attn_implementation="eager", **sizes)


def batch(family: str) -> dict[str, Tensor]:
    """Inputs, with labels where the model has a loss."""
    return FAMILIES[family].batch()


def left_out(family: str, test: str) -> str | None:
    """Why a family is left out of a test; None if it is not."""
    return FAMILIES[family].reasons.get(test)


def answer(output: Any) -> Tensor:
    """What a model says: logits, or pooled states where it has no head."""
    return output.logits if "logits" in output else output.pooler_output


def at_tokens(states: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """States of the tokens alone, where there is one for each; states of padding say nothing."""
    mask = inputs.get("attention_mask")
    return states[mask.bool()] if mask is not None and mask.shape == states.shape[:2] else states


def loss(output: Any) -> Tensor:
    """The loss; of a model without one, the mean square, as with zeros as targets."""
    return output.loss if "loss" in output else answer(output).square().mean()


def seam(model: Any) -> PositionEncoder | None:
    """The position encoder of the first stack; None if a learned table stands elsewhere."""
    encoders = (module for module in model.modules() if isinstance(module, PositionEncoder))
    return next(encoders, None)
