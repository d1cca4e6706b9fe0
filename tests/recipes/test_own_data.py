"""The user's data: complete and damaged data in several forms; tables beside images."""

import argparse
import csv
import io
import json
import re
import shutil

import pytest

pytest.importorskip("transformers")
import datasets
import numpy as np
import torch
from PIL import ExifTags, Image

from recipes.lab import data
from recipes.lab.steps import CommandError, run_main
from recipes.mt import finetune_hf as mt
from recipes.vit import data as vit_data
from recipes.vit import evaluate
from recipes.vit import finetune_hf as vit
from recipes.vit.data import digits
from tests.support.image_models import save
from tests.support.tables import read_csv


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("splits", [("train",), ("train", "validation")])
def test_folders_of_datasets_are_read(splits, tmp_path):
    """Folders as save_to_disk leaves them, and of files of tables."""
    rows = datasets.Dataset.from_dict({"en": [f"a {n}" for n in range(30)], "de": ["b"] * 30})
    datasets.DatasetDict(dict.fromkeys(splits, rows)).save_to_disk(tmp_path / "saved")
    for split in splits:
        (tmp_path / "tables").mkdir(exist_ok=True)
        rows.to_parquet(tmp_path / "tables" / f"{split}.parquet")
    expected = {"train": 30, "test": 30} if len(splits) == 2 else {"train": 27, "test": 3}
    for folder in ("saved", "tables"):
        parts = data.train_and_test(data.open_dataset(str(tmp_path / folder)))
        assert {name: len(part) for name, part in parts.items()} == expected
    rows.save_to_disk(tmp_path / "single")
    assert len(data.open_dataset(str(tmp_path / "single"))["train"]) == 30
    with pytest.raises(CommandError, match=r"--dataset .*nowhere cannot be read"):
        data.open_dataset(str(tmp_path / "nowhere"))


def test_single_file_is_tested_whole(tmp_path):
    """Tests all of it, not the part that training would split off."""
    path = save(tmp_path / "digits", names=digits()[1].names, channels=1)
    rows = {"image": [Image.new("L", (8, 8), n) for n in range(40)], "label": [*range(10)] * 4}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "pages.parquet")
    words = ["--model", path, "--dataset", str(tmp_path / "pages.parquet"), "--sizes", "16"]
    evaluate.main([*words, "--device", "cpu", "--output", str(tmp_path / "out")])
    (row,) = read_csv(tmp_path / "out/accuracy.csv")
    assert row["images"] == "40"


TABLES = {"empty.json": b"", "cut_off.json": b'{"en": "a"', "quote.csv": b'en,de\n"a,b\n'}
TABLES["no.parquet"] = b"en,de\na,b\n"


@pytest.mark.parametrize("name", TABLES)
def test_broken_tables_are_named(name, tmp_path):
    (tmp_path / name).write_bytes(TABLES[name])
    for option in ("--train-file", "--dataset"):
        words = [option, str(tmp_path / name), "--output", str(tmp_path / "out")]
        with pytest.raises(CommandError, match=rf"^{tmp_path / name}.*; give a .*file") as error:
            mt.main(words)
        assert "\n" not in str(error.value)


def read_rows(path, folder=False):
    """The rows of a file, by itself or of the folder that it is in."""
    opened = data.open_dataset(str(path.parent if folder else path))
    return [list(row.values()) for row in opened["train"]]


def write_rows(path, rows, end="\n"):
    """A table of the columns en and de, without quotes."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        lines = [json.dumps({"en": en, "de": de}) for en, de in rows]
    else:
        between = {".csv": ",", ".tsv": "\t"}[path.suffix]
        lines = [between.join(row) for row in (["en", "de"], *rows)]
    path.write_bytes("".join(f"{line}{end}" for line in lines).encode())


WORDS = ["null", "NA", "None", "nan", "NaN", "n/a", "NULL", "#N/A", "<NA>", "-inf", "good"]
ODD = "a\u2028b\x85c\x0bd\x0ce\x1cf"
FILES = [(".csv", False), (".tsv", False), (".csv", True), (".tsv", True), (".jsonl", True)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("suffix", "folder"), FILES)
def test_words_for_nothing_are_texts_and_only_line_feeds_end_rows(suffix, folder, end, tmp_path):
    """As in json; only an empty cell has no text."""
    cells = [[word, word.upper()] for word in WORDS] + [[ODD, "x"], ["y", ODD]]
    cells += [['"a', 'b"']] if suffix == ".tsv" else []  # which knows no quotes
    path = tmp_path / "tables" / f"train{suffix}"
    write_rows(path, cells, end)
    assert read_rows(path, folder) == cells


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_carriage_return_ends_no_row(suffix, tmp_path):
    path, rows = tmp_path / f"a{suffix}", [["a\rb", "x"], ["y", "z"]]
    write_rows(path, rows)
    assert read_rows(path) == rows
    write_rows(path, rows, "\r\n")
    with pytest.raises(CommandError, match="line 2 has a carriage return inside"):
        read_rows(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_keep_their_line_ends(end, tmp_path):
    cells = [["one\ntwo", "x"], ["y", "three\r\nfour"], ["z", "five\n\nsix"]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator=end).writerows([["en", "de"], *cells])
    assert read_rows(tmp_path / "a.csv") == cells


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_are_read_by_their_byte_order_mark(encoding, tmp_path):
    (tmp_path / "a.csv").write_bytes("en,de\ngrün,größer\n".encode(encoding))
    assert read_rows(tmp_path / "a.csv") == [["grün", "größer"]]


REFUSED = [
    ("a.csv", b"a,b\na,b\n\xe4,b", "a.csv: line 3 is not UTF-8"),
    ("a.tsv", b"a\tb\na\tb\n\xe4\tb", "a.tsv: line 3 is not UTF-8"),
    ("a.jsonl", b'{"en": "a"}\n{"en": "a"}\n{"en": "\xe4"}', "a.jsonl: line 3 is not UTF-8"),
    ("a.jsonl", '{"en": "grün"}\n'.encode("utf-16"), "a.jsonl: is in UTF-16; convert it to UTF-8"),
    ("a.jsonl", b'{"en": 1, "de": 2}\n' * 2, "the data have 1, which is no text"),
    ("a.jsonl", b'{"en": "a", "de": "b"}\n', "train: has 1 row, too few"),
]


@pytest.mark.parametrize("option", ["--train-file", "--dataset"])
@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_tables_that_cannot_be_used_are_refused(option, name, content, message, tmp_path):
    path = tmp_path / "tables" / name
    path.parent.mkdir()
    path.write_bytes(content)
    place = path if option == "--train-file" else path.parent
    with pytest.raises(CommandError, match=message):
        mt.main([option, str(place), "--output", str(tmp_path / "out")])


COLUMNS = argparse.Namespace(image_column=None, label_column=None)


def read_folder(path):
    (rows,) = data.open_dataset(str(path)).values()
    return vit_data.read_images(COLUMNS, rows, rows, 3)


@pytest.fixture
def photos(tmp_path):
    for number, label in enumerate(("dark", "light")):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for n in range(6):
            Image.new("RGB", (20, 16), (200 * number + n,) * 3).save(folder / f"{n}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("content", [b"", b"no image", None], ids=["empty", "text", "cut off"])
def test_broken_images_are_named(content, photos, tmp_path):
    broken = photos / "light/3.png"
    broken.write_bytes(broken.read_bytes()[:60] if content is None else content)
    with pytest.raises(CommandError, match=r"light/3.png cannot be read .*; repair the image"):
        vit.main(["--dataset", str(photos), "--output", str(tmp_path / "out")])


@pytest.mark.usefixtures("ended_loaders")
def test_broken_image_in_a_worker_process_is_named(photos, capsys):
    (photos / "light/3.png").write_bytes(b"")
    loader = torch.utils.data.DataLoader(read_folder(photos), 4, num_workers=1)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run_main(lambda: list(loader))
    (error,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: .*light/3.png cannot be read", error)


RAMP = np.arange(256).reshape(16, 16)
WIDE = {
    "16 bits": ((RAMP * 257).astype(np.uint16), "PNG"),
    "16 bits, big-endian": ((RAMP * 257).astype(">u2"), "TIFF"),
    "32 bits": ((RAMP * 257).astype(np.int32), "TIFF"),
    "floats up to 1": ((RAMP / 255).astype(np.float32), "TIFF"),
    "floats up to 255": (RAMP.astype(np.float32), "TIFF"),
}


def opened(values, format, declared, channels=1, mode=None, **options):
    """The image of a parquet file, declared as one or bytes alone, as a model gets it."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, format, **options)
    image = {"bytes": file.getvalue(), "path": None}
    features = datasets.Features({"image": datasets.Image(mode), "label": datasets.Value("int64")})
    columns = {"image": [image], "label": [0]}
    rows = datasets.Dataset.from_dict(columns, features=features if declared else None)
    return vit_data.read_images(COLUMNS, rows, rows, channels).read(0)[0].numpy()


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "bytes"])
@pytest.mark.parametrize("name", WIDE)
def test_images_of_more_than_8_bits_are_scaled(name, declared):
    for channels in (1, 3):
        assert (opened(*WIDE[name], declared, channels) == RAMP).all()


def test_a_declared_mode_does_not_cut_wide_images_off():
    assert (opened(*WIDE["16 bits"], True, 3, mode="RGB") == RAMP).all()


@pytest.mark.parametrize("values", [[0, 70000], [-1, 5], [0.0, 256.0], [0.0, np.nan]])
def test_images_without_a_known_white_are_refused(values):
    image = np.array([values]).astype(np.int32 if type(values[0]) is int else np.float32)
    with pytest.raises(CommandError, match="its values are .*; allowed: whole numbers from 0 to"):
        opened(image, "TIFF", False)


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "bytes"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_their_exif_says(orientation, declared):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    values = np.arange(6, dtype=np.uint8).reshape(2, 3)
    expected = {
        1: values,
        2: values[:, ::-1],
        3: values[::-1, ::-1],
        4: values[::-1],
        5: values.T,
        6: np.rot90(values, -1),
        7: values[::-1, ::-1].T,
        8: np.rot90(values),
    }[orientation]
    assert (opened(values, "PNG", declared, exif=exif)[0] == expected).all()


def test_images_are_told_from_others(photos):
    """By classes, number and pixels, also where they are not held."""

    def fingerprint(hold=False):
        images = read_folder(photos)
        return (images.hold() if hold else images).fingerprint()

    first = fingerprint()
    assert fingerprint(hold=True) == first
    Image.new("RGB", (20, 16), (1, 1, 1)).save(photos / "dark/2.png")
    changed = fingerprint()
    (photos / "light/3.png").unlink()
    shutil.copy(photos / "light/2.png", photos / "dark/6.png")
    (photos / "dark").rename(photos / "dusky")
    assert len({first, changed, fingerprint()}) == 3


def test_pairs_that_a_test_is_split_off_are_other_training_data(tmp_path, monkeypatch):
    last_arguments = []

    def train_all(*args):
        last_arguments.append(args[-1])
        raise CommandError("enough")

    monkeypatch.setattr(mt, "train_all", train_all)
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.csv", [[f"a b {name} {n}", f"x y {n}"] for n in range(40)])
    monkeypatch.chdir(tmp_path)
    words = ["--vocab-size", "30", "--output", "out", "--train-file", "train.csv"]
    for more in (["--test-file", "test.csv"], []):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with pytest.raises(CommandError, match="enough"):
            mt.main([*words, *more])
    assert len(set(last_arguments)) == 2


@pytest.mark.parametrize("classes", [0, 1])
def test_images_of_fewer_than_two_classes_are_refused(classes, photos, tmp_path):
    for folder in ("dark", "light")[classes:]:
        shutil.rmtree(photos / folder)
    message = "--label-column is missing: .*two classes" if classes else "--dataset .* cannot be"
    with pytest.raises(CommandError, match=message):
        vit.main(["--dataset", str(photos), "--output", str(tmp_path / "out")])


LABELS = ["null", "NA", "None", "nan", "a\u2028b", "good"]


@pytest.fixture
def numbered(tmp_path):
    """A folder of images, the brightness of each is its number."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(len(LABELS)):
        Image.new("RGB", (8, 8), (number,) * 3).save(folder / f"{number}.png")
    return folder


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_words_for_nothing_in_metadata_are_texts(numbered, encoding):
    rows = [f"{number}.png,{label}\n" for number, label in enumerate(LABELS)]
    (numbered / "metadata.csv").write_bytes("".join(["file_name,label\n", *rows]).encode(encoding))
    (rows,) = data.open_dataset(str(numbered)).values()
    assert rows["label"] == LABELS
    assert [image.getpixel((0, 0))[0] for image in rows["image"]] == list(range(len(LABELS)))


ROW_2 = "metadata.csv: row 2 .* file .* below its folder"
BAD_METADATA = [
    ("metadata.tsv", "file_name\tlabel\n0.png\ta\n", "is not read; write it as metadata.csv"),
    ("metadata.csv", "name,label\n0.png,a\n", "metadata.csv: needs the column file_name"),
    ("metadata.csv", "file_name,label\n0.png,\n1.png,a\n", "label: row 1 .* has no label"),
    ("metadata.csv", "file_name,label\n0.png,a\ngone.png,b\n", ROW_2),
    ("metadata.csv", "file_name,label\n0.png,a\n../x.png,b\n", ROW_2),
    ("metadata.csv", "file_name,label\n0.png,a\n/x.png,b\n", ROW_2),
    ("metadata.csv", "file_name,label\n0.png,a\n,b\n", ROW_2),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_METADATA)
def test_metadata_that_cannot_be_used_are_refused(numbered, name, text, message):
    (numbered / name).write_text(text)
    (numbered.parent / "x.png").touch()
    with pytest.raises(CommandError, match=message):
        read_folder(numbered)


@pytest.mark.parametrize("text", ["001", "1e5", "True", "0x1", "2020-01-01"])
@pytest.mark.parametrize(("suffix", "folder"), [(".csv", False), (".tsv", True)])
def test_columns_of_texts_hold_texts(suffix, folder, text, tmp_path):
    """Also where all would be numbers; the pair of an empty cell is left out."""
    path = tmp_path / "tables" / f"train{suffix}"
    write_rows(path, [[text, text], ["", text]])
    words = ["--dataset", str(path.parent)] if folder else ["--train-file", str(path)]
    options = [*words, "--test-split", "train", "--output", str(tmp_path / "out")]
    assert mt.given_data(mt.read_options(options)[0])["train"] == [(text, text)]


@pytest.mark.parametrize("type", [np.int32, np.uint16])
@pytest.mark.parametrize("largest", [255, 4095])
def test_images_of_fewer_bits_than_their_file_has_are_reported(type, largest):
    dark = Image.fromarray(np.full((8, 8), largest, type))
    with pytest.warns(UserWarning, match="at most 4095, nearly black .* its values by 257 or 16"):
        assert np.asarray(vit_data.eight_bits(dark)).max() == round(largest / 257)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [0, 4096])
def test_black_and_grey_images_are_not_reported(values):
    vit_data.eight_bits(Image.fromarray(np.full((8, 8), values, np.uint16)))
