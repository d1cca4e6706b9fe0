"""Settings of the speech recipes, and which position embeddings each study compares."""

from typing import NamedTuple


class Recipe(NamedTuple):
    """How models are trained on a corpus.

    Attributes:
        train: Flags of fairseq-train.
        updates: Their number.
        bins: Upper ends of the bins of durations in seconds.
        cape: Flags of CAPE among the types, beside its defaults.
    """

    train: str
    updates: int
    bins: tuple[float, ...]
    cape: str = ""


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
    "wsj": Recipe(WSJ, 200000, (10, 15, 20), "--position-max-global-scale 1.1"),
    "tedlium3": Recipe(TEDLIUM, 500000, (10, 15, 20), "--position-max-global-scale 2"),
    # not in the paper; settings of TED-LIUM
    "librispeech": Recipe(TEDLIUM, 500000, (10, 15, 20), "--position-max-global-scale 2"),
}

_CAPE = "--position-embedding cape"
# Each study is one figure of the paper; the flags of each of its models.
STUDIES = {
    "types": {
        name: f"--position-embedding {name}"
        for name in ("nopos", "sinpos", "abspos", "relpos", "shape", "cape")
    },
    "relpos": {  # Figures 4, 20 and 21: contexts of 27 and 6 seconds at 30 ms
        "relpos": "--position-embedding relpos --position-relative-beyond zero",
        "relpos-6s": "--position-embedding relpos --position-relative-context 199 "
        "--position-relative-beyond zero",
        "relpos-first": "--position-embedding relpos --position-relative-layers first "
        "--position-relative-beyond zero",
        "cape": _CAPE,
    },
    "augmentation": {  # Figure 7
        "baseline": "--position-embedding sinpos --no-spec-augment",
        "+CAPE": f"{_CAPE} --no-spec-augment",
        "+SpecAug": "--position-embedding sinpos",
        "+CAPE +SpecAug": _CAPE,
    },
    "shift": {  # Figure 18: global shifts that cover 15, 30, 60 seconds
        f"covers-{2 * half:g}s": f"{_CAPE} --position-max-global-shift {half:g}"
        for half in (7.5, 15.0, 30.0)
    },
    "local": {  # Figure 19
        "global-and-local": _CAPE,
        "global-only": f"{_CAPE} --position-max-local-shift 0",
    },
    "scale": {  # Figures 20 and 21
        f"scale-{scale:g}": f"{_CAPE} --position-max-global-scale {scale:g}"
        for scale in (1, 1.1, 1.4, 2, 3)
    },
}
BATCHES = {"padded": "", "padding-free": "--padding-free"}
