"""How model types without a known seam encode positions, as data in plain words, because no error
of a stock model tells this."""

from __future__ import annotations

_REASONS = {
    "positions by a convolution over the frames": (
        "wav2vec2 wav2vec2-conformer hubert wavlm unispeech unispeech-sat data2vec-audio sew sew-d"
    ),
    "distances in attention (relative keys), no positions at the input": (
        "wav2vec2-bert deberta deberta-v2 xlnet funnel parakeet_ctc parakeet_encoder "
        "parakeet_rnnt nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron3_5_asr "
        "gemma4_audio ibert"
    ),
    "buckets of distances in attention": "t5 mt5 umt5 longt5 switch_transformers pop2piano udop",
    "windows with a bias of distances, a table for each size": (
        "swin swinv2 swin2sr donut-swin maskformer-swin"
    ),
    "a bias that falls with the distance (ALiBi)": "bloom mpt",
    "a state that passes from token to token, no positions": (
        "mamba mamba2 falcon_mamba rwkv xlstm kimi_linear"
    ),
    "convolutions only": (
        "convnext convnextv2 resnet regnet mobilenet_v1 mobilenet_v2 efficientnet bit focalnet "
        "cvt poolformer levit pp_lcnet pp_lcnet_v3 pp_lcnet_v4 hgnet_v2"
    ),
    "a codec of sounds": "mimi encodec dac xcodec xcodec2 neucodec",
    "queries for objects, with positions of boxes": (
        "detr conditional_detr dab-detr deformable_detr rt_detr rt_detr_v2 d_fine "
        "table-transformer grounding-dino mm-grounding-dino omdet-turbo lw_detr rf_detr"
    ),
}
REASONS = {model_type: reason for reason, names in _REASONS.items() for model_type in names.split()}
