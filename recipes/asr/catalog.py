"""Settings of the speech recipes, and which position embeddings each study compares."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from cape_plugins import PRESETS, TYPES
from cape_plugins.arguments import TYPE_ARG, flag


class Recipe(NamedTuple):
    """How models are trained on a corpus.

    Attributes:
        train: Flags of fairseq-train.
        updates: Their number.
        bins: Upper ends of the bins of durations in seconds.
        preset: Settings of CAPE for this corpus, among the types.
    """

    train: str
    updates: int
    bins: tuple[float, ...]
    preset: str | None = None


def position_flags(settings: Mapping[str, Any], more: str = "") -> str:
    """Flags of fairseq-train for a position embedding, such as one of PRESETS, and `more`."""
    names = {"type": TYPE_ARG} | {name: f"position_{name}" for name in settings if name != "type"}
    words = (f"{flag(names[name])} {value}" for name, value in settings.items() if name != "domain")
    return " ".join((*words, more)).strip()


SEED_STEP = 100003  # fairseq seeds update n with seed + n

# Small models for strings of digits, trained in a minute on one CPU core.
SMALL = """--arch cape_ctc_transformer_tiny --optimizer adam --adam-betas (0.9,0.98)
    --weight-decay 0.05 --lr 0.003 --lr-scheduler polynomial_decay --warmup-updates 100
    --max-tokens 4000 --frequency-mask-width 20 --time-masks 2
    --cpu --num-workers 0 --disable-validation --no-epoch-checkpoints"""

# The same for recordings of real speakers at 8 kHz, of which there are few: smaller batches, and no
# SpecAugment, with which so short a training learns next to nothing.
DIGITS = SMALL.replace("--max-tokens 4000", "--max-tokens 1500").replace("0.003", "0.005")
DIGITS = f"{DIGITS} --no-spec-augment"

# CAPE Appendix C, on 16 GPUs: 36 layers of 768, Adagrad, 240 seconds per GPU. The paper trains for
# a time, not for a number of updates.
PAPER = """--arch cape_ctc_transformer --optimizer adagrad --lr 0.01 --lr-scheduler fixed
    --clip-norm 0.1 --max-tokens 24000 --target-norm --num-workers 4
    --best-checkpoint-metric wer --batch-size-valid 1 --keep-last-epochs 1"""
WSJ = f"""{PAPER} --attention-dropout 0.4 --activation-dropout 0.4 --encoder-layerdrop 0.4
    --warmup-updates 35000 --spec-augment-start 5000"""
TEDLIUM = f"""{PAPER} --attention-dropout 0.1 --activation-dropout 0.1 --encoder-layerdrop 0.1
    --warmup-updates 45000 --spec-augment-start 20000 --frequency-mask-width 20
    --time-mask-width 30"""

RECIPES = {
    "small": Recipe(SMALL, 600, (1, 2, 4, 8, 16)),
    "digits": Recipe(DIGITS, 1000, (1, 2, 4, 8, 16)),
    "wsj": Recipe(WSJ, 200000, (10, 15, 20), "cape_wsj"),
    "tedlium3": Recipe(TEDLIUM, 500000, (10, 15, 20), "cape_tedlium"),
    # not in the paper; settings of TED-LIUM
    "librispeech": Recipe(TEDLIUM, 500000, (10, 15, 20), "cape_tedlium"),
}

NO_MASKS = "--no-spec-augment"
SINPOS, CAPE = {"type": "sinpos"}, {"type": "cape"}
# Each study is one figure of the paper; the flags of each of its models.
STUDIES = {
    "types": {name: position_flags({"type": name}) for name in TYPES},
    "relpos": {  # Figures 4, 20 and 21: contexts of 27 and 6 seconds at 30 ms
        "relpos": position_flags(PRESETS["relpos_wsj"]),
        "relpos-6s": position_flags({**PRESETS["relpos_wsj"], "relative_context": 199}),
        "relpos-first": position_flags(PRESETS["relpos_first_wsj"]),
        "cape": position_flags(CAPE),
    },
    "augmentation": {  # Figure 7
        "baseline": position_flags(SINPOS, NO_MASKS),
        "+CAPE": position_flags(CAPE, NO_MASKS),
        "+SpecAug": position_flags(SINPOS),
        "+CAPE +SpecAug": position_flags(CAPE),
    },
    "shift": {  # Figure 18: global shifts that cover 15, 30, 60 seconds
        f"covers-{2 * half:g}s": position_flags({**CAPE, "max_global_shift": f"{half:g}"})
        for half in (7.5, 15.0, 30.0)
    },
    "local": {  # Figure 19
        "global-and-local": position_flags(CAPE),
        "global-only": position_flags({**CAPE, "max_local_shift": 0}),
    },
    "scale": {  # Figures 20 and 21
        f"scale-{scale:g}": position_flags({**CAPE, "max_global_scale": scale})
        for scale in (1, 1.1, 1.4, 2, 3)
    },
}
BATCHES = {"padded": "", "padding-free": "--padding-free"}
