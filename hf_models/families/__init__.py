"""The families of Hugging Face models, one file each."""

from __future__ import annotations

from hf_models.families import (
    bart,
    beit,
    bert,
    deit,
    dinov2,
    dinov2_with_registers,
    m2m_100,
    marian,
    mbart,
    pegasus,
    siglip,
    speech_ctc,
    speech_to_text,
    vit,
    whisper,
)

_TEXT = (marian, m2m_100, bart, mbart, pegasus, bert)
_IMAGES = (vit, deit, dinov2, dinov2_with_registers, beit)
_SPEECH = (speech_ctc, speech_to_text, whisper)
FAMILIES = [module.FAMILY for module in (*_TEXT, *_IMAGES, *_SPEECH)]
FAMILIES += [siglip.VISION, siglip.CLASSIFIER]
