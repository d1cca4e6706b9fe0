"""The families of Hugging Face models, one file each."""

from __future__ import annotations

from hf_models.families import marian, speech_ctc, speech_to_text, vit

FAMILIES = [module.FAMILY for module in (marian, vit, speech_ctc, speech_to_text)]
