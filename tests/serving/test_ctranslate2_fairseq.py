"""Models of fairseq served by ctranslate2: the same translations, for every type of position
embedding."""

import re

import pytest

from cape_plugins import TYPES
from cape_plugins.cli import main
from tests.support.served_fairseq import ALPHA, NORMS, TYPE_FLAGS

pytest.importorskip("ctranslate2")
ROWS = ("--max-source-tokens", "48", "--max-target-tokens", "48")
RELPOS, CAPE, SINPOS = TYPE_FLAGS["relpos"], TYPE_FLAGS["cape"], TYPE_FLAGS["sinpos"]
RELATIVE = ("--position-relative-context", "3", "--position-relative-values", "true")
NORM_FIRST = ("--layernorm-embedding",)

# name to norm, flags, and what the tests' checkpoints can be besides
SETTINGS = {
    **{
        f"{name}, {norm}": (norm, TYPE_FLAGS[name], {}) for norm in NORMS for name in TYPES
    },
    "relative values, clipped": ("post-LN", (*RELPOS, "--position-relative-values", "true"), {}),
    "relative, nothing beyond": (
        "pre-LN",
        (*RELPOS, *RELATIVE, "--position-relative-beyond", "zero"),
        {},
    ),
    "relative, first layer": ("post-LN", (*RELPOS, "--position-relative-layers", "first"), {}),
    "relative beside cape": ("pre-LN", (*CAPE, *RELATIVE), {}),
    "relative beside sinusoids, first layer": (
        "pre-LN",
        (*SINPOS, *RELATIVE, "--position-relative-layers", "first"),
        {},
    ),
    "learned steps": (
        "pre-LN",
        (*TYPE_FLAGS["randpos"], *("--position-learned-table", "true", "--position-max-position")
         , "24"),
        {},
    ),
    "BOS and alpha of sinusoids": (
        "post-LN",
        (*SINPOS, "--position-source-bos", "true", "--position-source-scale", ALPHA),
        {},
    ),
    "norm of embeddings, no scale": (
        "pre-LN",
        (*CAPE, *NORM_FIRST, "--no-scale-embedding"),
        {},
    ),
    "other dictionaries": ("pre-LN", CAPE, {"separate": True}),
    "other dictionaries, decoder shared": (
        "post-LN",
        (*CAPE, "--share-decoder-input-output-embed"),
        {"separate": True},
    ),
    "ADMIN": ("post-LN", CAPE, {"admin": True}),
    "ADMIN, norm of embeddings": ("post-LN", (*SINPOS, *NORM_FIRST), {"admin": True}),
    "ADMIN, relative": ("post-LN", RELPOS, {"admin": True}),
    "ADMIN, other dictionaries": ("post-LN", CAPE, {"admin": True, "separate": True}),
    "sides differ": (
        "post-LN",
        (*CAPE, "--encoder-normalize-before", "--encoder-attention-heads", "4",
         "--activation-fn", "gelu_accurate", "--no-decoder-final-norm"),
        {},
    ),
    "aligned": ("pre-LN", (*CAPE, "--arch", "cape_transformer_align"), {}),
}  # fmt: skip
FAST = ("cape, post-LN", "abspos, pre-LN", "ADMIN")


def compared(report):
    """Translations that were the same, those that were compared, and the largest difference."""
    match = re.search(r"check: (\d+) of (\d+) .* by at most (\S+?);?\s", report)
    return int(match[1]), int(match[2]), float(match[3])


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_translations_are_those_of_fairseq(name, models, tmp_path, capsys):
    norm, flags, choice = SETTINGS[name]
    checkpoint = models.save(name, norm, *flags, **choice)
    main(["export", "ctranslate2", str(checkpoint), str(tmp_path / "out"), *ROWS,
          "--check", str(models.text)])  # fmt: skip
    same, ended, difference = compared(capsys.readouterr().out)
    assert same == ended
    assert ended >= 170  # of 200
    assert difference <= 1e-5
