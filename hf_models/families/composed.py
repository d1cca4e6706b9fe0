"""Families that are their stock classes with mixins, as rows of data. The module has the classes of
all rows by name."""

from __future__ import annotations

from hf_models.seams.bos_hint import Generates
from hf_models.seams.drop_path import DropPathModel, DropPathSettings
from hf_models.seams.image_sizes import SquareImages
from hf_models.seams.images import ImageModel, PatchEmbeddings, PatchEmbeddingsWithModule
from hf_models.seams.relative_biases import RelativeBiasModel
from hf_models.seams.speech import (
    EncodesSpeech,
    RecognitionEncoder,
    RecognitionModel,
    RecognitionSettings,
    TakesFrames,
)
from hf_models.seams.text import DecoderAlone, SourceStack, TargetStack, TranslationModel
from hf_models.seams.tokens import TokenEmbeddings, TokenModel
from hf_models.switching.install import LearnedTable
from hf_models.switching.making import Families, Part, Row
from hf_models.switching.modeling import PositionModelMixin as Model

_SOURCE = Part(
    "Source side: alpha scales the positions, the BOS hint marks the first.", SourceStack
)
_TARGET = Part("Target side; uses the draw of the source if the two are synchronised.", TargetStack)
_BOTH = Part(
    "Encoder and decoder; ``forward(..., draw=, decoder_draw=)``.", TranslationModel, Model
)
_ALONE = Part("The decoder as a language model; draws in training.", DecoderAlone, Model)
_STACKS = {"Encoder": _SOURCE, "Decoder": _TARGET, "Model": _BOTH}
_GENERATION = {
    "ForConditionalGeneration": Part(
        "Translation and other generation; ``forward(..., draw=)`` and ``generate()`` as in stock.",
        Generates,
        Model,
    )
}
_WITH_TABLE = {
    "LearnedPositionalEmbedding": Part("The stock table, if the type has a table.", LearnedTable),
    **_STACKS,
    **_GENERATION,
    "ForCausalLM": _ALONE,
}
_TWO_ROWS = "a learned table keeps the stock layout, with two rows before the first position."

_ANY_SIZE = "Images of any height and width; positions are patch centres in the [-1, 1] square."
_PATCHES = Part("Patches, special tokens and positions.", PatchEmbeddings)
_IMAGE_MODEL = Part(
    "Patches to hidden states; images of any size, no flag needed.", ImageModel, Model
)
_IMAGES = {"Embeddings": _PATCHES, "Model": _IMAGE_MODEL}
_MASKED_IMAGES = {
    "ForMaskedImageModeling": Part("Pixels of masked patches, in squares.", SquareImages, Model)
}
_FEATURE_MAPS = "Feature maps for detection and segmentation."

ROWS = (
    Row(
        "marian",
        "Marian",
        "Translation. Positions count tokens from 0. The BOS hint on the source is `bos_token_id`, "
        "or `eos_token_id` for models without `bos_token_id` (Marian).",
        {
            **_STACKS,
            "ForCausalLM": _ALONE,
            "MTModel": Part(
                "Translation model; ``forward(..., draw=)`` and ``generate()`` as in the stock "
                "class.",
                Generates,
                Model,
                # the stock lists also have the sinusoids; learned tables are saved and loaded
                _keys_to_ignore_on_load_missing=["final_logits_bias"],
                _keys_to_ignore_on_save=None,
            ),
        },
    ),
    Row(
        "m2m_100",
        "M2M100",
        "Translation between many languages. Positions count tokens from `pad_token_id` + 1; "
        "language codes are tokens like others, behind the BOS hint.",
        {
            "Encoder": _SOURCE.having(padding_by_id=True),
            "Decoder": _TARGET.having(padding_by_id=True),
            "Model": _BOTH,
            **_GENERATION,
        },
    ),
    Row(
        "bart",
        "Bart",
        f"Generation and classification. Positions count tokens from 0; {_TWO_ROWS}",
        _WITH_TABLE,
    ),
    Row(
        "mbart",
        "MBart",
        f"Translation between many languages. Positions count tokens from 0; {_TWO_ROWS}",
        _WITH_TABLE,
    ),
    Row(
        "pegasus",
        "Pegasus",
        "Summarization. Positions count tokens from 0.",
        {**_STACKS, **_GENERATION, "ForCausalLM": _ALONE},
    ),
    Row(
        "bert",
        "Bert",
        "Texts of any length. Positions count tokens from 0, without padding on either side.",
        {
            "Embeddings": Part("Tokens, their types and positions.", TokenEmbeddings),
            "Model": Part("Tokens to hidden states; ``forward(..., draw=)``.", TokenModel, Model),
            # the stock forward hands the number of items on to its loss
            "LMHeadModel": Part("Writes text, as a decoder.", Model, accepts_loss_kwargs=True),
        },
    ),
    Row(
        "vit",
        "ViT",
        f"""{_ANY_SIZE}

        Args:
            drop_path_rate: Stochastic depth in training: probability that a sample skips a branch
                of the last layer. The probability grows linearly from 0 at the first layer.
        """,
        {
            "Embeddings": Part("Patches, class token and positions.", PatchEmbeddings),
            "Model": Part(
                "See transformers' ViTModel; images of any size, no flag needed.",
                DropPathModel,
                Model,
            ),
            **_MASKED_IMAGES,
        },
        config_mixins=(DropPathSettings,),
    ),
    Row(
        "deit",
        "DeiT",
        _ANY_SIZE,
        {
            **_IMAGES,
            "Embeddings": _PATCHES.having(special_tokens=("cls_token", "distillation_token")),
            **_MASKED_IMAGES,
        },
    ),
    Row(
        "dinov2",
        "Dinov2",
        _ANY_SIZE,
        {
            **_IMAGES,
            "Embeddings": _PATCHES.having(has_flag=False),
            "Backbone": Part(_FEATURE_MAPS, ImageModel, Model),
        },
    ),
    Row(
        "dinov2_with_registers",
        "Dinov2WithRegisters",
        f"{_ANY_SIZE} Registers are special tokens that get no position.",
        {
            **_IMAGES,
            "Embeddings": _PATCHES.having(has_flag=False, antialias=True),
            "Backbone": Part(_FEATURE_MAPS, ImageModel, Model),
        },
    ),
    Row(
        "beit",
        "Beit",
        f"{_ANY_SIZE} The relative biases of stock checkpoints stay. The stock type is `nopos` "
        "unless the configuration has absolute positions; a table that `abspos` adds to a stock "
        "checkpoint begins at zero.",
        {
            **_IMAGES,
            "Embeddings": _PATCHES.having(has_flag=False),
            "Model": Part(_IMAGE_MODEL.doc, RelativeBiasModel, Model),
        },
    ),
    Row(
        "siglip",
        "SiglipVision",
        _ANY_SIZE,
        {
            "Embeddings": Part(
                "Patches and positions; there is no special token.",
                PatchEmbeddingsWithModule,
                special_tokens=(),
                square=True,
            ),
            "Model": _IMAGE_MODEL,
        },
    ),
    Row(
        "speech_to_text",
        "Speech2Text",
        """Speech recognition or translation with encoder and decoder.

        `position_embedding` belongs to the encoder (seconds), `decoder_position_embedding` to the
        decoder (tokens), by default with the same type; time and text do not share a draw. Frames
        are counted as in stock checkpoints, from `pad_token_id` + 1 on, in steps of the encoder.
        """,
        {
            "Encoder": Part(
                "See :class:`~hf_models.seams.speech.SpeechEncoder`.", RecognitionEncoder
            ),
            "Decoder": Part(
                "Text side: positions are tokens, with a separate draw.",
                TargetStack,
                # as for the encoder, see EncodesSpeech
                _supports_sdpa=True,
                _supports_flash_attn=True,
            ),
            "Model": Part("Encoder and decoder.", EncodesSpeech, RecognitionModel, Model),
            "ForConditionalGeneration": Part(
                "Recognition or translation; ``forward(..., hop_nanoseconds=, draw=)`` and "
                "``generate()``.",
                TakesFrames,
                EncodesSpeech,
                Model,
            ),
        },
        config_mixins=(RecognitionSettings,),
    ),
)
COMPOSED = Families(ROWS, __name__)
__getattr__ = COMPOSED.class_of_name
