"""The families of Hugging Face models that are registered with ``import hf_models``."""

from __future__ import annotations

import sys

from hf_models.families import rows, speech_ctc, whisper

FAMILIES = [*rows.FAMILIES.all(), speech_ctc.FAMILY, whisper.FAMILY]
# pickles and adapters of peft may name the file that a family of today's rows once had
sys.modules.update({f"{__name__}.{row.package}": rows for row in rows.ROWS})
