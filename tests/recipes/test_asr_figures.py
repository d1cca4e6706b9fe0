"""Proves that the studies of speech have the settings of the figures that they name: the numbers of
the CAPE paper, written out, against what fairseq-train understands of the command lines."""

import re
import shlex

import pytest

pytest.importorskip("soundfile")
from fairseq import options

from cape_plugins import PositionConfig
from cape_plugins.speech.features import HOP_SECONDS
from fairseq_user_dir.flags import config_from_args, decoder_config_from_args
from recipes.asr import run
from tests.support.fairseq_speech import durations, write_manifest

CORPORA = {"wsj": 1.1, "tedlium3": 2.0}  # with the global scale of section 5.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    for split in ("train", "test"):
        write_manifest(path, split, durations(2))
    return path


@pytest.fixture
def figure(folder):
    """Function ``figure(recipe, study)``: the arguments of fairseq-train by name of the model."""

    def trained(recipe, study, *words):
        words = ["--data", str(folder), "--recipe", recipe, "--study", study, *words]
        args, parsed = run.parse_arguments(words), {}
        for model in args.models:
            words, parser = run.training_flags(args, model), options.get_training_parser()
            parsed[model.name] = options.parse_args_and_arch(parser, [str(folder), *words])
        return parsed

    return trained


def positions(args):
    return config_from_args(args, "encoder", "audio")


def shown(config):
    """The type; of cape global shift, local shift and scale, of relpos context and layers."""
    if config.type == "cape":
        assert config.mean_normalize
        return "cape", config.max_global_shift, config.max_local_shift, config.max_global_scale
    if config.type == "relpos":  # learned keys, and nothing beyond the context: the released code
        assert (config.relative_beyond, config.relative_values) == ("zero", False)
        return "relpos", config.relative_context, config.layers
    return config.type


@pytest.mark.parametrize("study", run.STUDIES)
@pytest.mark.parametrize("recipe", CORPORA)
def test_sizes_follow_appendix_c2_and_training_the_released_runs(figure, recipe, study):
    """The released runs: rate, clipping and, narrower than in C.2, the masks of TED-LIUM."""
    rate = {"wsj": 0.4, "tedlium3": 0.1}[recipe]
    for name, args in figure(recipe, study).items():
        assert (args.encoder_layers, args.encoder_embed_dim) == (36, 768)
        assert (args.encoder_ffn_embed_dim, args.encoder_attention_heads) == (3072, 4)
        assert (args.optimizer, args.clip_norm, args.dropout) == ("adagrad", 0.1, 0)
        assert (args.frequency_masks, args.time_masks) == (2, 10)
        assert (args.conv_kernel_size, args.conv_stride) == (7, 3)
        assert not args.encoder_normalize_before
        if args.criterion != "cape_ctc":
            continue
        dropout = 0.1 if name == "nopos-dropout-0.1" else rate
        assert (args.attention_dropout, args.activation_dropout) == (dropout, dropout)
        assert (args.encoder_layerdrop, args.feature_dropout) == (dropout, 0.3)
        assert (args.lr, args.max_tokens, args.abspos_frames) == ([0.01], 24000, 460)
        masks = {"wsj": (30, 50), "tedlium3": (20, 30)}[recipe]
        assert (args.frequency_mask_width, args.time_mask_width) == masks


@pytest.mark.parametrize("recipe", [name for name in run.RECIPES if name not in CORPORA])
def test_flags_of_other_recipes_are_known(figure, recipe):
    for study in ("types", "decoder"):
        assert {args.task for args in figure(recipe, study).values()} == {"cape_asr"}


CAPE, RELPOS = ("cape", 30, 0.5, 1), ("relpos", 919, "all")


def settings(models):
    return {name: shown(positions(args)) for name, args in models.items()}


@pytest.mark.parametrize(("recipe", "scale"), CORPORA.items())
def test_figures_5_and_6(figure, recipe, scale, folder):
    """WSJ and TED-LIUM 3 by type."""
    words = ["--data", str(folder), "--recipe", recipe]
    assert run.parse_arguments(words).bins == (10, 15, 20)  # seconds
    models = figure(recipe, "types")
    expected = {name: name for name in ("nopos", "sinpos", "abspos")}
    expected |= {"relpos": RELPOS, "cape": ("cape", 30, 0.5, scale)}
    assert expected.items() <= settings(models).items()
    preset = {"wsj": "cape_wsj", "tedlium3": "cape_tedlium"}[recipe]
    assert positions(models["cape"]) == PositionConfig.preset(preset)


@pytest.mark.parametrize("recipe", CORPORA)
def test_figure_7(figure, recipe):
    """CAPE's global and local shifts, and SpecAugment."""
    models = figure(recipe, "augmentation")
    plain = {"baseline": "sinpos", "+CAPE": CAPE}
    assert settings(models) == plain | {"+SpecAug": "sinpos", "+CAPE +SpecAug": CAPE}
    assert {name for name, args in models.items() if args.no_spec_augment} == {*plain}


@pytest.mark.parametrize("recipe", CORPORA)
def test_figures_15_and_16(figure, recipe):
    """Padded batches and batches without padding, lambda 1."""
    models = figure(recipe, "batches")
    padded, free = ({f"{a}{end}": b for a, b in (("sinpos", "sinpos"), ("cape", CAPE))}
                    for end in ("", " (padding-free)"))  # fmt: skip
    assert settings(models) == padded | free
    assert {name for name, args in models.items() if args.padding_free} == {*free}


@pytest.mark.parametrize("recipe", CORPORA)
def test_figure_18(figure, recipe):
    """Global shifts that cover 15, 30 and 60 seconds, lambda 1."""
    expected = {f"covers-{2 * half:g}s": ("cape", half, 0.5, 1) for half in (7.5, 15, 30)}
    assert settings(figure(recipe, "shift")) == expected


@pytest.mark.parametrize("recipe", CORPORA)
def test_figure_19(figure, recipe):
    """With and without local shift, lambda 1."""
    expected = {"global-and-local": CAPE, "global-only": ("cape", 30, 0, 1)}
    assert settings(figure(recipe, "local")) == expected


@pytest.mark.parametrize(("recipe", "scale"), CORPORA.items())
def test_figures_20_and_21(figure, recipe, scale):
    """Contexts of 27.6 and 6 seconds, the first layer, the scale of the corpus; all scales."""
    assert settings(figure(recipe, "relpos")) == {
        "relpos": RELPOS,
        "relpos-6s": ("relpos", 199, "all"),
        "relpos-first": ("relpos", 919, "first"),
        "cape": ("cape", 30, 0.5, scale),
    }
    scales = [config[-1] for config in settings(figure(recipe, "scale")).values()]
    assert scales == [1, 1.1, 1.4, 2, 3]


def test_figure_17(folder, repo_root):
    """Hops of 5 to 12 ms, at which the error rate hardly changes, and longer ones, for CAPE: the
    command of the row of docs/paper_map.md."""
    page = (repo_root / "docs/paper_map.md").read_text("utf-8")
    (command,) = re.findall(r"^\| A Fig\. 17 \|.*`python -m recipes.asr.run (.*?)`", page, re.M)
    words = shlex.split(command.replace("data/tedlium3", str(folder)))
    args = run.parse_arguments(words)
    assert {5, 10, 12} < {*args.hops}
    assert min(args.hops) == 5
    assert max(args.hops) > 12
    assert (args.recipe, args.study) == ("tedlium3", "batches")
    assert words[words.index("--compare") + 1].startswith("cape")


def test_figure_22(figure):
    """Dropout and layer drop of nopos, on WSJ."""
    models = figure("wsj", "dropout")
    expected = {"nopos": "nopos", "nopos-dropout-0.1": "nopos", "cape": ("cape", 30, 0.5, 1.1)}
    assert settings(models) == expected
    assert [args.encoder_layerdrop for args in models.values()] == [0.4, 0.1, 0.4]


def test_figure_23(figure):
    """CTC against one decoder of relative positions that look back by 320 tokens: 6 layers of 256,
    4 heads, dropout and layer drop 0.2. The encoders are alike, with the released code's
    dropout; relative positions there have a context of 27.6 s, in steps of 30 ms."""
    models = figure("tedlium3", "decoder")
    types = ["nopos", "sinpos", "cape", "relpos"]
    assert [positions(args).type for args in models.values()] == types * 2
    ctc, decoder = list(models.values())[:4], list(models.values())[4:]
    assert {args.criterion for args in ctc} == {"cape_ctc"}
    for args in decoder:
        assert args.arch == "cape_seq2seq_transformer"
        assert (args.criterion, args.label_smoothing) == ("label_smoothed_cross_entropy", 0.05)
        assert (args.decoder_layers, args.decoder_embed_dim) == (6, 256)
        assert (args.decoder_ffn_embed_dim, args.decoder_attention_heads) == (1024, 4)
        assert (args.attention_dropout, args.activation_dropout, args.dropout) == (0.2, 0.2, 0)
        assert (args.decoder_layerdrop, args.encoder_layerdrop) == (0.2, 0.2)
        assert (args.feature_dropout, args.lr, args.max_tokens) == (0.1, [0.02], 5000)
        assert (args.frequency_mask_width, args.time_mask_width) == (30, 50)
        assert shown(decoder_config_from_args(args)) == ("relpos", 320, "all")
    for name in ("ctc-relpos", "decoder-relpos"):
        assert shown(positions(models[name])) == RELPOS
        assert 919 * models[name].conv_stride * HOP_SECONDS == pytest.approx(27.6, abs=0.05)
    assert shown(positions(models["decoder-cape"])) == ("cape", 30, 0.5, 2)
