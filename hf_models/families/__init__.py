"""The families of Hugging Face models, one file each."""

from __future__ import annotations

from hf_models.families import (
    bart,
    m2m_100,
    marian,
    mbart,
    pegasus,
    speech_ctc,
    speech_to_text,
    vit,
)

MODULES = (marian, m2m_100, bart, mbart, pegasus, vit, speech_ctc, speech_to_text)
FAMILIES = [module.FAMILY for module in MODULES]
