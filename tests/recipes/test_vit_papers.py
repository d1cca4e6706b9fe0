"""The commands of recipes/vit/README.md for the figures of the CAPE paper, against its numbers.

Numbers come from section 5.1 (P) and from the appendix (A). Training commands are stopped when the
first training would begin; evaluations run on models with random weights, but score and draw
nothing.
"""

import glob
import re
import shlex
from itertools import product
from string import Template

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from matplotlib.figure import Figure

from cape_plugins.cli import main as cape_plugins
from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.lab.steps import folder_name
from recipes.vit import evaluate, measure
from recipes.vit import finetune_hf as vit
from recipes.vit.data import Data, Images, make_processor
from tests.support.image_models import NAMES
from tests.support.tables import read_csv

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "image_size": 224, "patch_size": 16}


@pytest.fixture(scope="module")
def commands(repo_root):
    """Words of the commands of the section, by ``--output`` or, of tests, by their last option."""
    page = (repo_root / "recipes/vit/README.md").read_text("utf-8")
    section = page.partition("## The paper's figures")[2].replace("\\\n", " ")
    prefixes, by_output = {}, {}
    for line in re.findall(r"^ {4}([^#\n].*)", section, re.MULTILINE):
        if match := re.match(r'([A-Z]+)="(.*)"', line):
            prefixes[match[1]] = match[2]
            continue
        words = shlex.split(Template(line).substitute(prefixes))
        index = words.index("--output") + 1 if "--output" in words else len(words) - 1
        assert words[index] not in by_output
        by_output[words[index].removeprefix("results/")] = words
    return by_output


class Started(Exception):
    """The first training of a command would begin."""


def training_of(words, monkeypatch):
    """What a training command trains: settings by name, its options, the Trainer's options."""
    no_images = Images([], tuple, NAMES)

    def start(*training):
        raise Started(*training)

    monkeypatch.setattr(vit, "train_all", start)
    monkeypatch.setattr(vit, "given_data", lambda args, channels: (no_images, no_images))
    script = words.index("recipes/vit/finetune_hf.py")
    argv = [word for word in words[script + 1 :] if word != "--bf16"]  # not on each CPU
    with pytest.raises(Started) as started:
        vit.main(argv)
    return started.value.args[:3]


CAPE, LEVEL = (0.5, 0.5, 1.4), (0.5, 0.5, 1.0)  # shift, local shift in steps, scale; lambda 1
ONE_SIZE = ["nopos", "abspos", "sinpos", LEVEL, CAPE]
# rows of A Table 3 (Delta, epsilon and lambda are 0, 0 and 1 where a row is without)
ABLATIONS = [(0, 0.5, 1), (0.5, 0, 1), LEVEL, (0, 0.5, 1.4), (0.5, 0, 1.4), CAPE]
MIXED = list(range(128, 321, 32))  # P section 5.1.2
BASE, SMALL, TINY_ONE = (768, 12, 12), (384, 6, 12), (192, 3, 12)  # width, heads, layers
TRAINED = {
    "vit160": (BASE, [160], 64, ONE_SIZE),
    "vit224": (BASE, [224], 64, ["nopos", "abspos", "sinpos", *ABLATIONS]),
    "vit384": (BASE, [384], 32, ["abspos", "sinpos", LEVEL, CAPE]),
    "univit": (BASE, MIXED, 64, ["sinpos", LEVEL, CAPE]),
    "vit224-s": (SMALL, [224], 64, ["abspos"]),
    "univit-s": (SMALL, MIXED, 64, [LEVEL]),
    "vit224-ti": (TINY_ONE, [224], 64, ["abspos"]),
    "univit-ti": (TINY_ONE, MIXED, 64, [LEVEL]),
}


def shown(settings):
    """The type; of one that is augmented the numbers that the paper varies."""
    config = CapeViTConfig(position_embedding=settings).position_config
    if not config.random:
        return config.type
    return config.max_global_shift, config.max_local_shift, config.max_global_scale


@pytest.mark.parametrize("name", TRAINED)
def test_models_equal_table_3(commands, name, monkeypatch):
    """Also of Table 4 and Figures 2, 3, 4 and 10 to 13, which show the same models."""
    (width, heads, layers), sizes, batch, compared = TRAINED[name]
    settings, args, training = training_of(commands[name], monkeypatch)
    assert [*map(shown, settings.values())] == compared
    assert ([*args.train_sizes], args.univit) == (sizes, len(sizes) > 1)
    assert training.per_device_train_batch_size == batch
    # an update has 1024 images, of 16 GPUs with 64 or, at 384 pixels, 32 with 32 (A B.1)
    assert training.learning_rate * 1024 / batch == pytest.approx(1e-3)
    with torch.device("meta"):
        model = vit.build_model(args, next(iter(settings.values())), args.model_config, NAMES)
    config = model.config
    assert (config.hidden_size, config.intermediate_size) == (width, 4 * width)
    assert (config.num_attention_heads, config.num_hidden_layers) == (heads, layers)
    image_size = sizes[0] if len(sizes) == 1 else 224
    assert (config.patch_size, config.image_size) == (16, image_size)
    # A B.1; DeiT, whose training it is, has the numbers
    assert (training.num_train_epochs, training.weight_decay) == (300, 0.05)
    assert training.max_steps < 0
    assert training.optim.startswith("adamw")
    assert training.get_warmup_steps(300_000) == pytest.approx(5_000, rel=1e-3)
    assert training.lr_scheduler_kwargs == {"min_lr": 1e-5}
    assert training.label_smoothing_factor == 0.1
    assert (args.mixup, args.cutmix, args.random_erasing) == (0.8, 1.0, 0.25)
    assert (args.rand_augment, args.repeats, args.drop_path) == ("deit", 3, 0.1)
    assert (args.crop, args.flip) == ((0.08, 1.0), True)


def test_finetuning_follows_the_paper(commands, tmp_path, monkeypatch):
    """From 224 to 384 pixels, "+ft" of A Table 3."""
    save(tmp_path / "results/vit224/cape", {"type": "cape"})
    monkeypatch.chdir(tmp_path)
    settings, args, training = training_of(commands["vit384-ft"], monkeypatch)
    assert [*map(shown, settings.values())] == [CAPE]
    assert training.num_train_epochs == 30
    batch = training.per_device_train_batch_size
    assert training.learning_rate * 512 / batch == pytest.approx(5e-6)
    model = vit.build_model(args, settings["cape"], args.model_config, NAMES)
    assert model.config.image_size == 384


def save(folder, settings):
    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {n: i for i, n in enumerate(NAMES)}}
    config = CapeViTConfig(**TINY, **names, position_embedding=settings)
    CapeViTForImageClassification(config).save_pretrained(folder)
    make_processor(None, 224, 3).save_pretrained(folder)


SIDES = (80, 120, 180, 230, 280, 330, 370, 400)  # of originals, one in each bin of A Table 5


@pytest.fixture(scope="module")
def trained(commands, tmp_path_factory):
    """A folder in which all trainings have left their models."""
    folder = tmp_path_factory.mktemp("trained")
    for name in TRAINED:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            settings, args, _ = training_of(commands[name], patch)
        for variant, variant_settings in settings.items():
            save(folder / args.output / folder_name(variant), variant_settings)
    return folder


@pytest.fixture
def measured(commands, trained, tmp_path, monkeypatch):
    """Runs the test of a name, and reads its table."""

    def load(args, channels):
        items = [(torch.rand(3, side, side + 10), n % len(NAMES)) for n, side in enumerate(SIDES)]
        items = items if args.bins else items[:1]
        return [Data(name, Images(items, tuple, NAMES), range(len(items))) for name in args.dataset]

    def run(name, table):
        words = commands[name]
        argv = words[words.index("recipes/vit/evaluate.py") + 1 :]
        argv = [path for word in argv for path in (sorted(glob.glob(word)) or [word])]
        evaluate.main([*argv, "--output", str(tmp_path)])
        return evaluate.parse(argv), read_csv(tmp_path / f"{table}.csv")

    def ranks(classifier, data, columns, classes):
        return dict.fromkeys(columns, np.zeros(len(data.order)))

    monkeypatch.setattr(measure, "label_ranks", ranks)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **more: None)
    monkeypatch.setattr(evaluate, "load_data", load)
    monkeypatch.chdir(trained)
    return run


def test_sizes_and_data_equal_tables_3_and_4(measured):
    args, rows = measured("672", "accuracy")
    assert args.protocol == "crop"
    assert measure.CENTRE == 224 / 256
    models = {row["model"] for row in rows}
    assert len(models) == len(TRAINED["vit224"][3])
    sets, sizes = ("IMAGENET", "V2_A", "V2_B", "V2_C"), (160, 224, 384, 672)
    expected = [*product(sets, sizes)] * len(models)
    assert [(row["data"], int(row["size"])) for row in rows] == expected
    assert all(row["top1"] and row["top5"] for row in rows)


def test_three_sizes_are_added_up_in_table_1(measured):
    args, rows = measured("--tta", "tta")
    assert {(int(row["size"]), row["tta"]) for row in rows} == {*product((224, 384), "-+")}
    paths = ("vit224/sinpos", "vit224/cape", "univit/sinpos", "univit/cape-max_global_scale-1")
    assert args.model == [f"results/{path}" for path in paths]
    assert len({row["model"] for row in rows}) == 4
    columns = measure.columns_of(args, 224)
    for size in (224, 384):
        assert [view.size for view in columns["tta", size, "+"]] == [size - 32, size, size + 32]
        assert [view.size for view in columns["tta", size, "-"]] == [size]


def test_throughput_is_measured_as_for_figure_4(measured, monkeypatch):
    asked = []

    def timed(classifier, size, **counts):
        asked.append((size, counts))
        return {"size": size, "batch": 1, "images_per_second": 1.0}

    monkeypatch.setattr(evaluate, "throughput", timed)
    _, rows = measured("--throughput", "throughput")
    sizes = [*range(96, 321, 32), 352, 384]  # A B.1 and the released scripts
    models = {row["model"] for row in rows}
    assert len(models) == 7  # UniViT: three of B, and S and Ti; abspos-S and -Ti
    assert [size for size, _ in asked] == sizes * len(models)
    # the largest batch that fits, the average of 30 runs
    assert all(counts["runs"] == counts["warmup"] == 30 for _, counts in asked)
    assert evaluate.CUDA_BATCH > 7550, "the released scripts have 7550 of 96 pixels on 16 GB"


def test_bins_and_strategies_equal_table_5(measured):
    _, rows = measured("--bins", "bins")
    bins = list(dict.fromkeys(row["bin"] for row in rows))
    fixed = {"160 px": 160, "224 px": 224, "384 px": 384}
    for label, side in zip(bins, SIDES, strict=True):
        sizes = {row["strategy"]: row["size"] for row in rows if row["bin"] == label}
        largest = 500 if label == "385+" else side
        numbers = {name: int(size) for name, size in sizes.items() if size != "own"}
        assert numbers == {**fixed, "min": side, "max": largest}
        uncropped = {name for name, size in sizes.items() if size == "own"}
        assert uncropped == (set() if label == "385+" else {"original", "original (no crop)"})


def test_factors_on_the_grid_equal_table_6(measured):
    args, rows = measured("--gamma", "gamma")
    assert {row["model"] for row in rows} == {"sinpos", "cape-max_global_scale-1", "cape"}
    assert {int(row["size"]) for row in rows} == {160, 384}
    columns = measure.columns_of(args, 224)
    for size in (160, 384):
        gammas = {rule: views[0].gamma for (*column, rule), views in columns.items()
                  if column == ["gamma", size]}  # fmt: skip
        expected = {"1": 1, "r/train": size / 224, "sqrt(r/train)": (size / 224) ** 0.5}
        assert gammas == pytest.approx(expected)
        assert {row["gamma"] for row in rows if int(row["size"]) == size} == gammas.keys()


def test_figure_9_has_the_grids_and_channels_of_the_paper(commands, figures):
    """Grids of 160, 224 and 384 pixels; each 20th of 768 components."""
    words = commands["figure9.png"]
    cape_plugins(words[1:])
    assert len(figures) == 1
    index = words.index("--sizes")
    assert [16 * int(size) for size in words[index + 1 : index + 4]] == [160, 224, 384]
    channels = [int(word) for word in words[words.index("--channels") + 1 : -2]]
    assert all(channel % 20 == 19 and channel < 768 for channel in channels)
