"""Evaluation of image models: scores, bins, gamma, throughput, and the command line."""

import argparse
import re
import shlex
from statistics import mean, stdev

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

from recipes.lab.steps import CommandError
from recipes.vit import classifier as speed
from recipes.vit import evaluate, measure
from recipes.vit.classifier import Classifier, scaled_grid, throughput
from recipes.vit.data import Data, Images, digits
from recipes.vit.measure import View, label_ranks
from tests.support.image_models import NAMES, SHAPES, SIZES, save
from tests.support.plots import COLOURS, assert_lines
from tests.support.tables import read_csv


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "cape")


@pytest.fixture
def classifier(path):
    return Classifier(path)


@pytest.fixture(scope="module")
def data():
    """Random images of several sizes, square and not."""
    generator = torch.Generator().manual_seed(0)
    shapes = SHAPES * 4
    items = [(torch.rand(3, *shape, generator=generator), n % 7) for n, shape in enumerate(shapes)]
    return Data("random", Images(items, lambda item: item, NAMES), range(len(items)), batch_size=5)


def logits(classifier, image):
    """Logits of one image, without the code under test."""
    with torch.no_grad():
        return classifier.model((image[None] - 0.5) / 0.5).logits[0]


def options(**changes):
    words = {"sizes": [16, 24], "protocol": "crop", "tta": False, "gamma": False, "bins": None}
    return argparse.Namespace(**{**words, "trained_size": None, **changes})


def test_strategies_are_scored_by_bin_at_one_exact_size(classifier, data, monkeypatch):
    """Counts add up, and each strategy shows what it says, one exact size in each forward."""
    seen = []
    forward = classifier.forward
    monkeypatch.setattr(classifier, "forward", lambda x: seen.append(x.shape[2:]) or forward(x))
    rows = measure.measure_bins(classifier, data, options(bins=[10, 20]), range(7))
    counts = {row["bin"]: row["images"] for row in rows}
    assert counts == {"0-10": 12, "11-20": 12, "21+": 4}
    strategies = ["16 px", "24 px", "min", "max", "original", "original (no crop)"]
    assert [row["strategy"] for row in rows] == [*strategies, *strategies, *strategies[:4]]
    sizes = [row["size"] for row in rows if row["strategy"] in ("min", "max")]
    assert sizes == [8, 9, 12, 13, 33, 33]
    assert {(30, 9), (12, 20), (21, 13)} <= {tuple(shape) for shape in seen}, "some sizes changed"
    untouched = label_ranks(classifier, data, {0: [View("untouched")]}, range(7))[0]
    whole = [row for row in rows if row["strategy"] == "original (no crop)"]
    right = sum(row["top1"] * row["images"] for row in whole)
    small = [min(data.images[n][0].shape[1:]) <= 20 for n in data.order]
    assert right == pytest.approx(100 * (untouched[small] == 0).sum())


def test_strategy_that_a_model_refuses_is_left_out(classifier, capsys):
    tiny = Images([(torch.rand(3, 3, 9), 0), (torch.rand(3, 8, 8), 0)], lambda item: item, NAMES)
    two = Data("tiny", tiny, range(2))
    rows = measure.measure_bins(classifier, two, options(bins=[20]), range(7))
    assert [row["strategy"] for row in rows] == ["16 px", "24 px", "max"]
    assert "smaller than a patch" in capsys.readouterr().out


def test_augmentation_adds_log_probabilities_of_three_sizes(classifier, data):
    args = options(tta=True, tta_step=8, sizes=[24])
    columns = measure.columns_of(args, 16)
    ranks = label_ranks(classifier, data, columns, range(7))
    for index in data.order:
        image, label = data.images[index]
        crops = [View("crop", size)(image) for size in (16, 24, 32)]
        scores = sum(logits(classifier, crop).log_softmax(-1) for crop in crops)
        assert ranks["tta", 24, "+"][index] == (scores > scores[label]).sum()
    assert np.array_equal(ranks["tta", 24, "-"], ranks["accuracy", 24, ""])
    assert not np.array_equal(ranks["tta", 24, "+"], ranks["tta", 24, "-"]), "says nothing"


@pytest.mark.parametrize("workers", [1, 3])
def test_mixed_sizes_are_scored_as_one_by_one(classifier, data, monkeypatch, workers):
    seen = []
    scores = classifier.scores
    monkeypatch.setattr(classifier, "scores", lambda *a: seen.append(a[0]) or scores(*a))
    parallel = data._replace(workers=workers)
    together = label_ranks(classifier, parallel, {0: [View("untouched")]}, range(7))[0]
    assert max(len(batch) for batch in seen) > 1
    shapes = [shape for batch in seen for shape in [tuple(batch.shape[2:])] * len(batch)]
    assert sorted(shapes) == sorted(SHAPES * 4), "an image was resized"
    for index in data.order:
        image, label = data.images[index]
        scores = logits(classifier, image)
        assert together[index] == (scores > scores[label]).sum()


def test_labels_go_to_the_classes_of_the_model(classifier, data):
    """Data that know the classes in another order, and not all of them."""
    items = [data.images[index] for index in data.order]
    some_images = [(image, 6 - label) for image, label in items if label > 1]
    images = Images(some_images, lambda item: item, NAMES[:1:-1])
    args = options()
    some = measure.measure(classifier, Data("some", images, range(len(some_images))), args)
    order = [index for index in data.order if data.images[index][1] > 1]
    assert some == measure.measure(classifier, data._replace(order=order), args)


def test_gamma_scales_the_grid_in_its_block_only(classifier, tmp_path):
    """And goes on from the gamma of the checkpoint."""
    images = torch.rand(2, 3, 24, 32)
    encoder = classifier.model.vit.embeddings.positions
    reach = []
    hook = encoder.register_forward_pre_hook(lambda _, args: reach.append(encoder.config.gamma))
    plain, half = classifier.scores(images), classifier.scores(images, 0.5)
    hook.remove()
    assert reach == [1.0, 0.5]
    assert torch.equal(classifier.scores(images, 1.0), plain)
    assert not torch.allclose(half, plain, atol=1e-3)
    with pytest.raises(KeyError), scaled_grid(classifier.model, 2.0):
        raise KeyError
    assert encoder.config.gamma == 1
    half = Classifier(save(tmp_path / "half", "sinpos", gamma=0.5))
    whole = Classifier(save(tmp_path / "whole", "sinpos"))
    assert torch.equal(half.scores(images, 2.0), whole.scores(images))
    assert torch.equal(half.scores(images, 1.0), whole.scores(images, 0.5))


@pytest.mark.parametrize(("train", "alike"), [(None, False), (64, True)])
def test_gamma_knows_the_size_of_training(classifier, data, train, alike):
    """Takes the configuration's size (16), or the size that is given."""
    args = options(gamma=True, sizes=[64], trained_size=train)
    rows = measure.measure(classifier, data, args)["gamma"]
    assert [row["gamma"] for row in rows] == list(measure.GAMMA_RULES)
    assert (len({row["top5"] for row in rows}) == 1) is alike


def test_throughput_of_a_model_that_runs_out_of_memory(classifier, monkeypatch):
    """What fits once runs out of memory when it is timed, and is tried again with less."""
    batches = []

    def forward(pixels):
        batches.append(len(pixels))
        if len(pixels) > 37 or (len(pixels) == 37 and batches.count(37) == 5):
            raise torch.OutOfMemoryError
        assert pixels.shape[1:] == (3, 24, 24)
        return pixels

    monkeypatch.setattr(classifier, "forward", forward)
    # slow in a process with many objects
    monkeypatch.setattr(speed, "clear_device_cache", lambda garbage_collection: None)
    measured = throughput(classifier, 24, limit=64, warmup=6, runs=7)
    assert measured["batch"] == 33
    assert batches.count(37) == 5
    assert batches[-14:] == [37] + [33] * 13
    assert measured["images_per_second"] > 0

    def never_fits(pixels):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(classifier, "forward", never_fits)
    with pytest.raises(CommandError, match="not one image of 24 x 24"):
        throughput(classifier, 24, limit=64)


@pytest.mark.slow
def test_command_line_on_a_folder_of_images(run_cli, repo_root, tmp_path):
    """A model of two seeds, images of many sizes, every table."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(NAMES):
        folder = tmp_path / "photos/test" / name
        folder.mkdir(parents=True)
        for n, (height, width) in enumerate(SHAPES[::3]):
            pixels = rng.integers(0, 200, (height, width, 3), dtype=np.uint8) + 8 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{n}.png")
    for seed, name in enumerate("ab"):
        save(tmp_path / name, seed=seed)
    words = (
        "--dataset photos --model cape=a,b --sizes 16 24 --output out --device cpu --gamma --tta "
    )
    words += "--tta-step 8 --bins 10 20 --throughput --runs 2 --warmup 1 --max-batch 4"
    command = ["python", repo_root / "recipes/vit/evaluate.py", *words.split()]
    output = run_cli(*command, cwd=tmp_path).stdout
    tables = ("accuracy", "tta", "gamma", "bins", "throughput")
    assert "tables and plots: out/{accuracy,tta,gamma,bins,throughput}.{md,csv,png}" in output
    files = {f"{table}.{suffix}" for table in tables for suffix in ("md", "csv", "png")}
    assert {file.name for file in (tmp_path / "out").iterdir()} == files
    for table in tables:
        assert_lines(tmp_path / f"out/{table}.png", COLOURS[:1])
        text = (tmp_path / f"out/{table}.md").read_text()
        assert f"`{shlex.join(map(str, command))}`" in text
        assert "torch 2" in text
    rows = read_csv(tmp_path / "out/accuracy.csv")
    values = [float(row["top1"]) for row in rows if row["size"] == "24"]
    assert len(values) == 2
    assert f"{mean(values):.2f} ± {stdev(values):.2f}" in output
    assert [r["batch"] for r in read_csv(tmp_path / "out/throughput.csv")] == ["4", "4"]


@pytest.fixture(scope="module")
def digit_path(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "digits", names=digits()[1].names, channels=1)


def test_whole_images_are_squeezed_as_in_training(digit_path, tmp_path, capsys):
    """Squeezed to a square without crop, as finetune_hf.py tests its models."""
    words = ["--model", digit_path, "--protocol", "whole", "--limit", "40", "--sizes", "12", "16"]
    (tmp_path / "done").mkdir()  # of the user
    evaluate.main([*words, "--device", "cpu", "--output", str(tmp_path)])
    assert "| digits |" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "done").is_dir()
    test, classifier = digits()[1], Classifier(digit_path)
    for size, row in zip((12, 16), read_csv(tmp_path / "accuracy.csv"), strict=True):
        chosen = [test[number * len(test) // 40] for number in range(40)]
        right = [logits(classifier, View("whole", size)(image)).argmax() == label
                 for image, label in chosen]  # fmt: skip
        assert float(row["top1"]) == pytest.approx(100 * np.mean(right))


def test_interrupted_evaluation_goes_on(digit_path, tmp_path, monkeypatch):
    other = save(tmp_path / "other", names=digits()[1].names, channels=1, seed=1)
    words = ["--model", f"a={digit_path}", f"b={other}", "--output", str(tmp_path / "out")]
    words += ["--limit", "9", "--sizes", "16", "--device", "cpu"]
    work, measured = evaluate.measure, []

    def interrupted(classifier, data, args):
        measured.append(classifier.path)
        if len(measured) in (2, 4):
            raise KeyboardInterrupt
        return work(classifier, data, args)

    monkeypatch.setattr(evaluate, "measure", interrupted)
    for _ in range(2):  # without the option nothing is kept
        with pytest.raises(KeyboardInterrupt):
            evaluate.main(words)
    assert not list((tmp_path / "out").glob("*.md"))
    evaluate.main([*words, "--resume"])
    assert measured == [digit_path, other, digit_path, other, other]
    assert [row["model"] for row in read_csv(tmp_path / "out/accuracy.csv")] == ["a", "b"]
    assert not (tmp_path / "out" / evaluate.UNFINISHED).exists()


def test_default_sizes_are_the_papers():
    assert evaluate.default_sizes(224, 16) == [160, 224, 384, 672]
    assert evaluate.default_sizes(32, 4) == [24, 32, 56, 96]


BAD = [
    (["--sizes", "2"], "refuses images of 2 x 2 pixels"),
    (["--sizes", "16", "--tta", "--tta-step", "16"], "--tta-step 16 is not allowed with size 16"),
    (["--tta-step", "4"], "--tta-step has no effect without --tta"),
    (["--test-split", "dev"], "need --dataset"),
    (["--dataset", "/nowhere/at all"], "--dataset /nowhere/at all cannot be read"),
    (["--model", "nowhere/at all"], "--model nowhere/at all cannot be loaded"),
    (["--model", "/nowhere"], "--model /nowhere: no such folder"),
    (["--model", "ABSPOS", "--gamma"], "has position embedding 'abspos'"),
    (["--model", "STOCK", "--gamma"], "has stock positions"),
    (["--model", "COLOURS"], "7 classes of the model"),
    (["--model", "HEADLESS"], "has no weights for classifier"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused(words, message, digit_path, path, tmp_path):
    names = digits()[1].names
    if words[1] in ("ABSPOS", "STOCK"):
        save(tmp_path / words[1], words[1].lower(), names=names, channels=1)
    if words[1] == "HEADLESS":
        ViTForImageClassification(ViTConfig(**SIZES)).vit.save_pretrained(tmp_path / words[1])
    places = {name: str(tmp_path / name) for name in ("ABSPOS", "STOCK", "HEADLESS")}
    words = [{**places, "COLOURS": path}.get(word, word) for word in words]
    model_words = [] if "--model" in words else ["--model", digit_path]
    with pytest.raises(CommandError, match=re.escape(message)):
        evaluate.main([*model_words, *words, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_stock_model_may_be_of_one_size(tmp_path, capsys):
    """It is measured in half precision; one that cannot resize its positions says so."""
    stock = save(tmp_path / "stock", "stock", names=digits()[1].names, channels=1)
    words = ["--model", stock, "--sizes", "24", "--limit", "9", "--device", "cpu"]
    evaluate.main([*words, "--dtype", "bfloat16", "--output", str(tmp_path / "out")])
    assert "| stock |" in capsys.readouterr().out
    classifier = Classifier(stock)
    classifier.options.clear()
    with pytest.raises(CommandError, match="refuses images of 24 x 24 .* its size is 16; give"):
        measure.check(classifier, options())
