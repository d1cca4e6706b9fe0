"""Families of Hugging Face models that are made from their stock classes, as rows of data.

Only families that ``python -m tests.families`` has shown to equal their stock models are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

AnyRow = TypeVar("AnyRow", bound=Any)  # a row with a `variant`


@dataclass(frozen=True)
class Variant:
    """The second kind of stock model that a model type has.

    Attributes:
        field: Field of the stock configuration that tells the kinds apart.
        value: Value of the field in configurations of the second kind; configurations with any
            other value are of the first kind.
        row: Row of the second kind, whose sides have the names of the first kind.
    """

    field: str
    value: Any
    row: Any


def row_for(row: AnyRow, settings: Mapping[str, Any]) -> AnyRow:
    """The row of the kind of model that these settings describe.

    Args:
        row: Row of a model type, with the row of a second kind as its `variant`, or None.
        settings: Fields of a configuration by name; fields at their default may be missing.
    """
    variant = row.variant
    if variant is None or settings.get(variant.field) != variant.value:
        return row
    return variant.row


@dataclass(frozen=True)
class GeneratedRow:
    """A family that consists of this row alone, without code for the family.

    Attributes:
        seam: Kind of the modules that know positions, a key of hf_models.generated.kinds.SEAMS.
        stock: Type of position embedding of the stock model.
        side: Side of the model, "encoder" or "decoder".
        domain: Key of :data:`~cape_plugins.DOMAINS`.
        architecture: Architecture of the :class:`~cape_plugins.PositionConfig`.
        keeps_borders: Whether this package has to keep packed texts apart, because the model
            attends to both sides, across the borders between the texts.
        only_adds: Whether the model hides or reorders tokens after positions were added. Positions
            in attention would then belong to other tokens, and are refused.
        checked: Whether ``cape-plugins doctor`` without a model checks the family.
        variant: The second kind of stock models of this model type; None if all are of one kind.
        tower: Row of a part whose position embedding is set separately, such as CLIP's encoder of
            images. `side` of this row names the part; the field of the configuration is
            ``SIDE_position_embedding``. By default the part keeps its stock positions.
    """

    seam: str
    stock: str
    side: str
    domain: str
    architecture: str
    keeps_borders: bool = False
    only_adds: bool = False
    checked: bool = False
    variant: Variant | None = None
    tower: GeneratedRow | None = None

    @property
    def sides(self) -> dict[str, GeneratedRow]:
        """The rows of the position embeddings by side, the main side first."""
        return {row.side: row for row in (self, self.tower) if row is not None}

    @property
    def seams(self) -> list[str]:
        """The main seam of each kind of stock model, without repetition."""
        rows = [self] if self.variant is None else [self, self.variant.row]
        return list(dict.fromkeys(row.seam for row in rows))

    @property
    def oddities(self) -> dict[str, Any]:
        """Optional fields that differ from their defaults, with their values. `checked` is left
        out, because `checked` says nothing about the model."""
        optional = (f for f in fields(self) if f.default is not MISSING and f.name != "checked")
        values = {field: getattr(self, field.name) for field in optional}
        return {field.name: value for field, value in values.items() if value != field.default}


_DECODER = ("angles", "rope", "decoder", "text", "rotary")
_ENCODER = ("angles", "rope", "encoder", "text", "rotary")
_IMAGE = ("grid", "abspos", "encoder", "image", "encoder")
_TOWER = GeneratedRow("grid", "abspos", "vision", "image", "encoder")
_OPTIONAL = ("optional grid", "nopos", "encoder", "image", "encoder")
_OPTIONAL_WITH_TABLE = ("optional grid", "abspos", "encoder", "image", "encoder")
_DETECTOR = ("detection", "abspos", "encoder", "image", "encoder")
_PACKED_IMAGE = ("packed grid", "abspos", "encoder", "image", "encoder")
_PACKED_TOWER = GeneratedRow("packed grid", "abspos", "vision", "image", "encoder")
_SPECTROGRAM = ("spectrogram", "abspos", "encoder", "audio", "encoder")
_VIDEO = ("video", "abspos", "encoder", "video", "encoder")
_TURNED_VIDEO = ("video angles", "rope", "encoder", "video", "rotary")
_TURNED_IMAGE = ("patch angles", "rope", "encoder", "image", "rotary")
_ENCODER_OF_ROWS = ("rows", "abspos", "encoder", "text", "encoder")
_DECODER_OF_ROWS = ("rows", "abspos", "decoder", "text", "decoder")
_DECODER_OF_SINUSOIDS = ("sinusoids", "sinpos", "decoder", "text", "decoder")
_PAIR_OF_SINUSOIDS = ("sinusoids", "sinpos", "encoder", "text", "encoder")

# Models that write text. In models of several parts the text has the position embedding; the other
# parts stay stock.
_DECODERS = """
    afmoe apertus apertus1p5_text arcee aria aria_text audioflamingo3 axk1 axk2 aya_vision beam
    bitnet cohere cohere2 cohere2_moe cohere2_vision cosmos3_edge cosmos3_edge_text cosmos3_omni
    cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl deepseek_vl_hybrid diffllama doge dory
    dots1 dots3_note_text ernie4_5 ernie4_5_moe evolla exaone4 exaone4_5 exaone_moe falcon
    flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text glm glm4 glm46v glm4_moe glm4_moe_lite glm4v glm4v_moe glm4v_moe_text
    glm4v_text glm_image glm_image_text glm_moe_dsa glm_ocr glm_ocr_text glmasr got_ocr2
    gpt_neox gpt_neox_japanese gpt_oss gradium_phonon_tts granite granite_docling
    granite_docling_text granite_speech granite_speech_plus granite_swa granitemoe
    granitemoe_swa granitemoeshared helium higgs_audio_v2 hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hy_v3 hy_v4 hy_v4_vl hy_v4_vl_text hyperclovax
    hyperclovax_vision_v2 idefics2 idefics3 internvl jais2 jetmoe kimi_k25 kolibri1 laguna
    lara_mini lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama4 llama4_text llava llava_next
    llava_next_video llava_onevision mellum mimo_v2_flash minicpm3 minicpm_ocr minicpmv4_6
    minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral
    mistral3 mistral_large4 mistral_large4_text mixtral mllama modernbert-decoder molmo2_text
    moss_transcribe_diarize muse_glimmer muse_glimmer_text muse_spark_text musicflamingo
    nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe omniasr ovis2 paddleocr_vl paligemma
    persimmon phi phi3 phi4_multimodal phimoe pocket_tts qianfan_ocr qwen2_5_omni_thinker
    qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_asr qwen3_moe qwen3_next
    qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text seed_oss
    smollm3 smolvlm solar_open stablelm starcoder2 step3p7 t5gemma t5gemma2 unlimited_ocr
    vaultgemma video_llama_3 video_llava vipllava voxtral youtu
"""
# Models of text or frames that attend to both sides.
_ENCODERS = """
    embedding_gemma2 embedding_gemma2_text eurobert glmasr_encoder gte jina_embeddings_v3
    lasr_ctc lasr_encoder modernvbert moonshine nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_audio nemotron3_diarization_audio nomic_bert openai_privacy_filter
    timesfm2_5 ultrabert ultravbert voxtral_realtime_encoder
"""
# Models of images with a table of patches.
_IMAGES = """
    aimv2_vision_model chinese_clip_vision_model clip_vision_model dpt ijepa internvl_vision
    mgp-str pixio qianfan_ocr_vision tipsv2_vision_model vision-encoder-decoder vit_msn
"""
# Parts of models of texts and images, which a pipeline may use alone. Most have no Auto class.
_IMAGE_PARTS = """
    altclip_vision_model clipseg_vision_model flava_image_model git_vision_model
    groupvit_vision_model metaclip_2_vision_model owlv2_vision_model owlvit_vision_model
"""
# Models of images of different sizes in a batch.
_PACKED_IMAGES = "siglip2_vision_model"
# The same with tokens of detections behind the patches, and a table behind each layer.
_DETECTORS = "yolos"
# Models of sounds with a table of patches of a spectrogram.
_SPECTROGRAMS = "audio-spectrogram-transformer"
# Models of videos with a table of tubelets, learned or fixed, or of patches and of frames.
_VIDEOS = "timesformer videomae vivit"
# Models of videos that turn queries and keys by frame, row and column.
_TURNED_VIDEOS = "vjepa2"
# Models of images that turn queries and keys by the centres of patches.
_TURNED_IMAGES = "dinov3_vit sapiens2"
# Models of text with a learned table that attend to both sides.
_ENCODERS_OF_ROWS = """
    aimv2 albert big_bird bros camembert clap clip_text_model convbert data2vec-text deberta
    deberta-v2 distilbert dpr electra ernie flava fnet imagegpt layoutlm layoutlmv3 lilt
    longformer luke lxmert markuplm megatron-bert mobilebert mpnet mra pp_formulanet rembert
    roberta roberta-prelayernorm roc_bert sam3 splinter squeezebert tapas vilt
    vision-text-dual-encoder visual_bert xclip xlm-roberta xlm-roberta-xl yoso
"""
# Parts of models of texts beside images or sounds.
_TEXT_PARTS = """
    aimv2_text_model align_text_model altclip_text_model bridgetower_text_model
    chinese_clip_text_model clap_text_model clipseg_text_model flava_text_model
    groupvit_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model
    siglip2_text_model siglip_text_model xclip_text_model
"""
# Models of texts, with a tower of images that has a table of patches.
_TEXTS_AND_IMAGES = "altclip chinese_clip clip clipseg groupvit metaclip_2 owlv2 owlvit siglip"
# The same with images of different sizes in a batch.
_TEXTS_AND_PACKED_IMAGES = "siglip2"
# Models with a learned table that write text.
_DECODERS_OF_ROWS = """
    bert-generation biogpt blip flaubert git gpt2 gpt_bigcode gpt_neo openai-gpt opt trocr
    xlm
"""
# Models of a source and a target with learned tables. Both sides share the draws; there is neither
# alpha nor a BOS hint.
_PAIRS_OF_ROWS = """
    autoformer bigbird_pegasus blenderbot blenderbot-small cohere_asr encoder-decoder florence2 fsmt
    informer led mvp plbart prophetnet time_series_transformer
"""
# Models that write text, with tables of sinusoids that grow with the text.
_DECODERS_OF_SINUSOIDS = "kosmos-2.5 xglm"
# Models of a source and a target with such tables.
_PAIRS_OF_SINUSOIDS = "nllb-moe seamless_m4t seamless_m4t_v2"


def _rows(fields: tuple[str, ...], model_types: str, **oddities: Any) -> dict[str, GeneratedRow]:
    return dict.fromkeys(model_types.split(), GeneratedRow(*fields, **oddities))


GENERATED: dict[str, GeneratedRow] = {
    **_rows(_DECODER, _DECODERS),
    **_rows(_ENCODER, _ENCODERS),
    **_rows(_IMAGE, _IMAGES + _IMAGE_PARTS),
    **_rows(_PACKED_IMAGE, _PACKED_IMAGES),
    **_rows(_DETECTOR, _DETECTORS),
    **_rows(_SPECTROGRAM, _SPECTROGRAMS),
    **_rows(_VIDEO, _VIDEOS),
    **_rows(_TURNED_VIDEO, _TURNED_VIDEOS),
    **_rows(_TURNED_IMAGE, _TURNED_IMAGES),
    **_rows(_ENCODER_OF_ROWS, _ENCODERS_OF_ROWS + _TEXT_PARTS),
    **_rows(_ENCODER_OF_ROWS, _TEXTS_AND_IMAGES, tower=_TOWER),
    **_rows(_ENCODER_OF_ROWS, _TEXTS_AND_PACKED_IMAGES, tower=_PACKED_TOWER),
    **_rows(_DECODER_OF_ROWS, _DECODERS_OF_ROWS),
    **_rows(_ENCODER_OF_ROWS, _PAIRS_OF_ROWS),
    **_rows(_DECODER_OF_SINUSOIDS, _DECODERS_OF_SINUSOIDS),
    **_rows(_PAIR_OF_SINUSOIDS, _PAIRS_OF_SINUSOIDS),
    # biases of distances in attention, and a table only if the configuration says so
    "data2vec-vision": GeneratedRow(
        *_OPTIONAL,
        variant=Variant(
            "use_absolute_position_embeddings", True, GeneratedRow(*_OPTIONAL_WITH_TABLE)
        ),
    ),
    # a table, or queries and keys that are turned (ESM-2)
    "esm": GeneratedRow(
        *_ENCODER_OF_ROWS,
        variant=Variant("position_embedding_type", "rotary", GeneratedRow(*_ENCODER)),
    ),
    # rows with options, among them the few families that `cape-plugins doctor` checks by default
    "vit_mae": GeneratedRow(*_IMAGE, only_adds=True),
    "llama": GeneratedRow(*_DECODER, checked=True),
    "qwen2": GeneratedRow(*_DECODER, checked=True),
    "modernbert": GeneratedRow(*_ENCODER, keeps_borders=True, checked=True),
}
