"""Evaluation of image models without a model: geometry, bins, classes, tables, batch sizes."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics import top_k_accuracy_score

from recipes.lab import figures as lines
from recipes.lab.steps import CommandError
from recipes.vit import classifier as speed
from recipes.vit import evaluate, measure
from recipes.vit.classifier import match_classes
from recipes.vit.measure import View, rank_of


def test_crop_takes_the_centre_without_change_where_nothing_is_resized():
    image = torch.rand(3, 40, 60)  # the shorter side is int(35 / 0.875) already
    expected = image[:, 2:37, 12:47]
    assert torch.equal(View("crop", 35)(image), expected)
    assert torch.equal(View("crop", 35)(image.mT), expected.mT)


@pytest.mark.parametrize(
    ("size", "resized", "box"),
    [(70, (120, 80), (25, 5, 95, 75)), (20, (33, 22), (6, 1, 26, 21)), (8, (13, 9), (2, 0, 10, 8))],
)
def test_crop_equals_pillow(size, resized, box):
    """40 x 60 pixels, enlarged and reduced (with antialiasing), then cropped."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    expected = Image.fromarray(pixels).resize(resized, Image.Resampling.BILINEAR).crop(box)
    image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
    expected = torch.from_numpy(np.array(expected)).permute(2, 0, 1) / 255
    torch.testing.assert_close(View("crop", size)(image), expected, atol=1.5 / 255, rtol=0)


def test_originals_keep_their_shape():
    image = torch.rand(3, 35, 70)
    assert torch.equal(View("untouched")(image), image)
    assert View("whole", 24)(image).shape == (3, 24, 24)
    how = {"mode": "bilinear", "antialias": True}
    enlarged = torch.nn.functional.interpolate(image[None], size=(40, 80), **how)
    assert torch.equal(View("original")(image), enlarged[0, :, 2:37, 5:75])


def test_bins_equal_the_papers_bins():
    paper = "0-100 101-150 151-200 201-250 251-300 301-350 351-384 385+"
    assert [label for label, *_ in measure.size_bins(measure.BIN_EDGES)] == paper.split()


def test_best_of_each_bin_is_weighted_by_images():
    measured = [
        *(("0-9", "16 px", 10, 50.0), ("0-9", "min", 10, 70.0), ("0-9", "original", 10, 0.0)),
        *(("10+", "16 px", 30, 90.0), ("10+", "min", 30, 20.0)),
    ]
    common = {"model": "m", "checkpoint": "a", "data": "d", "size": 9, "top5": 100.0}
    names = ("bin", "strategy", "images", "top1")
    rows = [{**common, **dict(zip(names, values, strict=True))} for values in measured]
    page = evaluate.bin_table(rows)
    assert page[0].endswith("| images | 16 px | min | original | best of each bin |")
    assert page[2] == "| 0-9 | 10 | 50.00 | **70.00** (9) | 0.00 | 70.00 |"
    assert page[3] == "| 10+ | 30 | **90.00** | 20.00 (9) | - | 90.00 |"
    assert page[-1] == "| all | 40 | 80.00 | 32.50 | - | 85.00 |"


def test_plots_do_not_enlarge_small_differences(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **more: figures.append(figure))
    first, second = [99.9, 99.8], [100.0]
    table = {"a": {16: first, 24: first}, "b": {16: second, 24: second}}
    panel = lines.Panel(table, evaluate.TOP["top1"], "digits")
    lines.write_lines_figure(tmp_path / "plot.png", [panel], "size")
    low, high = figures[0].axes[0].get_ylim()
    assert high - low >= 5 - 1e-9
    assert low < 99.8 < 100 < high < 101
    assert len(figures[0].axes[0].collections) == 1  # a band for two seeds


def test_extremes_show_a_size_of_its_own():
    sizes = [(224, 300), (260, 260), (300, 224)]
    assert measure.extremes(sizes) == [(224, 224), sizes[0], sizes[2]]
    assert measure.extremes([(8, 8), (9, 30), (40, 10)]) == [(8, 8), (40, 10), (9, 30)]


def test_ranks_give_the_top_k_accuracy_of_scikit_learn():
    scores, right = torch.randn(200, 7), torch.randint(7, (200,))
    ranks = rank_of(scores, right)
    for k in range(1, 7):
        expected = top_k_accuracy_score(right, scores.numpy(), k=k, labels=range(7))
        assert (ranks < k).double().mean().item() == pytest.approx(expected)
    percent = measure.accuracies(ranks.numpy())
    assert percent["top5"] == pytest.approx(100 * (ranks < 5).double().mean().item())
    equal = torch.tensor([[1.0, 2.0, 2.0]] * 3)  # argmax takes the first
    assert rank_of(equal, torch.tensor([0, 1, 2])).tolist() == [2, 0, 1]


CLASSES = [
    (["b", "a"], ["A", "b"], [1, 0]),
    (["tabby cat"], ["dog", "Tabby_cat"], [1]),
    (["1", "10", *"23456789"], list("abcdefghij"), [0, 9, *range(1, 9)]),
    (["n01", "n02"], ["tench", "goldfish"], [0, 1]),
    (["crane", "tench"], ["crane", "tench", "crane"], None),  # ImageNet has two of them
    (["crane", "x", "tench"], ["crane", "crane", "tench"], [0, 1, 2]),
    (["a", "n02"], ["x", "a"], None),  # not by order, since "a" stands elsewhere
    (["0", "1", "2"], ["1", "2", "3"], None),  # not by number, since "1" stands elsewhere
    (["2", "3"], ["a", "b", "c", "3"], [2, 3]),
]


@pytest.mark.parametrize(("names", "labels", "expected"), CLASSES)
def test_classes_are_matched(names, labels, expected):
    if expected is None:
        with pytest.raises(CommandError, match="are not among"):
            match_classes(names, labels)
    else:
        assert match_classes(names, labels)[0] == expected


@pytest.mark.parametrize("fitting", [*range(9), 37, 127, 9999])
def test_largest_batch_is_found(fitting, monkeypatch):
    # slow in a process with many objects
    monkeypatch.setattr(speed, "clear_device_cache", lambda garbage_collection: None)

    def run(batch):
        calls.append(batch)
        if batch > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batch

    for limit in (1, 100, 5000):
        calls = []
        batch, largest = speed.largest_batch(run, limit), min(fitting, limit)
        assert max(calls) <= limit
        assert len(calls) <= 25
        assert batch == largest if largest < 128 else largest * 63 / 64 <= batch <= largest
    with pytest.raises(ZeroDivisionError):  # which is no lack of memory
        speed.largest_batch(lambda batch: 1 / 0, 8)


def test_runs_are_counted_and_synchronised():
    events, ticks = [], iter((10.0, 14.0))
    run, wait = (partial(events.append, event) for event in ("run", "wait"))
    how = {"synchronize": wait, "clock": lambda: events.append("clock") or next(ticks)}
    assert speed.images_per_second(run, 8, warmup=3, runs=5, **how) == 8 * 5 / 4.0
    expected = ["run"] * 3 + ["wait", "clock"] + ["run"] * 5 + ["wait", "clock"]
    assert events == expected
