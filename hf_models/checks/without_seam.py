"""How model types without a known seam encode positions, as data in plain words, because no error
of a stock model tells this."""

from __future__ import annotations

_REASONS = {
    "A convolution over the frames tells positions.": (
        "wav2vec2 wav2vec2-conformer hubert wavlm unispeech unispeech-sat data2vec-audio sew sew-d"
    ),
    "Attention depends on distances (relative keys), and nothing is added to the input.": (
        "wav2vec2-bert deberta deberta-v2 xlnet funnel parakeet_ctc parakeet_encoder "
        "parakeet_rnnt parakeet_tdt nemotron_asr_streaming nemotron_asr_streaming_encoder "
        "nemotron3_5_asr gemma4_audio ibert"
    ),
    "Attention has a bias for each bucket of distances.": (
        "t5 mt5 umt5 longt5 switch_transformers pop2piano udop cpmant"
    ),
    "Attention has a learned bias that depends on the distance and on the content.": (
        "inkling_text inkling_mm_model inkling2_text inkling2_loop_text"
    ),
    "Windows have a bias of distances, in a table for each size.": (
        "swin swinv2 swin2sr donut-swin maskformer-swin"
    ),
    "Attention has a bias that falls with the distance (ALiBi).": "bloom mpt",
    "A state passes from token to token, and there are no positions.": (
        "mamba mamba2 falcon_mamba rwkv xlstm kimi_linear glm5_next glm5_next_text"
    ),
    "The model consists of convolutions, which need no positions.": (
        "convnext convnextv2 resnet regnet mobilenet_v1 mobilenet_v2 efficientnet bit focalnet "
        "cvt poolformer levit pp_lcnet pp_lcnet_v3 pp_lcnet_v4 hgnet_v2 dinov3_convnext textnet "
        "univnet"
    ),
    "Convolutions between the layers of attention tell positions, and nothing is added.": (
        "glpn mobilevit pvt_v2 segformer swiftformer"
    ),
    "The model is a codec of sounds.": "mimi encodec dac xcodec xcodec2 neucodec",
    "Queries for objects have positions of boxes.": (
        "detr conditional_detr dab-detr deformable_detr rt_detr rt_detr_v2 d_fine "
        "table-transformer grounding-dino mm-grounding-dino omdet-turbo lw_detr rf_detr"
    ),
    "Queries and keys are turned by the row and column of a patch, in packed images.": (
        "glm_ocr_vision glm5_next_vision pixtral"
    ),
    "A table of patches is interpolated in packed images, and queries and keys are turned too.": (
        "cohere_compass_vision qwen3_vl_vision qwen3_vl_moe_vision qwen3_5_vision "
        "qwen3_5_moe_vision qwen4_exp_vision"
    ),
    "A table of patches is added behind a linear layer, where no such table is known.": ("radio"),
    "Sinusoids are looked up by numbers of positions, in a module of a kind that is not known.": (
        "canary tipsv2_text_model"
    ),
    "Sinusoids are a tensor of the model, not a module that could be replaced.": "ctrl",
    "Sinusoids are computed anew in each forward, and the model keeps no table of them.": (
        "pegasus_x"
    ),
    "A table of positions is added to hashes of characters, which are joined to longer parts.": (
        "canine"
    ),
    "A table of positions is interpolated to the length of each text.": "sam3_lite_text_text_model",
    "Tables of two axes, whose rows are joined, are added to the text.": "reformer",
    "A table of the patches of a series is added, which fits one length of series.": (
        "patchtst patchtsmixer"
    ),
    "The encoder of sounds inside the model turns queries and keys; this encoder alone has a "
    "family.": "nemotron3_diarization",
}
REASONS = {model_type: reason for reason, names in _REASONS.items() for model_type in names.split()}
