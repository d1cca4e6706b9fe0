"""Augmentation of images, the data sets of the vision recipe, and its projection of patches."""

import argparse
import pickle
import random
import sys
import types

import numpy as np
import pytest

pytest.importorskip("transformers")

import datasets
import torch
from PIL import Image

from recipes.lab.steps import CommandError
from recipes.vit import evaluate
from recipes.vit import finetune_hf as vit
from recipes.vit.augment import OPERATIONS, Augment, rand_augment, to_pil
from recipes.vit.data import Images, Request, given_data, load_data

ZERO, ONE = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)


def picture(channels=3, height=24, width=20):
    """Every operation changes it: dark, so that contrast can grow, with details in color."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    detail = 0.05 * ((x + y) % 2)
    return torch.stack([y / 50 + detail, x / 50 + 0.1, (x + y) / 100 + 0.05])[:channels]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_keep_the_shape_and_change_the_image(name, channels):
    image = to_pil(picture(channels))
    fill = (10, 20, 30) if channels == 3 else 10
    out = OPERATIONS[name](image, random.Random(0), fill)
    assert (out.mode, out.size) == (image.mode, image.size)
    changed = np.asarray(out) != np.asarray(image)
    assert changed.any() or (name, channels) == ("color", 1)  # grey has no color
    if name.startswith(("rotate", "shear", "translate")):  # some of the image is empty and filled
        assert (np.asarray(out).reshape(-1, channels) == fill).all(1).any()


def test_operations_move_and_brighten_by_their_magnitudes():
    right = OPERATIONS["translate-x"](to_pil(picture()), random.Random(1), (0, 0, 0))
    empty = (np.asarray(right) == 0).all((0, 2))
    assert abs(int(empty.sum()) - 0.45 * 0.9 * 20) <= 1
    expected = {("brightness", 100): {20, 180}, ("solarize-add", 127): {227}}
    expected |= {("solarize", 127): {128}, ("posterize", 127): {0}}
    for (name, before), after in expected.items():
        grey = Image.new("L", (1, 1), before)
        values = {OPERATIONS[name](grey, random.Random(n), 0).getpixel((0, 0)) for n in range(9)}
        assert values == after, name


def test_half_are_mirrored_and_a_share_is_erased():
    data = Images([picture(3, 40, 30)] * 400, lambda item: (item, 0), ["a"])
    data.augment = Augment(ZERO + 0.4, ONE * 0.1, flip=True)
    mirrored = [torch.equal(data[n][0], picture(3, 40, 30).flip(-1)) for n in range(400)]
    assert 150 < sum(mirrored) < 250
    data.augment = Augment(ZERO + 0.4, ONE * 0.1, erasing=0.25)
    images = [data[n][0] for n in range(400)]
    masks = [(image != picture(3, 40, 30)).any(0) for image in images]
    for mask in masks:
        assert torch.equal(mask, mask.any(1, keepdim=True) & mask.any(0)), "no rectangle"
        assert mask.double().mean() < 0.36
    erased = [image[:, mask] for image, mask in zip(images, masks, strict=True) if mask.any()]
    assert 70 < len(erased) < 130
    noise = torch.cat([pixels.flatten() for pixels in erased])
    assert float(noise.mean()) == pytest.approx(0.4, abs=0.01)  # 0 and 1 when normalised
    assert float(noise.std()) == pytest.approx(0.1, abs=0.01)


def test_augmentation_depends_on_seed_epoch_and_place():
    def augmented(seed=0, epoch=0, number=0):
        data.seed = seed
        return data[Request(0, 16, epoch, number)][0]

    data = Images([picture(3, 40, 30)], lambda item: (item, 0), ["a"])
    data.crop = (0.1, 0.9)
    data.augment = Augment(ZERO, ONE, True, rand_augment("deit", (0.5,) * 3), 1.0)
    first = augmented()
    assert first.shape == (3, 16, 16)
    random.seed(3), torch.manual_seed(3)
    assert torch.equal(augmented(), first)
    for other in (augmented(seed=1), augmented(epoch=1), augmented(number=1)):
        assert not torch.equal(other, first)


def test_randaugment_applies_zero_to_two_operations():
    image = to_pil(picture())
    augment = rand_augment("deit", (0.5,) * 3)
    same = sum(augment(image, random.Random(n)).tobytes() == image.tobytes() for n in range(400))
    assert 70 < same < 140  # a quarter is left alone
    assert rand_augment("none", (0.5,)) is rand_augment(None, (0.5,)) is None


def test_timm_is_seeded_by_the_sample_and_asked_for_where_it_is_missing(monkeypatch):
    """With a stand-in of timm's interface, which draws from the global generators."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CommandError, match="timm, which is not installed.*pip install timm"):
        rand_augment("rand-m9-mstd0.5-inc1", (0.5,) * 3)

    def transform_of(setting, params):
        assert (setting, params) == ("rand-m9-mstd0.5-inc1", {"img_mean": (128, 128, 128)})
        return lambda image: image.point(
            [int(256 * x) for x in (random.random(), np.random.rand(), 0.5) for _ in range(256)]
        )

    module = types.ModuleType("timm.data.auto_augment")
    module.rand_augment_transform = transform_of
    for name in ("timm", "timm.data"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    augment = rand_augment("rand-m9-mstd0.5-inc1", (0.5,) * 3)
    before = random.getstate()
    colours = [augment(to_pil(picture()), random.Random(n)).getpixel((0, 0)) for n in (0, 1, 2, 0)]
    assert colours[0] == colours[3]
    assert len({colour[0] for colour in colours}) == len({colour[1] for colour in colours}) == 3
    assert random.getstate() == before


def options(dataset, **more):
    names = {"dataset_config": None, "train_split": "train", "test_split": None}
    columns = {"image_column": None, "label_column": None}
    return argparse.Namespace(dataset=str(dataset), **{**names, **columns, **more})


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Parquet as of CIFAR-10: encoded images, labels as numbers."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = datasets.Features({"img": datasets.Image(), "fine_label": datasets.Value("int64")})
    images = [Image.new("RGB", (6, 4), (9 * n, 0, 0)) for n in range(5)]
    columns = {"img": images, "fine_label": [1, 10, 2, 10, 1]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    (tmp_path / "tables").mkdir()
    for split in ("train", "validation"):
        rows.to_parquet(tmp_path / "tables" / f"{split}.parquet")
    return tmp_path / "tables"


def test_columns_of_usual_names_and_images_held_in_memory(tables):
    """And sent to worker processes, where these are not forked, as on macOS."""
    train, test = given_data(options(tables), 3)
    assert (len(train), len(test)) == (5, 5)
    assert train.names == ["1", "2", "10"]  # by number
    image, label = train[3]
    assert (image.shape, image.dtype, label) == ((3, 4, 6), torch.float32, 2)
    torch.testing.assert_close(image[0], torch.full((4, 6), 27 / 255))
    assert train.items[3][0].dtype == torch.uint8  # decoded
    assert given_data(options(tables), 1)[0][0][0].shape == (1, 4, 6)
    train.augment = Augment(ZERO, ONE, True, rand_augment("deit", (0.5,) * 3), 1.0)
    sent = pickle.loads(pickle.dumps(train))
    assert all(torch.equal(sent[n][0], train[n][0]) for n in range(5))
    with pytest.raises(CommandError, match="--image-column image: the data have the columns img"):
        given_data(options(tables, image_column="image"), 3)


def test_large_data_sets_are_not_held():
    data = Images(range(40), lambda item: (torch.zeros(3, 10, 10, dtype=torch.uint8), 0), ["a"])
    data.hold(limit=40 * 300 - 1)
    assert data.items == range(40)
    data.hold(limit=40 * 300)
    assert data.items != range(40)
    assert data[5][0].shape == (3, 10, 10)


def test_missing_columns_and_unknown_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_dict({"scan": ["x"], "kind": [1]})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "data")
    with pytest.raises(CommandError, match="--image-column is missing.*scan, kind"):
        given_data(options(tmp_path / "data"), 3)
    images, folder = [Image.new("L", (4, 4))] * 2, tmp_path / "unlabelled"
    train, test, other = (
        datasets.Dataset.from_dict({"image": images, "label": [label] * 2}) for label in (1, -1, 7)
    )
    datasets.DatasetDict(train=train, test=test).save_to_disk(folder)
    with pytest.raises(CommandError, match="label -1, which means no label.*another --test-split"):
        given_data(options(folder, test_split="test"), 1)
    datasets.DatasetDict(train=train, test=other).save_to_disk(tmp_path / "unknown")
    with pytest.raises(CommandError, match="label 7, .* the 1 classes of training.*remove these"):
        given_data(options(tmp_path / "unknown", test_split="test"), 1)
    assert len(given_data(options(folder), 1)[1]) == 1  # of training
    words = ["--model", "any", "--dataset", str(folder)]
    with pytest.raises(CommandError, match="--test-split is missing: .* has the splits train, te"):
        load_data(evaluate.parse(words), 1)
    (data,) = load_data(evaluate.parse([*words, "--test-split", "train"]), 1)
    assert (len(data.images), data.images.names) == (2, ["1"])


def test_images_beyond_the_limit_are_not_even_decoded(tmp_path):
    for number, name in enumerate("ABCDEFG"):
        folder = tmp_path / "photos/test" / name
        folder.mkdir(parents=True)
        for n in range(4):
            Image.new("RGB", (24, 24), (8 * number, 50 * n, 0)).save(folder / f"{n}.png")
    words = ["--model", "any", "--dataset", str(tmp_path / "photos"), "--output", str(tmp_path)]
    args = evaluate.parse([*words, "--limit", "14"])
    (data,) = load_data(args, 3)
    pixels = [(label, int(image[1, 0, 0])) for image, label in data.images.items]
    assert pixels == [(number, shade) for number in range(7) for shade in (0, 100)]
    args.test_split = "dev"
    with pytest.raises(CommandError, match="--test-split dev: .* has the splits test"):
        load_data(args, 3)


def test_patches_alone_are_scaled():
    """What they put out has the deviation of the pixels, and nothing else changes."""
    models = []
    for more in ([], ["--no-scale-patches"]):
        words = ["--dataset", "x", "--output", "out", "--recipe", "cifar10-fine", *more]
        args, _, recipe = vit.read_options(words)
        torch.manual_seed(0)
        sizes = vit.model_sizes(args, recipe)
        models.append(vit.build_model(args, {"type": "cape"}, sizes, ["a", "b"]))
    weights, others = (model.state_dict() for model in models)
    (patches,) = {name for name in others if not torch.equal(weights[name], others[name])}
    assert patches == "vit.embeddings.patch_embeddings.projection.weight"
    assert float(others[patches].std()) == pytest.approx(0.02, rel=0.1)
    assert float(weights[patches].std()) == pytest.approx((2 * 2 * 3) ** -0.5, rel=0.1)
    embedded = models[0].vit.embeddings.patch_embeddings(torch.randn(4, 3, 32, 32))
    assert embedded.shape == (4, 16 * 16, 64)
    assert 0.8 < embedded.std().item() < 1.25
