"""The families of Hugging Face models that are registered with ``import hf_models``."""

from __future__ import annotations

import sys

from hf_models.families import rows, speech_ctc, speech_to_text, whisper

_SPEECH = (speech_ctc, speech_to_text, whisper)
FAMILIES = [*rows.FAMILIES.all(), *(module.FAMILY for module in _SPEECH)]
# pickles and adapters of peft may name the file that a family of today's rows once had
sys.modules.update({f"{__name__}.{row.package}": rows for row in rows.ROWS})
