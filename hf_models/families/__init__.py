"""The families of Hugging Face models that are registered with ``import hf_models``."""

from __future__ import annotations

import sys

from hf_models.families import (
    bart,
    beit,
    deit,
    dinov2,
    dinov2_with_registers,
    m2m_100,
    marian,
    mbart,
    pegasus,
    rows,
    siglip,
    speech_ctc,
    speech_to_text,
    vit,
    whisper,
)

_TEXT = (marian, m2m_100, bart, mbart, pegasus)
_IMAGES = (vit, deit, dinov2, dinov2_with_registers, beit)
_SPEECH = (speech_ctc, speech_to_text, whisper)
FAMILIES = [module.FAMILY for module in (*_TEXT, *_IMAGES, *_SPEECH)]
FAMILIES += [siglip.VISION, siglip.CLASSIFIER]
FAMILIES += [family for package in rows.ROWS for family in rows.families_of(package)]
# names of modules in pickles and in adapters of peft from the time when each family had a file
sys.modules.update({f"{__name__}.{package}": rows for package in rows.ROWS})
