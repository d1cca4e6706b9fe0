"""Settings of the translation recipes, against the numbers of the papers, through the command line.

The numbers are copied from the papers and the recipes that they name, not from the catalog:
    CAPE: section 5.3, appendix D.1, table 2; nmt-experiments/wmt14_en-{de,fr}.md and
        iwslt14_de-en.md of Transformer-Clinic, which they "precisely follow".
    SHAPE: section 3.1, appendix B, tables 3 and 4; config_shape/*.yaml of its authors.
"""

import shlex
from itertools import pairwise

import pytest

from recipes.lab.runs import SEED_STEP
from recipes.mt.run import main


def flags_of(command):
    """Value by flag; True for one without."""
    words = [*shlex.split(command), "--"]
    is_flag = [word.startswith("--") for word in words]
    pairs = zip(pairwise(words), pairwise(is_flag), strict=True)
    return {flag: True if alone else value for (flag, value), (here, alone) in pairs if here}


ARCHITECTURE = "cape_transformer_wmt_en_de"  # 6+6 layers of 512, inner 2048, 8 heads
SHARED = flags_of(
    f"--arch {ARCHITECTURE} --share-all-embeddings --adam-eps 1e-8 --clip-norm 0 "
    "--lr-scheduler inverse_sqrt --criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--dropout 0.1 --attention-dropout 0.1"
)
# of older versions: --relu-dropout, which is --activation-dropout, --min-lr, which is --stop-min-lr
CLINIC = SHARED | flags_of(
    "--optimizer radam --adam-betas (0.9,0.98) --warmup-init-lr 1e-7 --stop-min-lr 1e-9 "
    "--warmup-updates 8000 --activation-dropout 0.1 --seed 1111 --admin-init"
)
CLINIC |= {"--weight-decay": None, "--encoder-normalize-before": None}
WMT14_DE = CLINIC | {"--lr": "1e-3", "--max-epoch": "150"}
IWSLT14 = CLINIC | {"--arch": "cape_transformer_iwslt_de_en", "--admin-init": None}
IWSLT14 |= flags_of(
    "--lr 7e-4 --warmup-updates 6000 --max-update 100000 --dropout 0.3 --weight-decay 1e-4"
)
OPENNMT = SHARED | flags_of(
    "--optimizer adam --adam-betas (0.9,0.998) --warmup-updates 8000 --encoder-normalize-before "
    "--decoder-normalize-before --max-update 200000 --save-interval-updates 5000 --seed 1010"
)
OPENNMT |= {"--activation-dropout": None, "--admin-init": None}
DEEP = flags_of("--encoder-layers 18 --decoder-layers 18")
FRENCH = flags_of("--lr 7e-4 --max-epoch 75")
# recipe, devices of the paper: training; tokens of an update; selection; beam, length penalty
TRAININGS = {
    ("wmt14_en_de", 4): (WMT14_DE, 4 * 8192, "best", "4", 0.6),
    ("wmt14_en_de_18l", 4): (WMT14_DE | DEEP, 4 * 8192, "best", "4", 0.6),
    ("wmt14_en_fr", 8): (CLINIC | FRENCH, 8 * 8000 * 10, "best", "5", 0.8),
    ("iwslt14_de_en", 1): (IWSLT14, 4096, "average", "5", 1.0),
    ("wmt16_en_de", 8): (OPENNMT, 8 * 7000 * 2, "average", "4", 0.0),
    ("wmt16_en_de_extrapolate", 8): (OPENNMT, 8 * 7000 * 2, "average", "4", 0.0),
    ("wmt16_en_de_interpolate", 16): (OPENNMT, 16 * 7000, "average", "4", 0.0),
}
TEXTS = {
    "wmt14_en_de": ("languages en de", "vocab_size 32764", "clean 1 80", "max_subwords None"),
    "wmt14_en_fr": (
        *("languages en fr", "vocab_size 40000", "clean None", "max_ratio 1.5", "max_subwords 250"),
        *("filter_valid True", "hold_out_every 1333"),
    ),
    "iwslt14_de_en": ("languages de en", "vocab_size 10000", "lowercase True", "clean 1 175"),
    "wmt16_en_de": ("languages en de", "vocab_size 32000", "max_subwords None", "join 1"),
    "wmt16_en_de_extrapolate": ("max_subwords 50", "join 1"),
    "wmt16_en_de_interpolate": ("max_subwords None", "join 10"),
}
CAPE, SHIFT = "--position-embedding cape", "--position-max-global-shift"
ALPHA = "--position-source-scale auto-no-eos"  # 1.0337 and 1.1632 count no EOS
SHAW = "--position-embedding relpos --position-relative-context 16 --position-relative-values true"
FULL = "--position-embedding relpos --position-relative-context 150"
OFFSET = "--position-embedding shape --position-max-offset"
# columns of CAPE table 2, rows of SHAPE tables 2 and 4: words after the recipe, flags of positions
POSITIONS = {
    "wmt14_en_de": f"{CAPE} {SHIFT} 5 {ALPHA}",
    "wmt14_en_de --compare cape:max_global_shift=50": f"{CAPE} {SHIFT} 50 {ALPHA}",
    "wmt14_en_de --compare sinpos": "--position-embedding sinpos",
    "wmt14_en_de --compare abspos": "--position-embedding abspos",
    "wmt14_en_de --compare relpos": FULL,
    "wmt14_en_de_18l": f"{CAPE} {SHIFT} 10 {ALPHA}",
    "wmt14_en_fr": f"{CAPE} {SHIFT} 5 {ALPHA}",
    "wmt14_en_fr --compare cape:max_global_shift=50": f"{CAPE} {SHIFT} 50 {ALPHA}",
    "wmt14_en_fr --compare relpos": FULL,
    "wmt16_en_de": f"{OFFSET} 500",
    "wmt16_en_de --compare cape": f"{CAPE} {SHIFT} 5",  # of no paper
    "wmt16_en_de --compare relpos": SHAW,  # added to keys and values, section 2.2
    "wmt16_en_de_extrapolate": f"{OFFSET} 500",
    "wmt16_en_de_extrapolate --compare relpos": SHAW,
    "wmt16_en_de_interpolate": f"{OFFSET} 500",
}
COMPARED = "wmt16_en_de_extrapolate --compare shape:max_offset="
POSITIONS |= {f"{COMPARED}{k}": f"{OFFSET} {k}" for k in (10, 20, 30, 40, 100)}


def printed(capsys, *words):
    """Lines of --dry-run: what it is, its text, and the commands of train, select and decode."""
    recipe, *options = words
    main([recipe, "train", "--dry-run", "--device", "cpu", *options])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("name", "devices"), TRAININGS)
def test_training_and_decoding_have_the_numbers_of_the_paper(name, devices, capsys):
    expected, tokens, selection, beam, penalty = TRAININGS[name, devices]
    _, _, train, select, decode = printed(capsys, name, "--devices", str(devices))
    train_flags = flags_of(train)
    assert {flag: train_flags.get(flag) for flag in expected} == expected
    assert int(train_flags["--max-tokens"]) * int(train_flags["--update-freq"]) * devices == tokens
    if name.startswith("wmt16"):  # Noam's schedule: factor 2, width 512, 8000 steps of warm-up
        peak = 2 * 512**-0.5 * 8000**-0.5
        assert float(train_flags["--lr"]) == pytest.approx(peak, rel=1e-3)
    if selection == "average":
        unit = "update" if "--max-update" in expected and name.startswith("wmt16") else "epoch"
        assert select.startswith("cape-average-checkpoints")
        assert flags_of(select)[f"--num-{unit}-checkpoints"] == "10"
    else:
        assert select.startswith("# select: the best BLEU on valid")
    assert flags_of(decode)["--beam"] == beam
    assert float(flags_of(decode)["--lenpen"]) == penalty


def test_longer_training_keeps_its_epochs_from_the_first_to_select_on(capsys):
    words = ("wmt14_en_de", "--first-epoch", "160", "--max-epoch", "300")
    flags = flags_of(printed(capsys, *words)[2])
    assert (flags["--max-epoch"], flags["--keep-last-epochs"]) == ("300", "141")


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_prepared_as_in_the_paper(name, capsys):
    prepare = printed(capsys, name)[1]
    assert prepare.startswith("# prepare: ")
    assert all(f" {words}," in f"{prepare}," for words in TEXTS[name]), prepare


@pytest.mark.parametrize("words", POSITIONS)
def test_positions_equal_the_column_of_the_table(words, capsys):
    train = printed(capsys, *words.split())[2]
    flags = train.partition(" --position-embedding ")[2].removesuffix(" --cpu")
    assert f"--position-embedding {flags}" == POSITIONS[words]


def test_dry_run_names_each_training_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = printed(capsys, "wmt14_en_de", "--seeds", "1", "2", "--lr", "1")
    named = [line.partition(":")[0] for line in lines if line.startswith("# cape")]
    assert named == ["# cape-seed1", "# cape-seed2"]
    flags = [flags_of(line) for line in lines if line.startswith("fairseq-train")]
    assert [train_flags["--seed"] for train_flags in flags] == [str(n * SEED_STEP) for n in (1, 2)]
    assert {train_flags["--lr"] for train_flags in flags} == {"1"}, "the last value counts"
    assert not list(tmp_path.iterdir())
