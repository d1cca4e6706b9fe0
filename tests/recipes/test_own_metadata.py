"""Tables beside images, columns of texts, and images that are stored too dark."""

import argparse

import pytest

pytest.importorskip("transformers")

import numpy as np
from PIL import Image

from recipes.lab import data
from recipes.lab.steps import CommandError
from recipes.mt import finetune_hf as mt
from recipes.vit import data as vit_data

WORDS = ["null", "NA", "None", "nan", "a\u2028b", "good"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    """A folder of images, the brightness of each is its number."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(len(WORDS)):
        Image.new("RGB", (8, 8), (number,) * 3).save(folder / f"{number}.png")
    return folder


def describe(folder, words=WORDS, name="metadata.csv", encoding="utf-8", between=","):
    rows = [("file_name", "label"), *((f"{n}.png", word) for n, word in enumerate(words))]
    text = "".join(f"{between.join(row)}\n" for row in rows)
    (folder / name).write_bytes(text.encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_words_for_nothing_in_metadata_are_texts(photos, encoding):
    describe(photos, encoding=encoding)
    (rows,) = data.open_dataset(str(photos)).values()
    assert rows["label"] == WORDS
    assert [image.getpixel((0, 0))[0] for image in rows["image"]] == list(range(len(WORDS)))


def test_metadata_describe_each_split(photos):
    for split in ("train", "test"):
        (photos / split).mkdir()
        for file in sorted(photos.glob("*.png"))[:3]:
            (photos / split / file.name).write_bytes(file.read_bytes())
        describe(photos / split, ["NA", split, "b"])
    splits = data.open_dataset(str(photos))
    assert {name: rows["label"] for name, rows in splits.items()} == {
        "train": ["NA", "train", "b"],
        "test": ["NA", "test", "b"],
    }


def test_metadata_of_a_form_that_is_not_read_are_refused(photos):
    describe(photos, name="metadata.tsv", between="\t")
    with pytest.raises(CommandError, match=r"metadata\.tsv is not read; write it as metadata\.csv"):
        data.open_dataset(str(photos))


@pytest.mark.parametrize("file", ["gone.png", "../x.png", "/x.png", ""])
def test_a_file_that_metadata_name_and_is_not_there_is_named(photos, file):
    (photos / "metadata.csv").write_text(f"file_name,label\n0.png,a\n{file},b\n")
    with pytest.raises(CommandError, match=r"metadata\.csv: row 2 .* file .* below its folder"):
        data.open_dataset(str(photos))


def test_metadata_without_names_of_files_are_refused(photos):
    (photos / "metadata.csv").write_text("name,label\n0.png,a\n")
    with pytest.raises(CommandError, match=r"metadata\.csv: needs the column file_name"):
        data.open_dataset(str(photos))


def test_an_image_without_a_label_is_refused(photos):
    describe(photos, ["", "a", "b"])
    names = argparse.Namespace(image_column=None, label_column=None)
    (rows,) = data.open_dataset(str(photos)).values()
    with pytest.raises(CommandError, match="--label-column label: row 1 .* has none"):
        vit_data.read_images(names, rows, rows, 3)


NUMBERS = ["001", "1e5", "True", "0x1", "2020-01-01"]


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize(("suffix", "folder"), [(".csv", False), (".tsv", True)])
def test_columns_of_texts_hold_texts(suffix, folder, text, tmp_path):
    """Also where all would be numbers; the pair of an empty cell is left out."""
    path = tmp_path / "tables" / f"train{suffix}"
    path.parent.mkdir()
    between = {".csv": ",", ".tsv": "\t"}[suffix]
    path.write_text(f"en{between}de\n{text}{between}{text}\n{between}{text}\n")
    words = ["--dataset", str(path.parent)] if folder else ["--train-file", str(path)]
    options = [*words, "--test-split", "train", "--output", str(tmp_path / "out")]
    assert mt.given_data(mt.read_options(options)[0])["train"] == [(text, text)]


@pytest.mark.parametrize("type", [np.int32, np.uint16])
@pytest.mark.parametrize("largest", [255, 4095])
def test_images_of_fewer_bits_than_their_file_has_are_reported(type, largest):
    dark = Image.fromarray(np.full((8, 8), largest, type))
    with pytest.warns(UserWarning, match="at most 4095, nearly black .* multiplied by 257 or 16"):
        assert np.asarray(vit_data.eight_bits(dark)).max() == round(largest / 257)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [0, 4096])
def test_black_and_grey_images_are_not_reported(values):
    vit_data.eight_bits(Image.fromarray(np.full((8, 8), values, np.uint16)))
