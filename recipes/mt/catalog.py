"""The translation recipes as rows of data: the settings of preparation, training and decoding in
each paper.

The numbers come from the papers and from the recipes they name:
    CAPE: Likhomanenko et al. 2021, section 5.3 and appendix D, which follow the recipes
        nmt-experiments/wmt14_en-{de,fr}.md of Transformer-Clinic (ADMIN, Liu et al. 2020).
    SHAPE: Kiyono et al. 2021, tables 3 and 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from recipes.lab.command_line import Settings, of_papers

LOSS = "--criterion label_smoothed_cross_entropy --label-smoothing 0.1"
_COMMON = (
    "--optimizer adam --adam-eps 1e-8 --clip-norm 0 --lr-scheduler inverse_sqrt"
    f" --warmup-init-lr 1e-7 --stop-min-lr 1e-9 {LOSS} --share-all-embeddings"
    " --attention-dropout 0.1 --skip-invalid-size-inputs-valid-test"
    # By default, fairseq drops a last batch whose size is no multiple of 8, always with the same
    # sentences.
    " --required-batch-size-multiple 1"
)
_CLINIC = _COMMON.replace("--optimizer adam ", "--optimizer radam ")  # recipes that CAPE follows


def _of_cape_paper(*presets: str) -> dict[str, Settings]:
    """Settings of the CAPE paper; its notebook counts alpha without EOS (appendix D.1)."""
    settings = of_papers(*presets, "relpos_wmt14")
    return settings | {"cape": {**settings["cape"], "source_scale": "auto-no-eos"}}


# relpos: "covers the training data", CAPE section 5.3; SHAPE adds to keys and values
_LIKE_CAPE_PAPER = of_papers("cape_wmt14", "relpos_wmt14")
_SHAPE_PAPER = of_papers("shape_wmt16", "relpos_wmt16", "cape_wmt14")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Settings of text preparation. `clean` limits the words and `max_subwords` the subwords of
    each side."""

    languages: tuple[str, str] = ("en", "de")
    segmentation: str = "bpe"  # "bpe": Moses tokens, then subword-nmt; or "sentencepiece"
    vocab_size: int = 32000  # merges for "bpe", pieces for "sentencepiece"
    lowercase: bool = False
    aggressive_hyphens: bool = True
    clean: tuple[int, int] | None = None  # fewest and most words of a training sentence
    max_ratio: float = 9.0  # longer side / shorter side of a training pair (Moses' default)
    max_subwords: int | None = None  # longer training pairs are dropped
    filter_valid: bool = False  # max_subwords and max_ratio also hold for the validation set
    hold_out_every: int = 1000  # every n-th training line is validation where no file is given
    join: int = 1  # number of neighbouring sentences that are joined, with a separator between


@dataclass(frozen=True, kw_only=True)
class Recipe(Text):
    """A text, and the training on this text."""

    title: str
    train: str  # flags of fairseq-train
    tokens_per_update: int  # over all devices and accumulation steps
    max_tokens: int  # per device and forward pass, on the hardware of the paper
    beam: int = 4
    length_penalty: float = 1.0
    position: str = "cape"  # the position embedding of the paper
    positions: Mapping[str, Settings] = field(default_factory=lambda: _LIKE_CAPE_PAPER)  # by type
    epochs: int | None = None  # length of the training in epochs,
    updates: int | None = None  # or in updates
    select: str = "best"  # or "average"
    average: int = 10  # checkpoints
    first_epoch: int = 1  # "best" considers epochs from this epoch on
    keep: str = "epoch"  # checkpoints saved for selection: at each "epoch" or every n-th "update"
    save_every: int = 5000  # the n of "update"
    stacked_length: int = 300  # target subwords, for the stage stack (CAPE figure 8)
    swapped_lines: int = 10_000  # of training text, for the stage swap (SHAPE table 1)
    # longest hypothesis, in tokens: factor x source + extra; room for joined sentences
    length_factor: float = 2
    length_extra: int = 200


_WMT14 = Recipe(
    title="WMT14 English-German, 6+6 layers, ADMIN (CAPE table 2)",
    train=f"--arch cape_transformer_wmt_en_de {_CLINIC} --admin-init --adam-betas (0.9,0.98)"
    " --lr 1e-3 --warmup-updates 8000 --dropout 0.1 --activation-dropout 0.1 --seed 1111",
    epochs=150,
    tokens_per_update=4 * 8192,
    max_tokens=8192,
    length_penalty=0.6,
    positions=_of_cape_paper("cape_wmt14"),
    vocab_size=32764,
    clean=(1, 80),
    first_epoch=50,
)

_WMT16 = Recipe(
    title="WMT16 English-German, SHAPE's vanilla setting (SHAPE table 2)",
    train=f"--arch cape_transformer_wmt_en_de {_COMMON} --adam-betas (0.9,0.998)"
    " --encoder-normalize-before --decoder-normalize-before"
    " --lr 9.88e-4 --warmup-updates 8000 --dropout 0.1 --seed 1010",
    updates=200_000,
    tokens_per_update=112_000,
    max_tokens=7000,
    length_penalty=0.0,  # none, the default of OpenNMT-py; the paper and its code name no other
    position="shape",
    positions=_SHAPE_PAPER,
    clean=(1, 250),
    select="average",
    keep="update",
)

_MULTI30K = Recipe(
    title="Multi30k English-German image captions (small, no paper)",
    train=f"--arch cape_transformer_iwslt_de_en {_COMMON} --adam-betas (0.9,0.98)"
    " --lr 1e-3 --warmup-updates 2000 --dropout 0.3 --weight-decay 1e-4"
    " --encoder-layers 4 --decoder-layers 4 --encoder-embed-dim 256 --decoder-embed-dim 256"
    " --encoder-ffn-embed-dim 512 --decoder-ffn-embed-dim 512 --seed 1111",
    epochs=40,
    tokens_per_update=4096,
    max_tokens=4096,
    beam=5,
    segmentation="sentencepiece",
    vocab_size=8000,
    hold_out_every=30,
    first_epoch=11,
)

# For two CPU cores: a training takes a few minutes.
_MULTI30K_SMALL = replace(
    _MULTI30K,
    title="Multi30k English-German by a small model, for CPUs (no paper)",
    train="--arch cape_transformer --share-all-embeddings --dropout 0.1"
    " --encoder-normalize-before --decoder-normalize-before"
    " --encoder-layers 2 --encoder-attention-heads 4 --encoder-embed-dim 96"
    " --decoder-layers 2 --decoder-attention-heads 4 --decoder-embed-dim 96"
    " --encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256"
    f" {LOSS} --optimizer adam --adam-betas (0.9,0.98) --lr 3e-3"
    " --lr-scheduler inverse_sqrt --warmup-updates 200 --warmup-init-lr 1e-7"
    " --required-batch-size-multiple 1 --skip-invalid-size-inputs-valid-test"
    " --disable-validation --num-workers 0 --seed 1",
    # cape and shape: a range of 100 positions; the longest caption has 72 subwords
    positions={
        "cape": {"max_global_shift": 50},
        "shape": {"max_offset": 100},
        "relpos": {"relative_context": 16},
    },
    epochs=None,
    updates=1200,
    tokens_per_update=1500,
    max_tokens=1500,
    vocab_size=2000,
    beam=4,
    select="average",
    average=5,
    keep="update",
    save_every=50,
)


# This row has four times as many updates as multi30k_small, with half as many tokens in each
# update, and learning curves. No model of this size keeps ten joined captions apart; the column
# "separated" of the stage analyze shows whether a model keeps three captions apart.
_STUDY = replace(
    _MULTI30K_SMALL,
    title="Multi30k English-German by a small model, 4800 updates (no paper)",
    train=_MULTI30K_SMALL.train.replace(" --disable-validation", ""),
    updates=4800,
    tokens_per_update=750,
    max_tokens=750,
    save_every=200,  # also validates; the average covers the last fifth, nearly as in SHAPE
    positions={
        "cape": {"max_global_shift": 5},
        "shape": {"max_offset": 10},
        "relpos": {"relative_context": 16},
    },
)

RECIPES: dict[str, Recipe] = {
    "wmt14_en_de": _WMT14,
    "wmt14_en_de_18l": replace(
        _WMT14,
        title="WMT14 English-German, 18+18 layers, ADMIN (CAPE table 2)",
        train=f"{_WMT14.train} --encoder-layers 18 --decoder-layers 18",
        positions=_of_cape_paper("cape_wmt14_18l"),
    ),
    "wmt14_en_fr": replace(
        _WMT14,
        title="WMT14 English-French, 6+6 layers, ADMIN (CAPE table 2)",
        languages=("en", "fr"),
        train=_WMT14.train.replace("--lr 1e-3", "--lr 7e-4"),
        epochs=75,
        tokens_per_update=8000 * 8 * 10,
        max_tokens=8000,
        beam=5,
        length_penalty=0.8,
        vocab_size=40000,
        clean=None,
        max_ratio=1.5,
        max_subwords=250,
        filter_valid=True,
        hold_out_every=1333,
        first_epoch=25,
    ),
    "iwslt14_de_en": Recipe(
        title="IWSLT14 German-English (the recipe of Transformer-Clinic; not in the CAPE paper)",
        languages=("de", "en"),
        train=f"--arch cape_transformer_iwslt_de_en {_CLINIC} --adam-betas (0.9,0.98)"
        " --lr 7e-4 --warmup-updates 6000 --dropout 0.3 --activation-dropout 0.1"
        " --weight-decay 1e-4 --seed 1111",
        updates=100_000,
        tokens_per_update=4096,
        max_tokens=4096,
        beam=5,
        vocab_size=10000,
        lowercase=True,
        aggressive_hyphens=False,
        clean=(1, 175),
        max_ratio=1.5,
        hold_out_every=23,
        select="average",
    ),
    "wmt16_en_de": _WMT16,
    "wmt16_en_de_extrapolate": replace(
        _WMT16,
        title="WMT16 English-German, training pairs of at most 50 subwords (SHAPE table 2)",
        max_subwords=50,
    ),
    "wmt16_en_de_interpolate": replace(
        _WMT16,
        title="WMT16 English-German, ten neighbouring sentences joined (SHAPE table 2)",
        join=10,
    ),
    "multi30k_en_de": _MULTI30K,
    "multi30k_small": _MULTI30K_SMALL,
    "multi30k_small_interpolate": replace(
        _MULTI30K_SMALL,
        title="Multi30k English-German, ten neighbouring captions joined (after SHAPE table 2)",
        positions={
            "cape": {"max_global_shift": 100},
            "shape": {"max_offset": 200},
            "relpos": {"relative_context": 16},
        },
        join=10,
    ),
    "multi30k_study": _STUDY,
    "multi30k_study_interpolate": replace(
        _STUDY,
        title=f"{_STUDY.title}, three neighbouring captions joined",
        join=3,
    ),
}

SAMPLE_TRAINING = """--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2
    --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2
    --warmup-updates 5 --num-workers 0"""


def sampled(recipe: Recipe) -> Recipe:
    """The same recipe at a tiny scale: a narrow model, two epochs of 600 pairs, short output."""
    return replace(
        recipe,
        train=f"{recipe.train} {SAMPLE_TRAINING}",
        tokens_per_update=2000,
        max_tokens=2000,
        epochs=2,
        updates=None,  # the second epoch has to end: "average" takes two checkpoints
        vocab_size=400,
        hold_out_every=10,
        beam=2,
        average=2,
        first_epoch=1,
        save_every=2,
        stacked_length=40,
        length_factor=0.7,
        length_extra=5,
    )
