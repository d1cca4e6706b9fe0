"""Why a model type has no family, in whole sentences for docs/families.md: errors of stock code are
cut off and name no reason. Data: sentences by model type, and by what an error says."""

from __future__ import annotations

import re

from tests.families.results import FAILS, NO_ROW, NOT_RUN, Row

_OWN_IMAGE = (
    "A batch holds images of different sizes (`patch_attention_mask`), and types other than the "
    "stock type would count the padding of a smaller image as a part of it."
)
_UNHEARD = (
    "The positions that were found do not reach the output of the tiny model, so nothing is shown."
)
_ONE_LENGTH = (
    "The whole table is added to the frames, so the model takes recordings of one length only, "
    "with any type."
)
_READ_WEIGHTS = "The stock code interpolates the weights of the table, so no draw reaches them."
_TILED = "The table of a small image is tiled over larger ones, for which no positions are known."
_ONE_TABLE = "The stock code takes one table for all samples, so samples have no separate draws."
_IN_LAYERS = "Each layer computes angles, which gradient checkpointing computes in another way."
# By model type, what the code of the stock model shows.
_BY_TYPE = {
    "idefics3_vision": _OWN_IMAGE,
    "smolvlm_vision": _OWN_IMAGE,
    "granite_docling_vision": _OWN_IMAGE,
    "inkling2": _UNHEARD,
    "inkling2_loop": _UNHEARD,
    "tipsv2": _UNHEARD,
    "zaya": _UNHEARD,
    "qwen2_audio_encoder": _ONE_LENGTH,
    "voxtral_encoder": _ONE_LENGTH,
    "moss_transcribe_diarize_audio": _ONE_LENGTH,
    "glm4v_vision": _READ_WEIGHTS,
    "glm4v_moe_vision": _READ_WEIGHTS,
    "glm_image_vision": _READ_WEIGHTS,
    "sam3_vision_model": _TILED,
    "sam3_vit_model": _TILED,
    "roformer": _ONE_TABLE,
    "vitdet": _ONE_TABLE,
    "moshi": _IN_LAYERS,
    "pvt": "Each stage adds a table of another size, and only one grid of a model is known.",
}
# By what an error says: the first pattern that is found gives the sentence.
_BY_ERROR = tuple(
    (re.compile(pattern), sentence)
    for pattern, sentence in (
        (r"requires the (\w+) library", "The stock model needs the package {}, which is missing."),
        (
            r"\d+ million parameters",
            "The smallest model that the probe makes has more than 60 million parameters.",
        ),
        (r"StrictDataclass", "The stock configuration refuses the small sizes of the probe."),
        (r"ValueError: (\w+) is no known input", "The probe makes no `{}` for this model."),
        (
            r"missing \d+ req|[Yy]ou (have to|must|cannot) specify|must be given|Exactly 1 of|"
            r"cannot be None|Input language unknown",
            "The forward needs inputs that the probe does not make.",
        ),
        (
            r"get_seq_length|layer types producing a cache|repeat_interleave",
            "The cache needs layers of more kinds than the tiny model has.",
        ),
        (
            r"out of (?:range|bounds)|size of tensor|shape '|cannot be multiplied|Given |divisible|"
            r"expects|split_with_sizes|values to unpack|input size|output size|too small|"
            r"must be greater|must be in|not in the valid range|ZeroDivisionError|"
            r"Input must be a 5D|conv1d\(\)|has shape|empty\(\)",
            "Small sizes of the probe do not fit together in the stock code.",
        ),
        (
            r"'\w*Output\w*' object has no attribute '(\w+)'",
            "The stock forward reads `{}` of an output that has none.",
        ),
        (
            r"NoneType|AttributeError|'bool' object|unhashable|unsupported operand",
            "The stock code reads a field or an input that the probe leaves empty.",
        ),
        (
            r"the table of \w+ has \d+ rows for a grid of [\d x]+ patches",
            "The table that was found does not have one row for each patch.",
        ),
        (
            r"gradient checkpointing: relative difference",
            "Gradients with and without gradient checkpointing differ.",
        ),
        (
            r"saved and loaded by (\w+): relative difference",
            "A saved model that `{}` loads gives other outputs.",
        ),
        (r"no result after ([\d.]+) s", "The checks did not end within {} s."),
    )
)


def reason_of(row: Row) -> str:
    """Why a model type has no family, as a sentence.

    Args:
        row: A result that is not "proved".
    """
    text = " ".join(row["reason"].replace("|", "/").split())
    if row["result"] in (FAILS, NO_ROW) and row["type"] in _BY_TYPE:
        return _BY_TYPE[row["type"]]
    if row["result"] in (FAILS, NOT_RUN):
        for pattern, sentence in _BY_ERROR:
            # the same error is given for each size that was tried
            if (match := pattern.search(text)) is not None:
                return sentence.format(*(group.strip() for group in match.groups(default="")))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
