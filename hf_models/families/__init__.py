"""The families of Hugging Face models that are registered with ``import hf_models``."""

from __future__ import annotations

from hf_models.families import composed, speech_ctc, whisper

FAMILIES = [*composed.COMPOSED.all(), speech_ctc.FAMILY, whisper.FAMILY]
